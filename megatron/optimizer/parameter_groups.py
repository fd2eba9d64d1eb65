"""Which parameters are decayed, and the optimizer that moves them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megatron.config import ConfigError, OptimizerConfig
from megatron.mpu.parameters import spec_of


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Two groups: what decays (matrices, embeddings) and what does not (biases, norms), as the specs say.

    Each has 'params', 'names' (one per parameter, in the same order) and 'weight_decay'. Both are there on
    every rank, in this order, even if one is empty (a stage with only the embedding). A parameter that comes
    twice (tied weights) is taken once, under its first name; frozen parameters are left out. ValueError if a
    parameter has no spec.
    """
    decayed: dict[str, Any] = {"params": [], "names": [], "weight_decay": weight_decay}
    plain: dict[str, Any] = {"params": [], "names": [], "weight_decay": 0.0}
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        group = decayed if spec_of(parameter).weight_decay else plain
        group["params"].append(parameter)
        group["names"].append(name)
    return [decayed, plain]


def make_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of --optimizer over `groups`, whose other keys it keeps.

    Every group starts with 'lr' 0: the loop sets the schedule's rate before each step. 'adam' and 'adamw' are
    the same, with decoupled weight decay, as in Megatron. ConfigError if --use-apex cannot be done.
    """
    groups = [dict(group) for group in groups]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, weight_decay=0.0)
    if config.optimizer not in ("adam", "adamw"):
        raise ConfigError(f"--optimizer {config.optimizer} is none of adam, adamw, sgd")
    settings: dict[str, Any] = {
        "lr": 0.0,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": 0.0,  # the groups have their own
    }
    if config.use_apex:
        return _apex_adam(groups, settings)
    # One pass over memory instead of one per operation; any floating-point tensor on these devices will do.
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    fused = devices <= {"cpu", "cuda", "xpu", "mps"}
    return torch.optim.AdamW(groups, **settings, fused=fused, foreach=not fused)


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
