"""Checks of skipped iterations and of rollbacks."""

from __future__ import annotations

from megatron.config.errors import ConfigError
from megatron.config.sections.checkpoint import CheckpointConfig
from megatron.config.sections.stability import TroubleConfig


def check_trouble(trouble: TroubleConfig, checkpoint: CheckpointConfig) -> None:
    """Raise ConfigError for what is no range of iterations, and for rollbacks without checkpoints."""
    _ = trouble.skipped_ranges
    if trouble.spike_policy == "rollback" and (checkpoint.save is None or checkpoint.save_interval is None):
        raise ConfigError(
            "--spike-policy rollback without --save and --save-interval: there is no checkpoint to go back "
            "to; give both, or use the policy skip"
        )
