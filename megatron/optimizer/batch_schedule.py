"""Batch sizes over the run, conversions between iterations, samples and tokens, and checks of batch sizes.

All functions are pure integer functions of the number of consumed samples. Therefore a resumed run, and a run
on a different layout, have the same batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from megatron.config.config import Config
from megatron.config.mistakes import raise_first
from megatron.config.sections.batch import BatchConfig
from megatron.config.sections.curriculum import LengthCurriculum
from megatron.config.sections.training import TrainingConfig
from megatron.errors import ConfigError

# Each batch size of a ramp-up is checked, so their number has a limit. Published runs have at most 127
# increments.
_MAX_INCREMENTS = 100_000

Unit = Literal["iterations", "samples", "tokens"]


@dataclass(frozen=True)
class Progress:
    """What a run has consumed since iteration 0: iterations, samples and tokens."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    warmup_end: tuple[float, ...] = field(default=(), kw_only=True)
    """(samples, tokens) at which a warm-up in samples ends, if the decay counts in tokens; otherwise ()."""

    def count(self, unit: Unit) -> int:
        """Returns this progress in one unit: iterations, samples or tokens."""
        counts = {
            "iterations": self.iteration,
            "samples": self.consumed_samples,
            "tokens": self.consumed_tokens,
        }
        return counts[unit]


