"""Converts rotary settings between ModelConfig and Hugging Face's `rope_parameters`.

Older files have `rope_theta` and `rope_scaling`, from which transformers makes `rope_parameters`. Models with
a sliding window in some layers (`layer_types`) have `rope_parameters` for each kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.huggingface.family import Conversion, checked_count
from megatron.checkpoint.names import shown
from megatron.config import ModelConfig
from megatron.config.registries import ROPE_SCALINGS
from megatron.config.sections.layer_pattern import (
    FULL,
    NO_ROTARY,
    ROTARY,
    ROTARY_PATTERN,
    WINDOW,
    WINDOW_PATTERN,
)
from megatron.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Fields of ModelConfig for RoPE scaling -> keys of rope_parameters. Their values are numbers.
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
# Key -> a value with which transformers treats the key as absent. For all other keys this value is null.
_WITHOUT_EFFECT = {"truncate": True, "partial_rotary_factor": 1.0}
# Settings outside rope_parameters -> the equivalent keys in rope_parameters.
_OUTSIDE = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
_OUTSIDE_PARTIAL = {**_OUTSIDE, "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}


def _to_hf(model: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.rope_scaling_type is not None:
        rope["rope_type"] = model.rope_scaling_type
        for name in _numbers(model.rope_scaling_type):
            rope[_KEYS[name]] = getattr(model, name)
        if model.rope_scaling_type == "yarn" and model.rope_exact_range:
            rope["truncate"] = False
    return {"rope_parameters": rope}


def _numbers(kind: str) -> list[str]:
    """Returns the fields in `_KEYS` that a kind of RoPE scaling has."""
    return [name for name in ROPE_SCALINGS[kind].settings if name in _KEYS]


def check_numbers(settings: Mapping[str, Any]) -> None:
    """Raises UserError for a rotary setting of a config.json that is not a number. Without this check
    transformers fails in a computation, with an error that does not name the setting."""
    found = [settings.get("rope_parameters"), settings.get("rope_scaling")]
    found += found[0].values() if isinstance(found[0], dict) else []
    for rope in found:
        if not isinstance(rope, dict):
            continue
        kind = rope.get("rope_type", rope.get("type"))
        if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
            continue
        for field in _numbers(kind):
            key = _KEYS[field]
            # YaRN's factor may be null. It is then the ratio of two context lengths.
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
    """Returns fields of ModelConfig for the rotary settings. read: keys of rope_parameters that the caller
    converts."""
    found = getattr(hf_config, "rope_parameters", None) or {}
    if not isinstance(found, dict):
        raise UserError(f"the model's rope_parameters are {one_line(found)}: expected an object")
    return _fields_of(found, hf_config, read)


def _fields_of(
    found: Mapping[str, Any], hf_config: PreTrainedConfig, read: tuple[str, ...] = ()
) -> dict[str, Any]:
    rope = dict(found)
    kind = rope.pop("rope_type", "default")
    if not isinstance(kind, str) or (kind != "default" and kind not in ROPE_SCALINGS):
        raise UserError(
            f"the model's rope_parameters are of rope_type {one_line(kind)}: expected default, "
            f"{' or '.join(ROPE_SCALINGS)}"
        )
    values = {"rotary_base": rope.pop("rope_theta", 10000.0)}
    if kind != "default":
        for name in _numbers(kind):
            value = rope.pop(_KEYS[name], None)
            values[name] = value or _HF_DEFAULTS.get(_KEYS[name], value)
        if kind == "yarn" and values["rope_scaling_factor"] is None:
            original = values["rope_original_max_position_embeddings"]
            values["rope_scaling_factor"] = hf_config.max_position_embeddings / original
    for name, value in values.items():
        _expect_number(_KEYS.get(name, "rope_theta"), value, kind)
    if kind != "default":
        values["rope_scaling_type"] = kind
    if kind == "yarn" and not rope.pop("truncate", True):  # transformers treats null and 0 as false
        values["rope_exact_range"] = True
    without_effect = {**_WITHOUT_EFFECT, "type": kind}  # "type" is an older name of rope_type
    if kind == "yarn" and type(rope.get("attention_factor")) is float:
        used = 0.1 * math.log(values["rope_scaling_factor"]) + 1.0  # the default of transformers
        if math.isclose(rope["attention_factor"], used, rel_tol=1e-9):
            del rope["attention_factor"]
    for key, value in rope.items():
        # transformers adds the model's context length to a file that has none.
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

    transformers prefers rope_scaling to rope_parameters, and uses settings outside of both only for keys that
    are missing inside. keys: name of a setting outside -> its key inside.
    """
    used = getattr(hf_config, "rope_parameters", None) or {}
    _compare_with_used(settings, settings.get("rope_parameters"), used, keys)


