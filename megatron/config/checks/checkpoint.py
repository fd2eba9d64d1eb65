"""Checks of checkpoint folders, fine-tuning, skipped iterations and rollbacks."""

from __future__ import annotations

import os

from megatron.config.config import Config
from megatron.config.errors import ConfigError
from megatron.config.sections.checkpoint import CheckpointConfig
from megatron.config.sections.stability import StabilityConfig


def check_checkpoint(checkpoint: CheckpointConfig) -> None:
    """Raise ConfigError for flags whose folder is not given."""
    if checkpoint.universal_checkpoint and checkpoint.load is None:
        raise ConfigError("--universal_checkpoint without --load: set --load to the folder of the checkpoint")
    if checkpoint.save_interval is not None and checkpoint.save is None:
        raise ConfigError(
            f"--save-interval {checkpoint.save_interval} without --save: set the checkpoint folder, or "
            "remove it"
        )


def check_finetuning(config: Config) -> None:
    """Raise ConfigError for flags that --finetune contradicts, and for a --save folder in which the same
    command, given again, would not find its own checkpoints."""
    checkpoint = config.checkpoint
    if checkpoint.finetune and checkpoint.load is None:
        raise ConfigError("--finetune without --load: set --load to the folder of the checkpoint")
    if checkpoint.finetune and config.training.no_train:
        raise ConfigError(
            "--finetune with --eval-only: an evaluation does not train; remove --finetune, and add "
            "--override-data to evaluate on other data"
        )
    if checkpoint.finetune and config.schedule.use_checkpoint_lr_scheduler:
        raise ConfigError(
            "--finetune and --use-checkpoint-lr-scheduler contradict each other: fine-tuning starts the "
            "schedule of the flags; remove one"
        )
    option = "--finetune" if checkpoint.finetune else "--no-load-optim"
    applies = (checkpoint.finetune or checkpoint.no_load_optim) and not config.training.no_train
    if applies and _saves_beside_loaded(checkpoint):
        raise ConfigError(
            f"{option} with --load {checkpoint.load} and --save {checkpoint.save}: give another --save, or "
            f"remove {option} to resume; in the same folder each restart of the job would apply {option} "
            "again"
        )


def _saves_beside_loaded(checkpoint: CheckpointConfig) -> bool:
    """Whether the run would save into the folder of native checkpoints that it loads from."""
    if checkpoint.load is None or checkpoint.save is None or checkpoint.universal_checkpoint:
        return False
    load = os.path.realpath(checkpoint.load)
    return os.path.realpath(checkpoint.save) in (load, os.path.dirname(load))


def check_stability(stability: StabilityConfig, checkpoint: CheckpointConfig) -> None:
    """Raise ConfigError for invalid ranges of iterations, and for rollbacks without checkpoints."""
    _ = stability.skipped_ranges
    if stability.spike_policy == "rollback" and (checkpoint.save is None or checkpoint.save_interval is None):
        raise ConfigError(
            "--spike-policy rollback without --save and --save-interval: there is no checkpoint to roll back "
            "to; set both, or use the policy skip"
        )
