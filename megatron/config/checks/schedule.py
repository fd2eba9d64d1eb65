"""Checks of the learning-rate schedule."""

from __future__ import annotations

from megatron.config.config import Config
from megatron.config.errors import ConfigError


def check_schedule(config: Config) -> None:
    """Raise ConfigError for a warm-up and decay that contradict each other or the length of the run."""
    schedule, training = config.schedule, config.training
    if schedule.override_lr_scheduler and schedule.use_checkpoint_lr_scheduler:
        raise ConfigError(
            "--override-lr-scheduler and --use-checkpoint-lr-scheduler contradict each other: the first "
            "selects the schedule of the flags, the second the checkpoint's; remove one"
        )
    by_iters = training.train_iters is not None
    decay_unit = "iters" if by_iters else "samples"
    # With a decay in tokens the warm-up is in samples, also in a run with --train-iters.
    warmup_unit = "iters" if by_iters and schedule.lr_decay_tokens is None else "samples"
    misplaced = {
        f"--lr-decay-{_other(decay_unit)}": getattr(schedule, f"lr_decay_{_other(decay_unit)}"),
        f"--lr-wsd-decay-{_other(decay_unit)}": getattr(schedule, f"lr_wsd_decay_{_other(decay_unit)}"),
        f"--lr-warmup-{_other(warmup_unit)}": getattr(schedule, f"lr_warmup_{_other(warmup_unit)}"),
        "--rampup-batch-size": by_iters and " ".join(map(str, config.batch.rampup_batch_size or ())),
    }
    for option, value in misplaced.items():
        if value:
            length = f"--train-{decay_unit} {training.train_iters or training.train_samples}"
            raise ConfigError(
                f"{option} {value} cannot be combined with {length}"
                + (" and --lr-decay-tokens" if warmup_unit != decay_unit else "")
                + ": use either iterations or samples for the whole run"
            )
    decay = getattr(schedule, f"lr_decay_{decay_unit}")
    if decay is not None and schedule.lr_decay_tokens is not None:
        raise ConfigError(
            f"--lr-decay-{decay_unit} {decay} and --lr-decay-tokens {schedule.lr_decay_tokens} both set "
            "the end of the decay: remove one of them"
        )
    warmup = getattr(schedule, f"lr_warmup_{warmup_unit}")
    if schedule.lr_warmup_fraction is not None and warmup:
        raise ConfigError(
            f"--lr-warmup-fraction {schedule.lr_warmup_fraction} and --lr-warmup-{warmup_unit} {warmup} both "
            "set the length of the warm-up: remove one of them"
        )
    if schedule.min_lr > schedule.lr:
        raise ConfigError(f"--min-lr {schedule.min_lr} is larger than --lr {schedule.lr}: reduce the former")
    if schedule.lr_decay_style != "constant":
        _check_warmup(config, warmup_unit, warmup)
    if schedule.lr_decay_style == "inverse-square-root" and not (warmup or schedule.lr_warmup_fraction):
        raise ConfigError(
            "--lr-decay-style inverse-square-root without a warm-up: the learning rate is --lr x "
            f"sqrt(warm-up / progress); set --lr-warmup-{warmup_unit} or --lr-warmup-fraction"
        )


def _check_warmup(config: Config, unit: str, warmup: int) -> None:
    schedule, training = config.schedule, config.training
    option, decay = f"--lr-decay-{unit}", getattr(schedule, f"lr_decay_{unit}")
    if schedule.lr_decay_tokens is not None:
        if training.deepspeed_config is not None:
            return  # it may have a curriculum, whose tokens LearningRateSchedule counts
        # In whole samples: the warm-up has to end before the decay.
        option, decay = "--lr-decay-tokens, in samples", schedule.lr_decay_tokens // config.model.seq_length
    elif decay is None:
        option, decay = f"--train-{unit}", getattr(training, f"train_{unit}")
    if warmup and warmup >= decay:
        raise ConfigError(
            f"--lr-warmup-{unit} {warmup} does not end before the decay ({option}: {decay}): reduce the "
            "warm-up, or extend the decay"
        )


def _other(unit: str) -> str:
    return "samples" if unit == "iters" else "iters"
