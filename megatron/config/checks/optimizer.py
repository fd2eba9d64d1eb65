"""Checks of the optimizer."""

from __future__ import annotations

from megatron.config.errors import ConfigError
from megatron.config.sections.optimizer import OptimizerConfig


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
