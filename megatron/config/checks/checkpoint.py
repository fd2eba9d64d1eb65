"""Checks of the checkpoint flags."""

from __future__ import annotations

from megatron.config.errors import ConfigError
from megatron.config.sections.checkpoint import CheckpointConfig


def check_checkpoint(checkpoint: CheckpointConfig) -> None:
    """Raise ConfigError for flags whose folder is not given."""
    if checkpoint.universal_checkpoint and checkpoint.load is None:
        raise ConfigError("--universal_checkpoint without --load: set --load to the folder of the checkpoint")
    if checkpoint.save_interval is not None and checkpoint.save is None:
        raise ConfigError(
            f"--save-interval {checkpoint.save_interval} without --save: set the checkpoint folder, or "
            "remove it"
        )
