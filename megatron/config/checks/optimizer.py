"""Checks of the optimizer, the number format and the loss scale."""

from __future__ import annotations

from megatron.config.errors import ConfigError
from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.precision import PrecisionConfig


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Raise ConfigError for optimizers that do not combine."""
    if not optimizer.use_bnb_optimizer:
        return
    if optimizer.optimizer == "sgd":
        raise ConfigError(
            "--use-bnb-optimizer with --optimizer sgd: 8-bit moments are supported for Adam only, use "
            "adam or adamw, or remove the flag"
        )
    if optimizer.use_apex:
        raise ConfigError("--use-bnb-optimizer with --use-apex: each has its own Adam, remove one of the two")


def check_precision(precision: PrecisionConfig) -> None:
    """Raise ConfigError for contradicting number formats and for loss scales without fp16."""
    if precision.fp16 and precision.bf16:
        raise ConfigError("--fp16 and --bf16 are both given: remove one of them")
    if precision.loss_scale is not None and not precision.fp16:
        raise ConfigError(
            f"--loss-scale {precision.loss_scale:g} without --fp16: {precision.name} has no loss scaling, "
            "remove it or add --fp16"
        )
    if precision.fp32_residual_connection and precision.name == "fp32":
        raise ConfigError(
            "--fp32-residual-connection without --fp16 or --bf16: the whole model is in fp32, remove it"
        )
    if precision.min_loss_scale > precision.initial_loss_scale:
        raise ConfigError(
            f"--min-loss-scale {precision.min_loss_scale:g} is larger than --initial-loss-scale "
            f"{precision.initial_loss_scale:g}: reduce the former"
        )
