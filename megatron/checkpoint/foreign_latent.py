"""Translates Megatron-Core's arguments of latent attention into settings of this program, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig
from megatron.errors import one_line

# Megatron-Core's arguments that have the name and the values of one of this program's settings.
_EQUAL = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("mscale", "mscale_all_dim"),
)
# Argument of YaRN -> (setting, the argument's default).
_YARN = {
    "rotary_scaling_factor": ("rope_scaling_factor", 1.0),
    "original_max_position_embeddings": ("rope_original_max_position_embeddings", 4096),
    "beta_slow": ("rope_beta_slow", 1.0),
    "beta_fast": ("rope_beta_fast", 32.0),
}
LATENT_ARGUMENTS = ("multi_latent_attention", "rope_type", *_EQUAL, *_YARN)
LATENT_SETTINGS = ("multi_latent_attention", *_EQUAL, *(setting for setting, _ in _YARN.values()))


def read_latent_attention(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of latent attention. Megatron-LM saves these arguments for other models, too.
    Raises ValueError if this program does not support the model."""
    kind = args.get("rope_type")
    if not args.get("multi_latent_attention"):
        if kind not in (None, "rope"):
            raise ValueError(f"rope_type is {one_line(kind)}, expected rope")
        return {"multi_latent_attention": False}
    settings = {name: args[name] for name in _EQUAL if args.get(name) is not None}
    settings["multi_latent_attention"] = True
    # Megatron-LM's latent attention uses YaRN unless rope_type is rope. A factor of 1 changes nothing.
    if kind == "rope" or args.get("rotary_scaling_factor", 1.0) == 1.0:
        unscaled = {"rope_scaling_type": None, "mscale": 1.0, "mscale_all_dim": 0.0}
        return settings | unscaled
    scaled = {setting: args.get(name, default) for name, (setting, default) in _YARN.items()}
    return settings | scaled | {"rope_scaling_type": "yarn"}


def write_latent_attention(model: ModelConfig) -> Mapping[str, Any]:
    """Returns Megatron-Core's arguments for a model's latent attention. Raises ValueError if Megatron-Core
    does not support the model."""
    if not model.multi_latent_attention:
        return {"multi_latent_attention": False}
    if model.rope_scaling_type not in (None, "yarn"):
        raise ValueError(f"--rope-scaling-type {model.rope_scaling_type} with --multi-latent-attention")
    if model.rope_exact_range:
        raise ValueError("--rope-exact-range with --multi-latent-attention")
    is_scaled = model.rope_scaling_type is not None
    factors = {name: getattr(model, setting) for name, (setting, _) in _YARN.items()}
    return {
        "multi_latent_attention": True,
        **{name: getattr(model, name) for name in _EQUAL},
        **(factors if is_scaled else {name: default for name, (_, default) in _YARN.items()}),
        "rope_type": "yarn" if is_scaled else "rope",
    }