def _compare_with_used(
    settings: Mapping[str, Any], inside: Any, used: Mapping[str, Any], keys: Mapping[str, str]
) -> None:
    """Makes the comparison of `_check_outside_settings`. inside: rope_parameters in the file. used: the
    rope_parameters that transformers uses."""
    outside = {name: (settings.get(name), key) for name, key in keys.items()}
    if settings.get("rope_scaling") and inside:
        outside |= {f"rope_parameters.{key}": (v, key) for key, v in inside.items()}
    for name, (value, key) in outside.items():
        if value is not None and value != used.get(key):
            raise UserError(
                f"the model has {shown(name)} = {one_line(value)}, but transformers uses {key} = "
                f"{one_line(used.get(key))} of rope_parameters or rope_scaling: remove the wrong one"
            )


ROPE = Conversion(
    megatron=("rotary_base", "rope_scaling_type", *_KEYS, "rope_exact_range"),
    hf=("rope_parameters", "rope_scaling", *_OUTSIDE),
    to_hf=_to_hf,
    to_megatron=_to_megatron,
    check_file=_check_outside_settings,
)


def _partial_to_hf(model: ModelConfig) -> dict[str, Any]:
    rope = _to_hf(model)["rope_parameters"]
    return {"rope_parameters": {**rope, "partial_rotary_factor": model.rotary_percent}}


def _partial_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    part = _part_of(getattr(hf_config, "rope_parameters", None))
    return {**_to_megatron(hf_config, ("partial_rotary_factor",)), "rotary_percent": part}


def _part_of(rope: Any, default: float = 1.0) -> float:
    """Returns the part of each head that is rotated, from 0 to 1."""
    part = rope.get("partial_rotary_factor", default) if isinstance(rope, dict) else default
    if type(part) not in (int, float) or not 0 < part <= 1:
        raise UserError(
            f"the model rotates {one_line(part)} of each head: expected a number above 0 and at most 1"
        )
    return float(part)


PARTIAL_ROPE = Conversion(
    megatron=(*ROPE.megatron, "rotary_percent"),
    hf=("rope_parameters", "rope_scaling", *_OUTSIDE_PARTIAL),
    to_hf=_partial_to_hf,
    to_megatron=_partial_to_megatron,
    check_file=partial(_check_outside_settings, keys=_OUTSIDE_PARTIAL),
)
"""The conversion for families that may rotate only a part of each head."""

_FACTORS = ("mscale", "mscale_all_dim")


def _latent_to_hf(model: ModelConfig) -> dict[str, Any]:
    rope = _to_hf(model)["rope_parameters"]
    if model.rope_scaling_type == "yarn":
        rope |= {name: getattr(model, name) for name in _FACTORS}
    return {"rope_parameters": rope}


def _latent_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    """Returns fields of ModelConfig. transformers uses the two factors (mscale, mscale_all_dim) only if both
    are above 0, and mscale_all_dim alone only for the attention scores."""
    rope = getattr(hf_config, "rope_parameters", None)
    fields = _to_megatron(hf_config, _FACTORS)
    if fields.get("rope_scaling_type") != "yarn" or not isinstance(rope, dict):
        return fields
    turned, scores = (rope.get(name) or 0.0 for name in _FACTORS)
    for name, value in zip(_FACTORS, (turned, scores), strict=True):
        _expect_number(name, value, "yarn")
    if scores and not turned:
        raise UserError(
            f"the model's rope_parameters have mscale_all_dim = {scores} without mscale, which has no "
            "equivalent in this program: expected both"
        )
    return fields | ({"mscale": float(turned), "mscale_all_dim": float(scores)} if scores else {})


def _needed_factors(model: ModelConfig) -> dict[str, Any]:
    return {} if model.mscale_all_dim or model.rope_scaling_type != "yarn" else {"mscale": 1.0}


LATENT_ROPE = replace(
    ROPE,
    megatron=(*ROPE.megatron, *_FACTORS),
    to_hf=_latent_to_hf,
    to_megatron=_latent_to_megatron,
    needed=_needed_factors,
)
"""The conversion for families with latent attention, whose YaRN has two more factors."""

_FULL, _SLIDING = KINDS = "full_attention", "sliding_attention"


def _layers_to_hf(model: ModelConfig) -> dict[str, Any]:
    full = _to_hf(model)["rope_parameters"]
    base = model.window_rotary_base or model.rotary_base
    sliding = {"rope_type": "default", "rope_theta": base} if model.window_pattern else full
    return {**_kinds_to_hf(model), "rope_parameters": {_FULL: full, _SLIDING: sliding}}


def _kinds_to_hf(model: ModelConfig) -> dict[str, Any]:
    return {
        "layer_types": [_SLIDING if model.has_window(layer) else _FULL for layer in range(model.num_layers)],
        # transformers needs a number even if no layer has a window.
        "sliding_window": model.window_size or model.max_position_embeddings,
    }


