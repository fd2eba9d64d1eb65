"""Rotary settings: ours, and `rope_parameters` of a Hugging Face configuration.

Older files have `rope_theta` and `rope_scaling`, from which transformers makes `rope_parameters`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.checkpoint.convert.huggingface.family import Conversion
from megatron.checkpoint.integrity.names import one_line
from megatron.config import ConfigError, ModelConfig
from megatron.config.registries import ROPE_SCALINGS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Our fields of the scaling, and their keys.
_KEYS = {
    "rope_scaling_factor": "factor",
    "rope_original_max_position_embeddings": "original_max_position_embeddings",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_beta_slow": "beta_slow",
    "rope_beta_fast": "beta_fast",
}
# Values that say the same as no value. `type` is an old name of `rope_type`.
_WITHOUT_EFFECT = {"type": None, "attention_factor": None, "truncate": True, "partial_rotary_factor": 1.0}


def _to_theirs(model: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.rope_scaling_type is not None:
        rope["rope_type"] = model.rope_scaling_type
        for name in ROPE_SCALINGS[model.rope_scaling_type].settings:
            rope[_KEYS[name]] = getattr(model, name)
    return {"rope_parameters": rope}


def _to_ours(their_config: PreTrainedConfig, read: tuple[str, ...] = ()) -> dict[str, Any]:
    """read: keys of rope_parameters that the caller reads."""
    found = getattr(their_config, "rope_parameters", None) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"the model's rope_parameters are {one_line(found)}: expected an object")
    rope: dict[str, Any] = dict(found)
    kind = rope.pop("rope_type", "default")
    if not isinstance(kind, str) or (kind != "default" and kind not in ROPE_SCALINGS):
        raise ConfigError(
            f"the model's rope_parameters are of rope_type {one_line(kind)}: expected default, "
            f"{' or '.join(ROPE_SCALINGS)}"
        )
    values = {"rotary_base": rope.pop("rope_theta", 10000.0)}
    if kind != "default":
        values["rope_scaling_type"] = kind
        for name in ROPE_SCALINGS[kind].settings:
            if rope.get(_KEYS[name]) is not None:
                values[name] = rope.pop(_KEYS[name])
    for name, value in values.items():
        if name != "rope_scaling_type" and type(value) not in (int, float):
            raise ConfigError(f"the model's rope_parameters have {_KEYS.get(name, name)} = {one_line(value)}")
    for key, value in rope.items():
        # transformers adds the context of the model itself if the file has none.
        unused = key in read or (key == "original_max_position_embeddings" and kind in ("default", "linear"))
        if value is not None and not unused and key != "type" and value != _WITHOUT_EFFECT.get(key):
            raise ConfigError(
                f"the model's rope_parameters have {one_line(key)} = {one_line(value)}, which has no "
                f"equivalent here with rope_type {kind}"
            )
    values["rotary_base"] = float(values["rotary_base"])
    return values


ROPE = Conversion(
    ours=("rotary_base", "rope_scaling_type", *_KEYS),
    theirs=("rope_parameters", "rope_theta", "rope_scaling"),
    to_theirs=_to_theirs,
    to_ours=_to_ours,
)


def _partial_to_theirs(model: ModelConfig) -> dict[str, Any]:
    rope = _to_theirs(model)["rope_parameters"]
    return {"rope_parameters": {**rope, "partial_rotary_factor": model.rotary_percent}}


def _partial_to_ours(their_config: PreTrainedConfig) -> dict[str, Any]:
    rope = getattr(their_config, "rope_parameters", None)
    part = rope.get("partial_rotary_factor", 1.0) if isinstance(rope, dict) else 1.0
    if type(part) not in (int, float) or not 0 < part <= 1:
        raise ConfigError(
            f"the model rotates {one_line(part)} of each head: expected a number above 0 and at most 1"
        )
    return {**_to_ours(their_config, ("partial_rotary_factor",)), "rotary_percent": float(part)}


PARTIAL_ROPE = Conversion(
    ours=(*ROPE.ours, "rotary_percent"),
    theirs=(*ROPE.theirs, "rotary_emb_base", "rotary_pct"),
    to_theirs=_partial_to_theirs,
    to_ours=_partial_to_ours,
)
"""For families in which a part of each head may be rotated."""
