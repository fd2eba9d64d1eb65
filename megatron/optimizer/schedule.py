"""The learning-rate schedule, a pure function of the training progress.

The progress of a step includes the step itself. So the first step of a warm-up over 100 iterations uses 1/100
of the maximum instead of 0, and a log line shows the learning rate that its step used. The schedule has no
state to save: a resumed run computes the learning rate from its counters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from megatron.config import Config, ConfigError, ScheduleConfig, TrainingConfig
from megatron.config.registries import LR_DECAY_STYLES, WSD_DECAY_STYLES, WarmupRelativeStyle
from megatron.optimizer.batch_schedule import BEGIN, BatchSchedule, Progress, Unit

WSD_BY_TOKENS = (
    "--lr-decay-style WSD with a decay that ends by tokens (--lr-decay-tokens or --train-tokens): "
    "WSD counts in iterations or samples; set --lr-decay-iters or --lr-decay-samples instead"
)


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up from 0 to max_lr, then decay to min_lr at decay_length, then constant min_lr.

    warmup: length of the warm-up, in warmup_unit.
    decay_start: start of the decay, in decay_unit from the start of training: the end of the warm-up, or with
        WSD the end of the stable phase at max_lr.
    decay_length: end of the decay, in decay_unit from the start of training.
    style: a name in LR_DECAY_STYLES; with 'constant' the learning rate stays at max_lr.
    wsd_style: with WSD, a name in WSD_DECAY_STYLES.

    The formulas come from Megatron-LM (megatron/core/optimizer_param_scheduler.py), which counts in samples.
    This repository counts in iterations if --train-iters is given.
    """

    max_lr: float
    min_lr: float
    style: str
    warmup: float
    warmup_unit: Unit
    decay_start: float
    decay_length: int
    decay_unit: Unit
    wsd_style: str | None = None

    def __post_init__(self) -> None:
        LR_DECAY_STYLES.load(self.style)  # raises ConfigError for an unknown style
        if self.style == "WSD":
            WSD_DECAY_STYLES.load(self.wsd_style or "")

    @classmethod
    def from_config(
        cls,
        schedule: ScheduleConfig,
        training: TrainingConfig,
        seq_length: int,
        tokens_of_samples: Callable[[float], float] | None = None,
    ) -> LearningRateSchedule:
        """Returns the schedule of the validated flags. Raises ConfigError if the warm-up ends after the start
        or the end of the decay.

        The decay length defaults to the length of training: --train-iters, or --train-samples or
        --train-tokens, whichever ends first. A decay by tokens has a warm-up in samples. tokens_of_samples:
        returns the number of tokens in the first n samples; by default every sample has seq_length tokens.
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
        wsd_style = None
        if schedule.lr_decay_style == "WSD":
            start, wsd_style = _stable_end(schedule, length, unit), schedule.lr_wsd_decay_style
        return cls(
            max_lr=float(schedule.lr),
            min_lr=float(schedule.min_lr),
            style=schedule.lr_decay_style,
            warmup=warmup,
            warmup_unit=warmup_unit,
            decay_start=start,
            decay_length=length,
            decay_unit=unit,
            wsd_style=wsd_style,
        )

    def effective_settings(self, progress: Progress) -> dict[str, Any]:
        """Returns the settings that determine the learning rates after `progress`. For a schedule without a
        decay these are its maximum and, until it is over, the warm-up."""
        if self.style != "constant" and self.min_lr != self.max_lr:
            return asdict(self)
        is_warm = progress.count(self.warmup_unit) >= self.warmup
        warmup = {} if is_warm else {"warmup": self.warmup, "warmup_unit": self.warmup_unit}
        return {"max_lr": self.max_lr, **warmup}

    @property
    def warmup_end(self) -> tuple[float, ...]:
        """The end of a warm-up in samples, if the decay counts in tokens: see `Progress`."""
        is_counted_twice = (self.warmup_unit, self.decay_unit) == ("samples", "tokens")
        return (self.warmup, self.decay_start) if is_counted_twice else ()

    def lr(self, progress: Progress) -> float:
        """Returns the learning rate of the step that ends at `progress`."""
        warmed_up = progress.count(self.warmup_unit)
        if warmed_up < self.warmup:
            return self.max_lr * warmed_up / self.warmup
        # During a curriculum's warm-up sequences are shorter, so the token count can still be below
        # decay_start.
        position = max(progress.count(self.decay_unit), self.decay_start)
        lr: float
        if isinstance(LR_DECAY_STYLES[self.style], WarmupRelativeStyle):
            if position > self.decay_length:
                return self.min_lr
            lr = LR_DECAY_STYLES.load(self.style)(self.max_lr, self.min_lr, position / self.decay_start)
            return lr
        if self.wsd_style is not None and position == self.decay_start:
            return self.max_lr  # exact, so that a base run and its cooldowns agree
        if position == self.decay_start:
            done = 0.0
        elif position >= self.decay_length:
            done = 1.0
        else:
            done = (position - self.decay_start) / (self.decay_length - self.decay_start)
        styles, style = (
            (LR_DECAY_STYLES, self.style) if self.wsd_style is None else (WSD_DECAY_STYLES, self.wsd_style)
        )
        lr = styles.load(style)(self.max_lr, self.min_lr, done)
        return lr

    def describe(self) -> str:
        """Returns a description of one line for the startup report."""
        warmup = f"warm-up over {self.warmup:,.0f} {self.warmup_unit}, then " if self.warmup else ""
        if self.style == "constant":
            return f"learning rate: {warmup}constant at {self.max_lr:.3E}"
        if self.wsd_style is not None:
            stable = f"constant at {self.max_lr:.3E}"
            if self.decay_start == self.decay_length:
                return f"learning rate: {warmup}{stable} up to {self.decay_length:,} {self.decay_unit} (WSD)"
            return (
                f"learning rate: {warmup}{stable} up to {self.decay_start:,.0f} {self.decay_unit}, then "
                f"{self.wsd_style} to {self.min_lr:.3E} at {self.decay_length:,} {self.decay_unit} (WSD)"
            )
        return (
            f"learning rate: {warmup}{self.style} from {self.max_lr:.3E} to {self.min_lr:.3E} "
            f"at {self.decay_length:,} {self.decay_unit}"
        )


def schedule_of(config: Config, start: Progress = BEGIN) -> LearningRateSchedule:
    """Returns the schedule for a run that continues from `start`. Raises ConfigError as
    `LearningRateSchedule.from_config` does."""
    seq_length = config.model.seq_length

    def tokens_of_samples(samples: float) -> float:
        is_past = samples < start.consumed_samples
        if is_past and samples in start.warmup_end[:1]:
            return start.warmup_end[-1]
        batches = BatchSchedule.from_config(config.batch)
        return batches.tokens_of_samples(samples, seq_length, config.curriculum, BEGIN if is_past else start)

    return LearningRateSchedule.from_config(config.schedule, config.training, seq_length, tokens_of_samples)


def constant_lr(max_lr: float, min_lr: float, done: float) -> float:
    """Returns max_lr, because there is no decay."""
    return max_lr


def linear_decay(max_lr: float, min_lr: float, done: float) -> float:
    """Returns the linear decay from max_lr (done = 0) to min_lr (done = 1)."""
    return min_lr + (1.0 - done) * (max_lr - min_lr)


def cosine_decay(max_lr: float, min_lr: float, done: float) -> float:
    """Returns the decay along half a cosine from max_lr (done = 0) to min_lr (done = 1)."""
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * done)) * (max_lr - min_lr)


def exponential_decay(max_lr: float, min_lr: float, done: float) -> float:
    """Returns the decay as 2 * 0.5^done - 1 from max_lr (done = 0) to min_lr (done = 1)."""
    return min_lr + (2.0 * 0.5**done - 1.0) * (max_lr - min_lr)


def minus_sqrt_decay(max_lr: float, min_lr: float, done: float) -> float:
    """Returns the decay as 1 - sqrt(done) from max_lr (done = 0) to min_lr (done = 1): see
    arXiv:2405.18392."""
    return min_lr + (1.0 - math.sqrt(done)) * (max_lr - min_lr)


def inverse_square_root_decay(max_lr: float, min_lr: float, growth: float) -> float:
    """Returns max_lr / sqrt(growth), but at least min_lr ("Attention Is All You Need", arXiv:1706.03762).
    growth: progress divided by the length of the warm-up."""
    return max(min_lr, max_lr / math.sqrt(growth))


def _stable_end(schedule: ScheduleConfig, end: int, unit: Unit) -> int:
    """Returns the end of WSD's stable phase. Raises ConfigError if --train-tokens ends the decay."""
    if unit == "tokens":
        raise ConfigError(WSD_BY_TOKENS)
    by_iters = unit == "iterations"
    length = schedule.lr_wsd_decay_iters if by_iters else schedule.lr_wsd_decay_samples
    assert length is not None  # `megatron.arguments` has checked it
    return end - length


def _flag_end(unit: Unit) -> str:
    """Returns the ending of a flag's name for a unit, such as 'iters' in --lr-decay-iters."""
    return "iters" if unit == "iterations" else unit


def _decay_length(
    schedule: ScheduleConfig, training: TrainingConfig, tokens_of_samples: Callable[[float], float]
) -> tuple[int, Unit]:
    """Returns the end of the decay, counted from the start of training, and its unit."""
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
    """Returns the length of the warm-up and its unit."""
    if schedule.lr_warmup_fraction is not None:
        return schedule.lr_warmup_fraction * decay_length, decay_unit
    if decay_unit == "iterations":
        return float(schedule.lr_warmup_iters), "iterations"
    return float(schedule.lr_warmup_samples), "samples"