def _kinds_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    """Returns fields of ModelConfig: the size of the window, and the layers that have it."""
    kinds = hf_config.layer_types
    if (
        not isinstance(kinds, list)
        or len(kinds) != hf_config.num_hidden_layers
        or set(kinds) - {_FULL, _SLIDING}
    ):
        raise UserError(
            f"the model has layer_types = {one_line(kinds)}: expected {_FULL} or {_SLIDING} for each of the "
            f"{hf_config.num_hidden_layers} layers"
        )
    if _SLIDING not in kinds:
        return {}
    size = checked_count("sliding_window", hf_config.sliding_window)
    letters = [WINDOW if kind == _SLIDING else FULL for kind in kinds]
    pattern = WINDOW_PATTERN.parse(letters, len(kinds))
    return {"window_size": size} | ({"window_pattern": pattern} if _FULL in kinds else {})


def _layers_to_megatron(hf_config: PreTrainedConfig, read: tuple[str, ...] = ()) -> dict[str, Any]:
    windows, by_kind = _kinds_to_megatron(hf_config), hf_config.rope_parameters
    if by_kind.keys() != {_FULL, _SLIDING} or not all(isinstance(rope, dict) for rope in by_kind.values()):
        raise UserError(
            f"the model's rope_parameters are {one_line(by_kind)}: expected an object for {_FULL} and one "
            f"for {_SLIDING}"
        )
    if not windows:
        return _fields_of(by_kind[_FULL], hf_config, read)
    sliding = _fields_of(by_kind[_SLIDING], hf_config, read)
    if "window_pattern" not in windows:
        return {**windows, **sliding}
    if "rope_scaling_type" in sliding:
        raise UserError(
            f"the model's rope_parameters of {_SLIDING} are of rope_type {sliding['rope_scaling_type']}: "
            "expected default"
        )
    fields = _fields_of(by_kind[_FULL], hf_config, read)
    if sliding["rotary_base"] != fields["rotary_base"]:
        fields["window_rotary_base"] = sliding["rotary_base"]
    return {**windows, **fields}


def _check_layers(settings: Mapping[str, Any], hf_config: PreTrainedConfig) -> None:
    """Raises UserError for a setting of a config.json that differs from what transformers uses."""
    by_kind, inside = hf_config.rope_parameters, settings.get("rope_parameters") or {}
    _compare_with_used(settings, inside.get(_FULL), by_kind[_FULL], _OUTSIDE)
    local = {"rope_local_base_freq": settings.get("rope_local_base_freq")}
    _compare_with_used(local, None, by_kind[_SLIDING], {"rope_local_base_freq": "rope_theta"})
    _check_pattern(settings, hf_config)


def _check_pattern(settings: Mapping[str, Any], hf_config: PreTrainedConfig) -> None:
    pattern = settings.get("sliding_window_pattern")
    if type(pattern) is int and pattern > 0:
        kinds = [
            _SLIDING if layer % pattern else _FULL for layer in range(1, hf_config.num_hidden_layers + 1)
        ]
        if kinds != hf_config.layer_types:
            raise UserError(
                f"the model has sliding_window_pattern = {pattern}, but transformers uses layer_types = "
                f"{one_line(hf_config.layer_types)}: remove the wrong one"
            )


LAYERED_ROPE = Conversion(
    megatron=(*ROPE.megatron, "window_size", "window_pattern", "window_rotary_base"),
    hf=(*ROPE.hf, "rope_local_base_freq", "sliding_window", "sliding_window_pattern", "layer_types"),
    to_hf=_layers_to_hf,
    to_megatron=_layers_to_megatron,
    check_file=_check_layers,
)
"""The conversion for families with a sliding window in some layers, and different RoPE settings for both
kinds."""


def partial_layered_rope(default: float) -> Conversion:
    """Returns `LAYERED_ROPE` for families in which layers with a window may also rotate a part of each head
    that differs from the part in full layers. default: the part (0 to 1) if config.json does not have it."""

    def to_hf(model: ModelConfig) -> dict[str, Any]:
        settings = _layers_to_hf(model)
        for has_window, kind in enumerate((_FULL, _SLIDING)):
            part = {"partial_rotary_factor": model.of_kind(bool(has_window)).rotary_percent}
            settings["rope_parameters"][kind] = settings["rope_parameters"][kind] | part
        return settings

    def to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
        fields = _layers_to_megatron(hf_config, ("partial_rotary_factor",))
        full, sliding = (_part_of(hf_config.rope_parameters[kind], default) for kind in (_FULL, _SLIDING))
        if "window_pattern" not in fields:
            return fields | {"rotary_percent": sliding if "window_size" in fields else full}
        own = {"window_rotary_percent": sliding} if sliding != full else {}
        return fields | {"rotary_percent": full} | own

    return replace(
        LAYERED_ROPE,
        megatron=(*LAYERED_ROPE.megatron, "rotary_percent", "window_rotary_percent"),
        to_hf=to_hf,
        to_megatron=to_megatron,
    )


