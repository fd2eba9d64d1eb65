"""Translates Megatron-Core's arguments of RoPE scaling into settings of this program, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.config.fields import option_name
from megatron.errors import one_line

Arguments = Mapping[str, Any]
# The settings that Megatron-LM's flag --use-rope-scaling stands for.
_LLAMA3 = {
    "rope_scaling_type": "llama3",
    "rope_scaling_factor": 8.0,
    "rope_original_max_position_embeddings": 8192,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
}
# Setting -> (argument, the argument's default).
_YARN = {
    "rope_scaling_factor": ("rotary_scaling_factor", 1.0),
    "rope_original_max_position_embeddings": ("yarn_original_max_position_embeddings", 4096),
    "rope_beta_fast": ("yarn_beta_fast", 32.0),
    "rope_beta_slow": ("yarn_beta_slow", 1.0),
}
_YARN_ARGUMENTS = (
    *(name for name, _ in _YARN.values()),
    *("yarn_correction_range_round_to_int", "mscale", "mscale_all_dim"),
)
SCALING_SETTINGS = (*_LLAMA3, *_YARN, "rope_exact_range")
SCALING_ARGUMENTS = ("use_rope_scaling", "rope_scaling_factor", *_YARN_ARGUMENTS)
"""The arguments that `read_rope_scaling` translates."""


def has_yarn(args: Arguments) -> bool:
    """Returns whether a model uses YaRN. In Megatron-LM yarn is a value of `position_embedding_type`."""
    return args.get("position_embedding_type") == "yarn"


def _read_yarn(args: Arguments) -> Mapping[str, Any]:
    if args.get("mscale") not in (None, 1.0) or args.get("mscale_all_dim") not in (None, 0.0):
        given = {name: args.get(name) for name in ("mscale", "mscale_all_dim")}
        raise ValueError(f"{one_line(given)} with yarn, expected 1 and 0")
    numbers = {own: args.get(name) or default for own, (name, default) in _YARN.items()}
    exact = args.get("yarn_correction_range_round_to_int") is False
    return {"rope_scaling_type": "yarn", "rope_exact_range": exact, **numbers}


def _write_yarn(model: ModelConfig) -> Arguments:
    if model.rotary_interleaved or model.rotary_percent != 1.0:
        raise ValueError("--rope-scaling-type yarn with --rotary-interleaved or --rotary-percent")
    numbers = {name: getattr(model, own) for own, (name, _) in _YARN.items()}
    rounds = {"yarn_correction_range_round_to_int": not model.rope_exact_range}
    return {**numbers, **rounds, "mscale": 1.0, "mscale_all_dim": 0.0, "use_rope_scaling": False}


def read_rope_scaling(args: Arguments) -> Mapping[str, Any]:
    """Returns the settings of RoPE scaling. Raises ValueError if this program does not support the
    scaling."""
    if has_yarn(args):
        return _read_yarn(args)
    if not args.get("use_rope_scaling"):
        return {"rope_scaling_type": None}
    if (factor := args.get("rope_scaling_factor", 8.0)) != 8.0:  # some versions ignore the factor
        raise ValueError(f"rope_scaling_factor is {one_line(factor)} with use_rope_scaling, expected 8.0")
    return _LLAMA3


def write_rope_scaling(model: ModelConfig) -> Arguments:
    """Returns Megatron-Core's arguments for RoPE scaling. Raises ValueError if it does not support them."""
    kind = None if model.multi_latent_attention else model.rope_scaling_type  # `foreign_latent` writes these
    if kind == "yarn":
        return _write_yarn(model)
    if kind is not None and any(getattr(model, name) != value for name, value in _LLAMA3.items()):
        numbers = ", ".join(f"{option_name(name)} {value}" for name, value in _LLAMA3.items())
        raise ValueError(f"--rope-scaling-type {kind} other than {numbers}")
    return {"use_rope_scaling": kind is not None, "rope_scaling_factor": 8.0}
