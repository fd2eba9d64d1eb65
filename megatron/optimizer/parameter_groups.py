"""Which parameters are decayed, and the optimizer that moves them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from megatron.config import ConfigError, OptimizerConfig
from megatron.config.registries import OPTIMIZERS
from megatron.mpu.parameters import spec_of
from megatron.optimizer.eight_bit import EightBitAdam, moment_bits


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    eight_bit: bool = False,
    units: Collection[str] = (),
    lr_mult: float = 1.0,
) -> list[dict[str, Any]]:
    """Two groups: what decays (matrices, embeddings) and what does not (biases, norms), as the specs say.

    Each has 'params', 'names' (one per parameter, in the same order), 'weight_decay' and 'lr_mult'. Both
    are there on every rank, in this order, even if one is empty (a stage with only the embedding). A
    parameter that comes twice (tied weights) is taken once, under its first name; frozen ones are left out.
    ValueError if a parameter has no spec.

    lr_mult: some parameters have this factor of the learning rate, by their specs. If it is not 1, they
    form groups of their own, each before the one of the same kind whose factor is 1.

    eight_bit: before these two comes a group of the decayed ones whose moments have 8 bits, and each group
    says its 'moment_bits'. Parameters of a group lie in one flat buffer, where a parameter's own size is no
    longer seen, so a group is the place for what depends on it.

    units: first parts of names ('3' in '3.mlp.dense_h_to_4h.weight') whose parameters lie in groups of their
    own, which come after the others and say their 'unit'.
    """
    by_unit: dict[str, list[tuple[str, nn.Parameter]]] = {unit: [] for unit in units}
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named_parameters:
        by_unit.get(name.partition(".")[0], others).append((name, parameter))
    groups = _groups_by_kind(others, weight_decay, eight_bit, lr_mult)
    for unit, of_unit in by_unit.items():
        of_kinds = _groups_by_kind(of_unit, weight_decay, eight_bit, lr_mult)
        groups += [{**group, "unit": unit} for group in of_kinds]
    return groups


def _groups_by_kind(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    eight_bit: bool,
    lr_mult: float,
) -> list[dict[str, Any]]:
    factors = (1.0,) if lr_mult == 1.0 else (lr_mult, 1.0)
    # (decays, bits of its moments), in the order of the groups.
    kinds = [*([(True, 8)] if eight_bit else []), (True, 32), (False, 32)]
    groups = {
        (decays, bits, factor): {
            "params": [],
            "names": [],
            # Adam's decay is a part of the step: its share of a weight is the same at every rate.
            "weight_decay": weight_decay / factor if decays else 0.0,
            "lr_mult": factor,
            **({"moment_bits": bits} if eight_bit else {}),
        }
        for decays, bits in kinds
        for factor in factors
    }
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        spec = spec_of(parameter)
        bits = moment_bits(name, spec) if eight_bit else 32
        group = groups[spec.weight_decay, bits, spec.lr_mult]
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def make_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of --optimizer over `groups`, whose other keys it keeps.

    Every group starts with 'lr' 0: the loop sets the schedule's rate before each step. 'adam' and 'adamw' are
    the same, with decoupled weight decay, as in Megatron. ConfigError if --use-apex or --use-bnb-optimizer
    cannot be done.
    """
    groups = [dict(group) for group in groups]
    # One pass over memory instead of one per operation; any floating-point tensor on these devices will do.
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    fused = devices <= {"cpu", "cuda", "xpu", "mps"}
    kernels = {"fused": fused, "foreach": not fused}
    return OPTIMIZERS.load(config.optimizer)(groups, config, kernels)


def make_sgd(
    groups: list[dict[str, Any]], config: OptimizerConfig, kernels: Mapping[str, bool]
) -> torch.optim.Optimizer:
    """SGD with momentum. kernels: PyTorch's arguments `fused` and `foreach`."""
    return torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, weight_decay=0.0, **kernels)


def make_adam(
    groups: list[dict[str, Any]], config: OptimizerConfig, kernels: Mapping[str, bool]
) -> torch.optim.Optimizer:
    """AdamW of PyTorch, apex or bitsandbytes. kernels: PyTorch's arguments `fused` and `foreach`."""
    settings: dict[str, Any] = {
        "lr": 0.0,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": 0.0,  # the groups have their own
    }
    if config.use_apex:
        return _apex_adam(groups, settings)
    if config.use_bnb_optimizer:
        return _eight_bit_adam(groups, settings)
    return torch.optim.AdamW(groups, **settings, **kernels)


def _apex_adam(groups: list[dict[str, Any]], settings: dict[str, Any]) -> torch.optim.Optimizer:
    """NVIDIA apex's FusedAdam; ConfigError if `apex` is another package, or was built without CUDA."""
    advice = "install NVIDIA's apex with its CUDA extensions, or leave --use-apex out"
    try:
        from apex.optimizers import FusedAdam
    except ImportError as error:
        raise ConfigError(
            f"--use-apex: apex.optimizers.FusedAdam cannot be imported ({error}): {advice}"
        ) from None
    try:
        return FusedAdam(groups, adam_w_mode=True, **settings)
    except (RuntimeError, ImportError) as error:
        raise ConfigError(f"--use-apex: apex's FusedAdam cannot be used here ({error}): {advice}") from None


def _eight_bit_adam(groups: list[dict[str, Any]], settings: dict[str, Any]) -> torch.optim.Optimizer:
    """bitsandbytes' 8-bit Adam; ConfigError where bitsandbytes cannot be imported."""
    try:
        return EightBitAdam(groups, **settings)
    except ImportError as error:
        raise ConfigError(
            f"--use-bnb-optimizer: bitsandbytes cannot be imported ({error}): pip install bitsandbytes, or "
            "drop the flag"
        ) from None
