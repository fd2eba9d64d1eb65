"""Checks of batch sizes, of the length of the run, and of a curriculum of sequence lengths."""

from __future__ import annotations

from megatron.config.batch import BatchSchedule
from megatron.config.config import Config
from megatron.config.parsing.curriculum import SOURCE, LengthCurriculum
from megatron.config.sections.model import ModelConfig
from megatron.config.sections.parallel import ParallelConfig
from megatron.config.sections.training import TrainingConfig
from megatron.errors import ConfigError


def check_batches(config: Config) -> None:
    """Raise ConfigError for batch sizes that the layout does not support.

    A run with --load may resume after the smaller batches of a ramp-up: `check_remaining_batches` checks them
    when the checkpoint is known.
    """
    resumes = config.checkpoint.load is not None
    schedule = BatchSchedule.from_config(config.batch)
    check_remaining_batches(
        config, schedule.consumed_at_size(config.batch.global_batch_size) if resumes else 0
    )


def check_remaining_batches(config: Config, consumed_samples: int) -> None:
    """Raise ConfigError for an unsupported batch size of a step after `consumed_samples`."""
    schedule = BatchSchedule.from_config(config.batch)
    if problem := _batch_problem(config, schedule.global_batch_size):
        raise ConfigError(f"--global-batch-size {problem}")
    for size in schedule.sizes(consumed_samples):
        if problem := _batch_problem(config, size):
            ramp = " ".join(map(str, schedule.rampup or ()))
            raise ConfigError(
                f"--rampup-batch-size {ramp}: a batch of {problem} (or START or INCREMENT), or resume a "
                f"checkpoint of at least {first_supported_sample(config):,} consumed samples"
            )


def check_batch_size(config: Config, size: int) -> None:
    """Raise ConfigError if the layout does not support batches of `size` samples."""
    if problem := _batch_problem(config, size):
        raise ConfigError(f"a batch of {problem}")


def first_supported_sample(config: Config) -> int:
    """The number of consumed samples from which on the layout supports all batch sizes of the run."""
    schedule = BatchSchedule.from_config(config.batch)
    smallest = config.batch.global_batch_size
    for size in reversed(schedule.sizes()):
        if _batch_problem(config, size) is not None:
            break
        smallest = size
    return schedule.consumed_at_size(smallest)


def _batch_problem(config: Config, size: int) -> str | None:
    """Why the layout does not support batches of `size` samples, and the remedy; None if it does."""
    parallel, micro = config.parallel, config.batch.micro_batch_size
    data = parallel.data_parallel_size
    if size % (micro * data):
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


def check_length(config: Config) -> None:
    """Raise ConfigError unless exactly one flag sets the length of the run, of one batch or more."""
    training = config.training
    if (training.train_iters is None) == (training.train_samples is None):
        found = (
            "neither of them"
            if training.train_iters is None
            else (f"{training.train_iters} and {training.train_samples}")
        )
        raise ConfigError(f"exactly one of --train-iters and --train-samples is required: got {found}")
    first_batch = BatchSchedule.from_config(config.batch).global_batch_size_at(0)
    if training.train_samples is not None and training.train_samples < first_batch:
        raise ConfigError(
            f"--train-samples {training.train_samples} is less than the first batch of {first_batch}: "
            "increase it, or reduce --global-batch-size"
        )


def check_curriculum(
    curriculum: LengthCurriculum, model: ModelConfig, parallel: ParallelConfig, training: TrainingConfig
) -> None:
    """Raise ConfigError for sequence lengths that the run does not support."""
    if curriculum.max_length > model.seq_length:
        raise ConfigError(
            f"{SOURCE} reaches {curriculum.max_length} tokens, --seq-length is {model.seq_length}: reduce "
            "its max_difficulty, or increase the latter"
        )
    tensor = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and (odd := [n for n in curriculum.all_lengths() if n % tensor]):
        raise ConfigError(
            f"{SOURCE} has sequences of {odd[0]} tokens, which with --sequence-parallel must be "
            f"divisible by --tensor-model-parallel-size {tensor}: choose multiples of it (difficulty_step)"
        )
    if training.compile:
        raise ConfigError(
            "--compile with a curriculum of sequence lengths: layers would be recompiled for each length, "
            "remove the flag until the curriculum is complete"
        )