def _windows_to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
    fields = {**_to_megatron(hf_config), **_kinds_to_megatron(hf_config)}
    return fields | {"window_rope_scaling": fields.keys() >= {"window_pattern", "rope_scaling_type"}}


def _scaling_in_windows(model: ModelConfig) -> dict[str, Any]:
    return {"window_rope_scaling": bool(model.window_pattern and model.rope_scaling_type)}


def _check_windows(settings: Mapping[str, Any], hf_config: PreTrainedConfig) -> None:
    _check_outside_settings(settings, hf_config)
    _check_pattern(settings, hf_config)


WINDOWS = Conversion(
    megatron=(*ROPE.megatron, "window_size", "window_pattern", "window_rope_scaling"),
    hf=(*ROPE.hf, "sliding_window", "sliding_window_pattern", "layer_types"),
    to_hf=lambda model: {**_to_hf(model), **_kinds_to_hf(model)},
    to_megatron=_windows_to_megatron,
    needed=_scaling_in_windows,
    check_file=_check_windows,
)
"""The conversion for families with a sliding window in some layers, and equal RoPE settings for all
layers."""


def rotary_in_windows(without_windows: bool) -> Conversion:
    """Returns the conversion for families in which only layers with a window have rotary embeddings.
    without_windows: whether all layers have them in a model without `sliding_window`."""

    def pattern(has_window: Sequence[bool]) -> tuple[str, ...] | None:
        letters = [ROTARY if each else NO_ROTARY for each in has_window]
        return None if all(has_window) else ROTARY_PATTERN.parse(letters, len(letters))

    def is_plain(model: ModelConfig) -> bool:
        return without_windows and model.window_size is None and model.no_rope_freq is None

    def to_hf(model: ModelConfig) -> dict[str, Any]:
        return WINDOWS.to_hf(model) | ({"sliding_window": None} if is_plain(model) else {})

    def to_megatron(hf_config: PreTrainedConfig) -> dict[str, Any]:
        fields = WINDOWS.to_megatron(hf_config)
        if without_windows and hf_config.sliding_window is None:
            return fields
        return fields | {"no_rope_freq": pattern([kind == _SLIDING for kind in hf_config.layer_types])}

    def needed(model: ModelConfig) -> dict[str, Any]:
        has_window = [model.has_window(layer) for layer in range(model.num_layers)]
        rotary = {} if is_plain(model) else {"no_rope_freq": pattern(has_window)}
        return _scaling_in_windows(model) | rotary

    return Conversion(
        megatron=(*WINDOWS.megatron, "no_rope_freq"),
        hf=WINDOWS.hf,
        to_hf=to_hf,
        to_megatron=to_megatron,
        needed=needed,
        # These classes use sliding_window_pattern if a file has no layer_types.
        check_file=_check_outside_settings,
    )


# Types that only transformers 5 has. Their classes apply rope_scaling to all layers.
_ONLY_NEW = ("mellum", "mimo_v2_flash", "laguna")


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary settings of a config.json with `rope_parameters` in the form that transformers 4,
    vLLM before 0.24 and llama.cpp read. transformers 5 reads the same values from this form.
    """
    kind, rope = settings["model_type"], settings.get("rope_parameters")
    if not rope or kind in _ONLY_NEW:
        return {}
    full = rope.get(_FULL, rope)
    names = _OUTSIDE_PARTIAL if kind == "gpt_neox" else _OUTSIDE
    flat = {name: full[key] for name, key in names.items() if key in full}
    scaling = {key: value for key, value in full.items() if key not in names.values()}
    if kind == "olmo2":  # in transformers 4 only this class expects the older name
        scaling = {"type": scaling.pop("rope_type"), **scaling}
    flat["rope_scaling"] = None if "default" in scaling.values() else scaling
    if kind == "gemma3_text":
        flat["rope_local_base_freq"] = rope[_SLIDING]["rope_theta"]
    return flat


def is_lost_in_flat_settings(settings: Mapping[str, Any]) -> bool:
    """Returns whether `flat_settings` would lose the rotary settings of layers with a window."""
    rope = settings.get("rope_parameters") or {}
    if _SLIDING not in settings.get("layer_types", ()) or _SLIDING not in rope:
        return False
    if settings["model_type"] in _ONLY_NEW:
        return False
    has_own_base = settings["model_type"] == "gemma3_text"
    base = rope[_SLIDING if has_own_base else _FULL]["rope_theta"]
    return rope[_SLIDING] != {"rope_type": "default", "rope_theta": base}
