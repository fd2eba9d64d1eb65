"""The learning-rate schedule: a pure function of training progress.

The progress of a step includes the step itself. So the first step of a warm-up over 100 iterations uses 1/100
of the maximum, not 0, and a log line shows the learning rate that its step used. The schedule has no state to
save: a resumed run computes the learning rate from its counters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron.config import ConfigError, ScheduleConfig, TrainingConfig
from megatron.config.registries import LR_DECAY_STYLES

Unit = Literal["iterations", "samples", "tokens"]


@dataclass(frozen=True)
class Progress:
    """Training progress, including the current step."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int

    def count(self, unit: Unit) -> int:
        """This progress in one unit."""
        counts = {
            "iterations": self.iteration,
            "samples": self.consumed_samples,
            "tokens": self.consumed_tokens,
        }
        return counts[unit]


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up from 0 to max_lr, then decay to min_lr at decay_length; min_lr from there on.

    warmup: length of the warm-up, in warmup_unit.
    decay_start: start of the decay (the end of the warm-up), counted from the start of training, in
        decay_unit.
    decay_length: end of the decay, counted in the same way.
    style: a name in LR_DECAY_STYLES; with 'constant' the learning rate stays at max_lr.
    """

    max_lr: float
    min_lr: float
    style: str
    warmup: float
    warmup_unit: Unit
    decay_start: float
    decay_length: int
    decay_unit: Unit

    def __post_init__(self) -> None:
        LR_DECAY_STYLES.load(self.style)  # ConfigError for an unknown style

    @classmethod
    def from_config(
        cls,
        schedule: ScheduleConfig,
        training: TrainingConfig,
        seq_length: int,
        tokens_of_samples: Callable[[float], float] | None = None,
    ) -> LearningRateSchedule:
        """The schedule of the (validated) flags; ConfigError if the warm-up is longer than the decay.

        The decay length defaults to the length of training: --train-iters, or --train-samples or
        --train-tokens, whichever ends first. A decay by tokens has its warm-up in samples.
        `tokens_of_samples(n)` is the number of tokens of the first n samples; by default every sample has
        seq_length tokens.
        """
        tokens_of_samples = tokens_of_samples or (lambda samples: samples * seq_length)
        length, unit = _decay_length(schedule, training, tokens_of_samples)
        warmup, warmup_unit = _warmup_length(schedule, length, unit)
        start = tokens_of_samples(warmup) if (warmup_unit, unit) == ("samples", "tokens") else warmup
        if start >= length and schedule.lr_decay_style != "constant":
            raise ConfigError(
                f"the warm-up lasts {start:,.0f} {unit} but the learning rate has to reach its minimum after "
                f"{length:,} {unit}: shorten --lr-warmup-{_flag_end(warmup_unit)} or raise "
                f"--lr-decay-{_flag_end(unit)}"
            )
        return cls(
            max_lr=float(schedule.lr),
            min_lr=float(schedule.min_lr),
            style=schedule.lr_decay_style,
            warmup=warmup,
            warmup_unit=warmup_unit,
            decay_start=start,
            decay_length=length,
            decay_unit=unit,
        )

    def lr(self, progress: Progress) -> float:
        """The learning rate of the step that ends at `progress`."""
        warmed_up = progress.count(self.warmup_unit)
        if warmed_up < self.warmup:
            return self.max_lr * warmed_up / self.warmup
        position = progress.count(self.decay_unit)
        if position >= self.decay_length:
            done = 1.0
        elif position <= self.decay_start:
            # A curriculum's warm-up has shorter sequences: the token count can still be below decay_start.
            done = 0.0
        else:
            done = (position - self.decay_start) / (self.decay_length - self.decay_start)
        lr: float = LR_DECAY_STYLES.load(self.style)(self.max_lr, self.min_lr, done)
        return lr

    def describe(self) -> str:
        """One line for the start banner."""
        warmup = f"warm-up over {self.warmup:,.0f} {self.warmup_unit}, then " if self.warmup else ""
        if self.style == "constant":
            return f"learning rate: {warmup}constant at {self.max_lr:.3E}"
        return (
            f"learning rate: {warmup}{self.style} from {self.max_lr:.3E} to {self.min_lr:.3E} "
            f"at {self.decay_length:,} {self.decay_unit}"
        )


def constant_lr(max_lr: float, min_lr: float, done: float) -> float:
    """No decay."""
    return max_lr


def linear_decay(max_lr: float, min_lr: float, done: float) -> float:
    """Linear from max_lr (done = 0) to min_lr (done = 1)."""
    return min_lr + (1.0 - done) * (max_lr - min_lr)


def cosine_decay(max_lr: float, min_lr: float, done: float) -> float:
    """Half a cosine from max_lr (done = 0) to min_lr (done = 1)."""
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * done)) * (max_lr - min_lr)


def _flag_end(unit: Unit) -> str:
    """The flag suffix of a unit, as in --lr-decay-iters."""
    return "iters" if unit == "iterations" else unit


def _decay_length(
    schedule: ScheduleConfig, training: TrainingConfig, tokens_of_samples: Callable[[float], float]
) -> tuple[int, Unit]:
    """The end of the decay, counted from the start of training, and its unit."""
    if schedule.lr_decay_tokens is not None:
        return schedule.lr_decay_tokens, "tokens"
    if schedule.lr_decay_samples is not None:
        return schedule.lr_decay_samples, "samples"
    if schedule.lr_decay_iters is not None:
        return schedule.lr_decay_iters, "iterations"
    if training.train_iters is not None:
        return training.train_iters, "iterations"
    samples, tokens = training.train_samples, training.train_tokens
    if tokens is not None and (samples is None or tokens < tokens_of_samples(samples)):
        return tokens, "tokens"
    if samples is None:
        raise ConfigError("the length of training is not given: set --train-iters or --train-samples")
    return samples, "samples"


def _warmup_length(schedule: ScheduleConfig, decay_length: int, decay_unit: Unit) -> tuple[float, Unit]:
    """The length of the warm-up and its unit."""
    if schedule.lr_warmup_fraction is not None:
        return schedule.lr_warmup_fraction * decay_length, decay_unit
    if decay_unit == "iterations":
        return float(schedule.lr_warmup_iters), "iterations"
    return float(schedule.lr_warmup_samples), "samples"
