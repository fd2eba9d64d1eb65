"""Parameter groups (weight decay, learning-rate multiplier, bits of the moments) and the optimizer of a
run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron.config import ConfigError, OptimizerConfig
from megatron.config.registries import OPTIMIZERS
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import spec_of
from megatron.optimizer.adam import AdamW
from megatron.optimizer.eight_bit import EightBitAdam, moment_bits

_DATA = ParameterSpec(()).reduced_axes


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    eight_bit: bool = False,
    units: Mapping[str, str] | None = None,
    lr_mult: float = 1.0,
    tied: Sequence[nn.Parameter] = (),
    matrices: bool = False,
) -> list[dict[str, Any]]:
    """Returns parameter groups. Without options there are two: parameters with weight decay (matrices,
    embeddings), then parameters without it (biases, norms).

    A group has the keys 'params', 'names' (in the same order), 'weight_decay' and 'lr_mult'. Every rank has
    both groups in this order, even if one is empty (a stage with only the embedding). A parameter that occurs
    twice (tied weights) is listed once, under its first name. Frozen parameters are skipped. Parameters
    without a gradient (`ParameterSpec.has_gradient`) form the last group, which the optimizer never updates.
    Raises ValueError if a parameter has no spec.

    lr_mult: the learning-rate multiplier of the specs that have one. If it is not 1, these parameters form
    separate groups, each directly before the group of the same kind with multiplier 1.

    eight_bit: adds the key 'moment_bits', and a group of decayed parameters with 8-bit moments before the two
    groups. (The bits depend on the size of a parameter, which is not visible in a flat buffer.)

    matrices: adds a group for the weights of linear layers, with the key 'matrices', before all other groups.

    units: first part of a parameter's name ('3' in '3.mlp.dense_h_to_4h.weight') -> its unit. The parameters
    of each unit form separate groups with the key 'unit', after all other groups.

    Parameters whose gradients are reduced over different axes (dense parameters and experts) form separate
    groups.

    tied: parameters with a replica on another stage. They form separate groups before the groups of units, so
    that their flat buffer is equal on both stages, regardless of the other parameters of the stages.
    """
    units = units or {}
    by_unit: dict[str, list[tuple[str, nn.Parameter]]] = {unit: [] for unit in units.values()}
    others: list[tuple[str, nn.Parameter]] = []
    replicas: list[tuple[str, nn.Parameter]] = []
    state: list[tuple[str, nn.Parameter]] = []
    of_tied = {id(parameter) for parameter in tied}
    for name, parameter in named_parameters:
        unit = units.get(name.partition(".")[0])
        held = others if unit is None else by_unit[unit]
        if not spec_of(parameter).has_gradient:
            state.append((name, parameter))
            continue
        (replicas if id(parameter) in of_tied else held).append((name, parameter))
    settings = weight_decay, eight_bit, lr_mult, matrices
    groups = _groups_by_axes(others, *settings)
    groups += _groups_by_axes(replicas, *settings) if replicas else []
    for unit, of_unit in by_unit.items():
        of_kinds = _groups_by_axes(of_unit, *settings)
        groups += [{**group, "unit": unit} for group in of_kinds]
    if state:
        of_state: dict[str, Any] = {"params": [p for _, p in state], "names": [name for name, _ in state]}
        bits = {"moment_bits": 32} if eight_bit else {}
        groups.append({**of_state, "weight_decay": 0.0, "lr_mult": 0.0, **bits})
    return groups


def _groups_by_axes(
    named_parameters: Sequence[tuple[str, nn.Parameter]], *settings: Any
) -> list[dict[str, Any]]:
    """Returns the groups of each set of parameters whose gradients are reduced over the same axes. The first
    set, which may be empty, has the parameters that all data- and context-parallel ranks hold."""
    by_axes: dict[tuple[str, ...], list[tuple[str, nn.Parameter]]] = {_DATA: []}
    for name, parameter in named_parameters:
        by_axes.setdefault(spec_of(parameter).reduced_axes, []).append((name, parameter))
    return [group for held in by_axes.values() for group in _groups_by_kind(held, *settings)]


def _groups_by_kind(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    eight_bit: bool,
    lr_mult: float,
    matrices: bool,
) -> list[dict[str, Any]]:
    factors = (1.0,) if lr_mult == 1.0 else (lr_mult, 1.0)
    # The kinds (weight decay, bits of the moments, whole matrices), in the order of the groups.
    kinds = [(True, 32, True)] if matrices else []
    kinds += [(True, 8, False)] if eight_bit else []
    kinds += [(True, 32, False), (False, 32, False)]
    groups: dict[tuple[bool, int, bool, float], dict[str, Any]] = {
        (decays, bits, whole, factor): {
            "params": [],
            "names": [],
            # AdamW decays by lr * weight_decay. The division by the multiplier makes the decay independent of
            # lr_mult.
            "weight_decay": weight_decay / factor if decays else 0.0,
            "lr_mult": factor,
            **({"moment_bits": bits} if eight_bit else {}),
            **({"matrices": True} if whole else {}),
        }
        for decays, bits, whole in kinds
        for factor in factors
    }
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        spec = spec_of(parameter)
        bits = moment_bits(name, spec) if eight_bit else 32
        group = groups[spec.weight_decay, bits, matrices and bool(spec.matrix_rows), spec.lr_mult]
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def make_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Returns the optimizer that --optimizer selects, over `groups`. The groups keep their other keys.

    Every group starts with 'lr' 0; the training loop sets the learning rate before each step. 'adam' and
    'adamw' both have decoupled weight decay, as in Megatron-LM. Raises ConfigError if --use-apex or
    --use-bnb-optimizer is given and the package cannot be used.
    """
    groups = [dict(group) for group in groups]
    # PyTorch has fused kernels (one pass over memory) on these devices.
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    fused = devices <= {"cpu", "cuda", "xpu", "mps", "sim"}  # 'sim' is the simulated device
    optimizer: torch.optim.Optimizer = OPTIMIZERS.load(config.optimizer)(groups, config, fused)
    return optimizer


