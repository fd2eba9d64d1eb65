"""Converts rotary settings between ModelConfig and Hugging Face's `rope_parameters`.

Older files have `rope_theta` and `rope_scaling`, from which transformers makes `rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.huggingface.family import Conversion
from megatron.checkpoint.names import shown
from megatron.config import ModelConfig
from megatron.config.registries import ROPE_SCALINGS
from megatron.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Fields of ModelConfig for the RoPE scaling -> keys of rope_parameters.
_KEYS = {
    "rope_scaling_factor": "factor",
    "rope_original_max_position_embeddings": "original_max_position_embeddings",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_beta_slow": "beta_slow",
    "rope_beta_fast": "beta_fast",
}
# The values that transformers uses if a key is null, 0 or absent. Other keys have no default.
_HF_DEFAULTS = {"beta_slow": 1.0, "beta_fast": 32.0}
# Key -> the value with which transformers treats the key as absent. For all other keys it is null.
_WITHOUT_EFFECT = {"truncate": True, "partial_rotary_factor": 1.0}
# Settings outside rope_parameters -> the equivalent keys in rope_parameters.
_OUTSIDE = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
_OUTSIDE_PARTIAL = {**_OUTSIDE, "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}


def _to_hf(model: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.rope_scaling_type is not None:
        rope["rope_type"] = model.rope_scaling_type
        for name in ROPE_SCALINGS[model.rope_scaling_type].settings:
            rope[_KEYS[name]] = getattr(model, name)
    return {"rope_parameters": rope}


def check_numbers(settings: Mapping[str, Any]) -> None:
    """Raises UserError for a rotary setting of a config.json that is not a number. transformers would fail in
    a computation, without naming the setting."""
    for rope in (settings.get("rope_parameters"), settings.get("rope_scaling")):
        if not isinstance(rope, dict):
            continue
        kind = rope.get("rope_type", rope.get("type"))
        if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
            continue
        for field in ROPE_SCALINGS[kind].settings:
            key = _KEYS[field]
            # YaRN's factor may be null: it is then the ratio of two context lengths.
            optional = key in _HF_DEFAULTS or (kind == "yarn" and key == "factor")
            if key in rope and not (rope[key] is None and optional):
                _expect_number(key, rope[key], kind)


def _expect_number(key: str, value: Any, kind: str) -> None:
    if type(value) not in (int, float):
        raise UserError(
            f"the model's rope_parameters have {key} = {one_line(value)} with rope_type {kind}: expected a "
            "number"
        )


def _to_megatron(hf_config: PreTrainedConfig, read: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns fields of ModelConfig. read: keys of rope_parameters that the caller converts."""
    found = getattr(hf_config, "rope_parameters", None) or {}
    if not isinstance(found, dict):
        raise UserError(f"the model's rope_parameters are {one_line(found)}: expected an object")
    rope: dict[str, Any] = dict(found)
    kind = rope.pop("rope_type", "default")
    if not isinstance(kind, str) or (kind != "default" and kind not in ROPE_SCALINGS):
        raise UserError(
            f"the model's rope_parameters are of rope_type {one_line(kind)}: expected default, "
            f"{' or '.join(ROPE_SCALINGS)}"
        )
    values = {"rotary_base": rope.pop("rope_theta", 10000.0)}
    if kind != "default":
        for name in ROPE_SCALINGS[kind].settings:
            value = rope.pop(_KEYS[name], None)
            values[name] = value or _HF_DEFAULTS.get(_KEYS[name], value)
        if kind == "yarn" and values["rope_scaling_factor"] is None:
            original = values["rope_original_max_position_embeddings"]
            values["rope_scaling_factor"] = hf_config.max_position_embeddings / original
    for name, value in values.items():
        _expect_number(_KEYS.get(name, "rope_theta"), value, kind)
    if kind != "default":
        values["rope_scaling_type"] = kind
    without_effect = {**_WITHOUT_EFFECT, "type": kind}  # an older name of rope_type
    for key, value in rope.items():
        # transformers adds the model's context length if the file has none.
        unused = key in read or (key == "original_max_position_embeddings" and kind in ("default", "linear"))
        if not unused and value != without_effect.get(key):
            raise UserError(
                f"the model's rope_parameters have {one_line(key)} = {one_line(value)}, which has no "
                f"equivalent in this program with rope_type {kind}"
            )
    values["rotary_base"] = float(values["rotary_base"])
    return values


def _check_outside_settings(
    settings: Mapping[str, Any], hf_config: PreTrainedConfig, keys: Mapping[str, str] = _OUTSIDE
) -> None:
    """Raises UserError for a rotary setting of a config.json that differs from what transformers uses.

    transformers prefers rope_scaling to rope_parameters, and uses settings outside both only for missing
    keys. keys: name of a setting outside -> its key inside.
    """
    used = getattr(hf_config, "rope_parameters", None) or {}
    outside = {name: (settings.get(name), key) for name, key in keys.items()}
    if settings.get("rope_scaling") and settings.get("rope_parameters"):
        outside |= {f"rope_parameters.{key}": (v, key) for key, v in settings["rope_parameters"].items()}
    for name, (value, key) in outside.items():
        if value is not None and value != used.get(key):
            raise UserError(
                f"the model has {shown(name)} = {one_line(value)}, but transformers uses {key} = "
                f"{one_line(used.get(key))} of rope_parameters or rope_scaling: remove the wrong one"
            )


ROPE = Conversion(
    megatron=("rotary_base", "rope_scaling_type", *_KEYS),
    hf=("rope_parameters", "rope_scaling", *_OUTSIDE),
    to_hf=_to_hf,
    to_megatron=_to_megatron,
    check_file=_check_outside_settings,
)


def _partial_to_hf(model: ModelConfig) -> dict[str, Any]:
    rope = _to_hf(model)["rope_parameters"]
    return {"rope_parameters": {**rope, "partial_rotary_factor": model.rotary_percent}}


def _partial_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    rope = getattr(hf_config, "rope_parameters", None)
    part = rope.get("partial_rotary_factor", 1.0) if isinstance(rope, dict) else 1.0
    if type(part) not in (int, float) or not 0 < part <= 1:
        raise UserError(
            f"the model rotates {one_line(part)} of each head: expected a number above 0 and at most 1"
        )
    return {**_to_megatron(hf_config, ("partial_rotary_factor",)), "rotary_percent": float(part)}


PARTIAL_ROPE = Conversion(
    megatron=(*ROPE.megatron, "rotary_percent"),
    hf=("rope_parameters", "rope_scaling", *_OUTSIDE_PARTIAL),
    to_hf=_partial_to_hf,
    to_megatron=_partial_to_megatron,
    check_file=partial(_check_outside_settings, keys=_OUTSIDE_PARTIAL),
)
"""The conversion for families that may rotate only a part of each head."""
