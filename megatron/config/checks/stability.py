"""Checks of skipped iterations and of rollbacks."""

from __future__ import annotations

from megatron.config.errors import ConfigError
from megatron.config.sections.checkpoint import CheckpointConfig
from megatron.config.sections.stability import StabilityConfig


def check_stability(stability: StabilityConfig, checkpoint: CheckpointConfig) -> None:
    """Raise ConfigError for invalid ranges of iterations, and for rollbacks without checkpoints."""
    _ = stability.skipped_ranges
    if stability.spike_policy == "rollback" and (checkpoint.save is None or checkpoint.save_interval is None):
        raise ConfigError(
            "--spike-policy rollback without --save and --save-interval: there is no checkpoint to roll back "
            "to; set both, or use the policy skip"
        )
