"""Checks of the length of the run and of the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.config import Config
from megatron.config.fields import option_name, value_text
from megatron.optimizer.batch_schedule import BatchSchedule
from megatron.optimizer.schedule import WSD_BY_TOKENS


def length_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence unless exactly one flag sets the length of the run, and the length is at least one
    batch."""
    training = config.training
    if not training.has_length:
        given = [str(length) for length in (training.train_iters, training.train_samples) if length]
        found = " and ".join(given) or "neither of them"
        yield f"exactly one of --train-iters and --train-samples is required: got {found}"
    first_batch = BatchSchedule.from_config(config.batch).global_batch_size_at(0)
    if training.train_samples is not None and training.train_samples < first_batch:
        yield (
            f"--train-samples {training.train_samples} is less than the first batch of {first_batch}: "
            "increase it, or reduce --global-batch-size"
        )


def schedule_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for a warm-up and decay that contradict each other or the length of the run."""
    schedule, training = config.schedule, config.training
    if schedule.min_lr > schedule.lr:
        yield f"--min-lr {schedule.min_lr} is larger than --lr {schedule.lr}: reduce --min-lr"
    style, decays_by_tokens = schedule.lr_decay_style, schedule.lr_decay_tokens is not None
    if style == "inverse-square-root" and not (
        schedule.lr_warmup_iters or schedule.lr_warmup_samples or schedule.lr_warmup_fraction
    ):
        unit = "samples" if training.train_iters is None or decays_by_tokens else "iters"
        yield (
            "--lr-decay-style inverse-square-root without a warm-up: the learning rate is --lr x "
            f"sqrt(warm-up / progress); set --lr-warmup-{unit} or --lr-warmup-fraction"
        )
    if style == "WSD" and decays_by_tokens:
        yield WSD_BY_TOKENS
    elif style == "WSD":
        unit = "samples" if training.train_iters is None else "iters"
        length, misplaced = (getattr(schedule, f"lr_wsd_decay_{u}") for u in (unit, _other_unit(unit)))
        if length is None and not misplaced:
            yield f"--lr-decay-style WSD without --lr-wsd-decay-{unit}: set it to the length of the decay"
    for unit in ("iters", "samples"):
        decay, warmup = (getattr(schedule, f"lr_{part}_{unit}") for part in ("decay", "warmup"))
        if decay is not None and decays_by_tokens:
            yield (
                f"--lr-decay-{unit} {decay} and --lr-decay-tokens {schedule.lr_decay_tokens} both set "
                "the end of the decay: remove one of them"
            )
        if warmup and schedule.lr_warmup_fraction is not None:
            yield (
                f"--lr-warmup-fraction {schedule.lr_warmup_fraction} and --lr-warmup-{unit} {warmup} both "
                "set the length of the warm-up: remove one of them"
            )
    if training.has_length:
        yield from _unit_mistakes(config)


def _unit_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for each part of the schedule whose unit differs from the unit of the run's length,
    or that lies beyond the end of the run."""
    schedule, training = config.schedule, config.training
    by_iters = training.train_iters is not None
    decay_unit = "iters" if by_iters else "samples"
    # With a decay in tokens, the warm-up is in samples even if the run has --train-iters.
    warmup_unit = "iters" if by_iters and schedule.lr_decay_tokens is None else "samples"
    units = {"lr_decay": decay_unit, "lr_wsd_decay": decay_unit, "lr_warmup": warmup_unit}
    fields = [f"{part}_{_other_unit(unit)}" for part, unit in units.items()]
    misplaced = {option_name(field): getattr(schedule, field) for field in fields}
    misplaced["--rampup-batch-size"] = by_iters and value_text(config.batch.rampup_batch_size or ())
    for option, value in misplaced.items():
        if value:
            length = f"--train-{decay_unit} {training.train_iters or training.train_samples}"
            yield (
                f"{option} {value} cannot be combined with {length}"
                + (" and --lr-decay-tokens" if warmup_unit != decay_unit else "")
                + ": use either iterations or samples for the whole run"
            )
    if schedule.lr_decay_style != "constant":
        yield from _warmup_mistakes(config, warmup_unit)


def _warmup_mistakes(config: Config, unit: str) -> Iterator[str]:
    schedule, training = config.schedule, config.training
    warmup: float = getattr(schedule, f"lr_warmup_{unit}")
    option, decay = f"--lr-decay-{unit}", getattr(schedule, f"lr_decay_{unit}")
    if schedule.lr_decay_tokens is not None:
        if training.deepspeed_config is not None or config.checkpoint.load is not None:
            return  # LearningRateSchedule counts the tokens of a curriculum, and of a resumed run
        # The decay is rounded down to whole samples, because the warm-up has to end before the decay.
        option, decay = "--lr-decay-tokens, in samples", schedule.lr_decay_tokens // config.model.seq_length
    elif decay is None:
        option, decay = f"--train-{unit}", getattr(training, f"train_{unit}")
    if warmup and warmup >= decay:
        yield (
            f"--lr-warmup-{unit} {warmup} does not end before the decay ({option}: {decay}): reduce the "
            "warm-up, or extend the decay"
        )
        return
    if schedule.lr_warmup_fraction is not None:
        warmup = schedule.lr_warmup_fraction * decay
    length = getattr(schedule, f"lr_wsd_decay_{unit}") or 0
    is_wsd = schedule.lr_decay_style == "WSD" and schedule.lr_decay_tokens is None
    if is_wsd and decay - length < warmup:
        steps = unit.replace("iters", "iterations")
        yield (
            f"--lr-wsd-decay-{unit} {length}: the decay has to end after {decay:,} {steps} and would begin "
            f"before the end of the warm-up ({warmup:,.0f} {steps}): shorten one of them, or raise "
            f"--lr-decay-{unit}"
        )


def _other_unit(unit: str) -> str:
    return "samples" if unit == "iters" else "iters"
