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


def _to_ours(their_config: PreTrainedConfig) -> dict[str, Any]:
    rope: dict[str, Any] = dict(getattr(their_config, "rope_parameters", None) or {})
    kind = rope.pop("rope_type", "default")
    if kind != "default" and kind not in ROPE_SCALINGS:
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
        unused = key == "original_max_position_embeddings" and kind in ("default", "linear")
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