BEGIN = Progress()
"""The start of a run without a checkpoint."""


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch size over the run.

    rampup: (start, increment, samples). The batch size starts at `start`, and grows by `increment` at regular
    intervals of consumed samples. It reaches `global_batch_size` after `samples` samples, as in Megatron-LM.
    """

    global_batch_size: int
    rampup: tuple[int, int, int] | None = None

    @classmethod
    def from_config(cls, batch: BatchConfig) -> BatchSchedule:
        """Returns the schedule that the flags set. Raises ConfigError if the increments of the ramp-up do not
        reach the global batch size exactly."""
        schedule = cls(batch.global_batch_size, batch.rampup_batch_size)
        if schedule.rampup is None:
            return schedule
        start, increment, samples = schedule.rampup
        growth = batch.global_batch_size - start
        if growth <= 0 or growth % increment:
            raise ConfigError(
                f"--rampup-batch-size {start} {increment} {samples} does not reach --global-batch-size "
                f"{batch.global_batch_size}: expected a START below it, and {batch.global_batch_size} - "
                f"START = {growth} to be a multiple of INCREMENT"
            )
        if schedule.num_increments > _MAX_INCREMENTS:
            raise ConfigError(
                f"--rampup-batch-size {start} {increment} {samples} reaches --global-batch-size "
                f"{batch.global_batch_size} in {schedule.num_increments:,} increments: expected at most "
                f"{_MAX_INCREMENTS:,}; use a larger INCREMENT"
            )
        return schedule

    @property
    def num_increments(self) -> int:
        """Number of increments of the batch size during the ramp-up."""
        if self.rampup is None:
            return 0
        start, increment, _ = self.rampup
        return (self.global_batch_size - start) // increment

    def sizes(self, consumed_samples: int = 0) -> range:
        """Returns the global batch sizes of the steps after `consumed_samples` samples, in ascending
        order."""
        increment = 1 if self.rampup is None else self.rampup[1]
        return range(self.global_batch_size_at(consumed_samples), self.global_batch_size + 1, increment)

    def consumed_at_size(self, size: int) -> int:
        """Returns the number of consumed samples at which the batch size becomes `size`, which is one of
        `sizes()`."""
        if self.rampup is None or size == self.rampup[0]:
            return 0
        start, increment, samples = self.rampup
        step = (size - start) // increment
        return -(-step * samples // self.num_increments)

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Returns the global batch size of the step that starts at `consumed_samples`."""
        if self.rampup is None:
            return self.global_batch_size
        start, increment, samples = self.rampup
        steps = min(self.num_increments, consumed_samples * self.num_increments // samples)
        return start + steps * increment

    def consumed_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Returns the number of consumed samples after `iterations` steps from `consumed_samples`."""
        for begin, size, steps in self._plateaus(consumed_samples):
            if steps is None or iterations <= steps:
                return begin + iterations * size
            iterations -= steps
        raise AssertionError("unreachable: the last plateau is infinite")

    def iterations_until(self, target_samples: int, consumed_samples: int = 0) -> int:
        """Returns the smallest number of steps from `consumed_samples` that consumes at least
        `target_samples` in total."""
        iterations = 0
        for begin, size, steps in self._plateaus(consumed_samples):
            needed = max(0, -(-(target_samples - begin) // size))
            if steps is None or needed <= steps:
                return iterations + needed
            iterations += steps
        raise AssertionError("unreachable: the last plateau is infinite")

    def iterations_within(self, samples: int, consumed_samples: int = 0) -> int:
        """Returns the largest number of steps from `consumed_samples` that consumes at most `samples` in
        total."""
        iterations = self.iterations_until(samples, consumed_samples)
        return iterations if self.consumed_after(iterations, consumed_samples) <= samples else iterations - 1

    def total_iterations(
        self,
        training: TrainingConfig,
        seq_length: int,
        curriculum: LengthCurriculum | None = None,
        start: Progress = BEGIN,
    ) -> int:
        """Returns the last iteration of a run that continues from `start`. It is --train-iters, or the last
        iteration whose full batch lies within --train-samples.

        --train-tokens can end the run earlier, at the first step that reaches this number of tokens.
        """
        if training.train_iters is not None:
            iterations = training.train_iters
        elif training.train_samples is not None:
            within = self.iterations_within(training.train_samples, start.consumed_samples)
            iterations = start.iteration + max(0, within)
        else:
            raise ConfigError("the length of the run is missing: set --train-samples or --train-iters")
        if (target := training.train_tokens) is not None:
            iteration, samples, tokens, length = self._after_growth(
                seq_length, curriculum, start, lambda samples, tokens: tokens >= target
            )
            left = max(0, -(-(target - tokens) // length))
            iterations = min(iterations, iteration + self.iterations_until(samples + left, samples))
        return iterations

    def tokens_of_samples(
        self,
        target_samples: float,
        seq_length: int,
        curriculum: LengthCurriculum | None,
        start: Progress = BEGIN,
    ) -> float:
        """Returns the number of tokens that a run continuing from `start` has consumed after `target_samples`
        samples, interpolated within a step."""
        _, samples, tokens, length = self._after_growth(
            seq_length, curriculum, start, lambda samples, tokens: samples >= target_samples
        )
        return tokens + (target_samples - samples) * length

    def _after_growth(
        self,
        seq_length: int,
        curriculum: LengthCurriculum | None,
        start: Progress,
        is_enough: Callable[[int, int], bool],
    ) -> tuple[int, int, int, int]:
        """Returns (iteration, samples, tokens, last sequence length) at the end of the curriculum. If a step
        from `start` on satisfies is_enough(samples, tokens) earlier, it returns the values after this
        step."""
        iteration, samples, tokens = start.iteration, start.consumed_samples, start.consumed_tokens
        if curriculum is None:
            return iteration, samples, tokens, seq_length
        while iteration < curriculum.steps and not is_enough(samples, tokens):
            iteration += 1
            size = self.global_batch_size_at(samples)
            samples += size
            tokens += size * curriculum.length_at(iteration)
        return iteration, samples, tokens, curriculum.length_at(max(iteration, 1))

    def ramp_up_steps(self, consumed_samples: int = 0) -> list[tuple[int, int]]:
        """Returns (batch size, number of steps) for each batch size below the full one, in ascending order,
        from `consumed_samples` on."""
        return [(size, steps) for _, size, steps in self._plateaus(consumed_samples) if steps is not None]

    def _plateaus(self, consumed_samples: int) -> Iterator[tuple[int, int, int | None]]:
        """Yields (consumed samples at its start, batch size, number of steps) for each period of constant
        batch size. The last period has no end, and its number of steps is None."""
        if self.rampup is not None:
            _, increment, samples = self.rampup
            while (size := self.global_batch_size_at(consumed_samples)) < self.global_batch_size:
                step = (size - self.rampup[0]) // increment
                end = -(-(step + 1) * samples // self.num_increments)
                steps = -(-(end - consumed_samples) // size)
                yield consumed_samples, size, steps
                consumed_samples += steps * size
        yield consumed_samples, self.global_batch_size, None


@dataclass(frozen=True)
class RunLength:
    """The end of a run: its last iteration, and the number of training samples consumed until then."""

    iterations: int
    train_samples: int

    @classmethod
    def from_config(cls, config: Config, start: Progress = BEGIN) -> RunLength:
        """Returns the end of the run that continues from `start`. Only the consumption of the steps before
        `start` counts, because their batch sizes and sequence lengths may have been different."""
        schedule = BatchSchedule.from_config(config.batch)
        lengths = (config.model.seq_length, config.curriculum)
        iterations = schedule.total_iterations(config.training, *lengths, start)
        remaining = max(0, iterations - start.iteration)
        return cls(iterations, schedule.consumed_after(remaining, start.consumed_samples))

    def samples_per_split(self, config: Config) -> tuple[int, int, int]:
        """Returns the numbers of samples of the train, valid and test splits for which the data order is
        planned."""
        read, valid, test = self.samples_read(config)
        return (self.ordered_samples(config) if read else 0, valid, test)

    def samples_read(self, config: Config) -> tuple[int, int, int]:
        """Returns the numbers of samples of the train, valid and test splits that the run reads. Validation
        runs at intervals and at the end."""
        training, batch = config.training, config.batch.global_batch_size
        validations = self.iterations // training.eval_interval + 1
        return (
            0 if training.no_train else self.data_samples(config),
            validations * training.eval_iters * batch,
            training.eval_iters * batch,
        )

    def ordered_samples(self, config: Config) -> int:
        """Returns the number of training samples for which the data order is planned. An evaluation plans
        them too, although it reads none of them. See `data_samples`."""
        return max(self.data_samples(config), config.data.data_order_samples or 0)

    def data_samples(self, config: Config) -> int:
        """Returns the number of training samples that the run reads from its own data. Raises ConfigError if
        this data would begin after the end of the run."""
        first = config.data.data_first_sample
        if first and first >= self.train_samples:
            raise ConfigError(
                f"--data-first-sample {first} is not before the end of the run, after {self.train_samples} "
                "samples: reduce --data-first-sample, or extend the run"
            )
        return self.train_samples - first


def batch_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence if the layout does not support a batch size of the run.

    A run with --load may resume after the smaller batches of a ramp-up. `check_remaining_batches` checks
    these batches when the checkpoint is known.
    """
    resumes = config.checkpoint.load is not None
    schedule = BatchSchedule.from_config(config.batch)
    first = schedule.consumed_at_size(config.batch.global_batch_size) if resumes else 0
    yield from islice(_remaining_batch_mistakes(config, first), 1)


def check_remaining_batches(config: Config, consumed_samples: int) -> None:
    """Raises ConfigError if the layout does not support the batch size of a step after `consumed_samples`."""
    raise_first(_remaining_batch_mistakes(config, consumed_samples))


def _remaining_batch_mistakes(config: Config, consumed_samples: int) -> Iterator[str]:
    schedule = BatchSchedule.from_config(config.batch)
    if problem := _batch_problem(config, schedule.global_batch_size):
        yield f"--global-batch-size {problem}"
    for size in schedule.sizes(consumed_samples):
        if problem := _batch_problem(config, size):
            ramp = " ".join(map(str, schedule.rampup or ()))
            yield (
                f"--rampup-batch-size {ramp}: a batch of {problem} (or START or INCREMENT), or resume a "
                f"checkpoint of at least {first_supported_sample(config):,} consumed samples"
            )


def first_supported_sample(config: Config) -> int:
    """Returns the number of consumed samples after which the layout supports all batch sizes of the run."""
    schedule = BatchSchedule.from_config(config.batch)
    smallest = config.batch.global_batch_size
    for size in reversed(schedule.sizes()):
        if _batch_problem(config, size) is not None:
            break
        smallest = size
    return schedule.consumed_at_size(smallest)


def _batch_problem(config: Config, size: int) -> str | None:
    """Returns why the layout does not support batches of `size` samples, and the remedy; None if it supports
    them."""
    parallel, micro = config.parallel, config.batch.micro_batch_size
    data = parallel.data_parallel_size
    if parallel.world_size % parallel.ranks_per_replica:  # the data-parallel size is then unknown
        data = 1
        if size % micro:
            return f"{size} is not divisible by --micro-batch-size {micro}: change one of them"
    elif size % (micro * data):
        return (
            f"{size} is not divisible by --micro-batch-size {micro} x data-parallel size {data} = "
            f"{micro * data}: change one of the sizes, or the number of processes"
        )
    needed, accumulation = parallel.min_micro_batches, size // (micro * data)
    if accumulation < needed:
        return (
            f"{size} has {accumulation} micro-batches per step and replica, and --pipeline-schedule "
            f"{parallel.pipeline_schedule} needs {parallel.schedule.micro_batches_per_rank} x "
            f"--pipeline-model-parallel-size = {needed}: increase the batch, or reduce "
            "--micro-batch-size"
        )
    if accumulation % parallel.micro_batch_multiple:
        return (
            f"{size} has {accumulation} micro-batches per step and replica, and --pipeline-schedule "
            f"{parallel.pipeline_schedule} needs a multiple of --pipeline-model-parallel-size = "
            f"{parallel.micro_batch_multiple}: change the batch, --micro-batch-size, or the number of ranks"
        )
    return None
