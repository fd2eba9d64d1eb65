"""Translates Megatron-Core's arguments of experts into settings of this program, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config import ConfigError, ModelConfig
from megatron.config.sections.experts import BALANCE_LOSSES
from megatron.config.sections.layer_pattern import EXPERT_PATTERN
from megatron.errors import one_line

# Megatron-Core's arguments that have the name and the values of one of this program's settings.
_EQUAL = (
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"),
)
_KIND, _COEFFICIENT = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
# Settings that change only the training of routers: a run may have other values than the checkpoint.
_TRAINING = (_KIND, _COEFFICIENT, "moe_z_loss_coeff", "moe_router_bias_update_rate")
EXPERTS = ("num_experts", "moe_layer_freq", *_EQUAL, *_TRAINING)
WITHOUT_EQUIVALENT = (
    *("moe_apply_probs_on_input", "moe_latent_size", "moe_expert_capacity_factor", "moe_token_dropping"),
    *("moe_expert_rank_capacity_factor", "moe_mlp_glu_interleave_size", "moe_router_force_load_balancing"),
    *("moe_shared_expert_glu_interleave_size", "moe_router_force_biased", "moe_router_topk_limited_devices"),
)
"""Arguments that change what experts compute and that this program does not support: they must be off."""


def _number_of_experts(args: Mapping[str, Any]) -> tuple[str, Any]:
    name = "num_experts" if args.get("num_experts") else "num_moe_experts"
    return name, args.get(name)


def read_experts(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of experts. Megatron-LM saves these arguments for dense models, too. Raises
    ValueError if this program does not support the experts."""
    name, number = _number_of_experts(args)
    if not number:
        return {"num_experts": None}
    if type(number) is not int or number < 2:
        raise ValueError(f"{name} is {one_line(number)}, expected None or at least 2")
    for name in WITHOUT_EQUIVALENT:
        if args.get(name):
            raise ValueError(f"{name} is {one_line(args[name])} with num_experts, expected None")
    try:
        layers = max(1, min(int(args["num_layers"]), 100_000))  # bounds a wrong number
        pattern = EXPERT_PATTERN.parse([str(args.get("moe_layer_freq", 1))], layers)
    except (ConfigError, KeyError, TypeError) as error:
        given = one_line(args.get("moe_layer_freq"))
        raise ValueError(f"moe_layer_freq is {given} ({one_line(error)})") from error
    equal = {name: args[name] for name in _EQUAL if args.get(name) is not None}
    return {**equal, **_read_training(args), "num_experts": number, "moe_layer_freq": pattern}


def _read_training(args: Mapping[str, Any]) -> Mapping[str, Any]:
    kind, coefficient = _chosen(_balance_losses(args))
    values = (
        kind,
        coefficient,
        args.get("moe_z_loss_coeff") or None,
        args.get("moe_router_enable_expert_bias") and args.get("moe_router_bias_update_rate"),
    )
    return {name: value for name, value in zip(_TRAINING, values, strict=True) if value}


def _balance_losses(args: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Returns the kind and coefficient of each balance loss. Megatron-LM may have several in one model."""
    kinds, coefficients = (
        value if isinstance(value, (list, tuple)) else [value]
        for value in (args.get(_KIND) or "aux_loss", args.get(_COEFFICIENT) or 0.0)
    )
    for kind in kinds:
        if kind not in (*BALANCE_LOSSES, "aux_loss"):  # other kinds change the choice of experts
            raise ValueError(f"{_KIND} is {one_line(kind)}, expected another")
    return [*zip(kinds, coefficients, strict=False)]


def _chosen(losses: list[tuple[str, float]]) -> tuple[str, float]:
    """Returns the balance loss that this program uses: seq_aux_loss stands for Megatron-LM's aux_loss."""
    kind, coefficient = next((loss for loss in losses if loss[1]), losses[0])
    return kind if kind in BALANCE_LOSSES else "seq_aux_loss", coefficient


def expert_notes(args: Mapping[str, Any]) -> Iterator[str]:
    """Yields 'argument value: what replaces it' for each argument that changes only the training and has no
    equivalent. args: arguments that `read_experts` accepts."""
    if not _number_of_experts(args)[1]:
        return
    losses = [loss for loss in _balance_losses(args) if loss[1] and loss[0] != "none"]
    if losses:
        kind, coefficient = _chosen(losses)
        taken = f"--moe-router-load-balancing-type {kind} --moe-aux-loss-coeff {coefficient}"
        if kind == "global_aux_loss":
            taken += ", with the tokens per expert of the previous step"
        if losses != [("seq_aux_loss", coefficient)]:
            yield (
                f"{_KIND} {one_line(args.get(_KIND))} with {_COEFFICIENT} "
                f"{one_line(args[_COEFFICIENT])}: {taken}"
            )
    if noise := args.get("moe_input_jitter_eps"):
        yield f"moe_input_jitter_eps {one_line(noise)}: the router's input has no noise"


def write_experts(model: ModelConfig) -> Mapping[str, Any]:
    """Returns Megatron-Core's arguments for the experts of a model."""
    if model.num_experts is None:
        return {"num_experts": None}
    layers = [int(model.has_experts(layer)) for layer in range(model.num_layers)]
    equal = {name: getattr(model, name) for name in (*_EQUAL, *_TRAINING)}
    return {**equal, "num_experts": model.num_experts, "moe_layer_freq": 1 if all(layers) else layers}