def make_sgd(groups: list[dict[str, Any]], config: OptimizerConfig, fused: bool) -> torch.optim.Optimizer:
    """Returns SGD with momentum. fused: whether to use PyTorch's fused kernel."""
    settings: dict[str, Any] = {"momentum": config.sgd_momentum}
    return torch.optim.SGD(groups, lr=0.0, weight_decay=0.0, fused=fused, foreach=not fused, **settings)


def make_adam(groups: list[dict[str, Any]], config: OptimizerConfig, fused: bool) -> torch.optim.Optimizer:
    """Returns the AdamW of PyTorch, apex or bitsandbytes. fused: see `make_sgd`."""
    settings: dict[str, Any] = {
        "lr": 0.0,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": 0.0,  # set per group
    }
    if config.use_apex:
        return _apex_adam(groups, settings)
    if config.use_bnb_optimizer:
        return _eight_bit_adam(groups, settings)
    return AdamW(groups, fused=fused, foreach=not fused, **settings)


def _apex_adam(groups: list[dict[str, Any]], settings: dict[str, Any]) -> torch.optim.Optimizer:
    """Returns NVIDIA apex's FusedAdam. Raises ConfigError if apex or its CUDA extension is missing."""
    try:
        from apex.optimizers import FusedAdam

        return FusedAdam(groups, adam_w_mode=True, **settings)
    except (RuntimeError, ImportError) as error:
        raise ConfigError(
            f"--use-apex: apex's FusedAdam cannot be used ({error}): install NVIDIA's apex with its CUDA "
            "extensions, or remove --use-apex"
        ) from None


def _eight_bit_adam(groups: list[dict[str, Any]], settings: dict[str, Any]) -> torch.optim.Optimizer:
    """Returns bitsandbytes' 8-bit Adam. Raises ConfigError if bitsandbytes cannot be imported."""
    try:
        return EightBitAdam(groups, **settings)
    except ImportError as error:
        raise ConfigError(
            f"--use-bnb-optimizer: bitsandbytes cannot be imported ({error}): pip install bitsandbytes, or "
            "remove the flag"
        ) from None
