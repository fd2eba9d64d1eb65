"""Checks of batch sizes and of the length of the run."""

from __future__ import annotations

from megatron.config.batch import BatchSchedule
from megatron.config.config import Config
from megatron.config.errors import ConfigError


def check_batches(config: Config) -> None:
    """Raise ConfigError for a batch size that micro-batches and replicas do not divide."""
    micro, data = config.batch.micro_batch_size, config.parallel.data_parallel_size
    schedule = BatchSchedule.from_config(config.batch)
    for size in schedule.sizes():
        if size % (micro * data) == 0:
            continue
        product = f"--micro-batch-size {micro} x data-parallel size {data} = {micro * data}"
        if size == config.batch.global_batch_size:
            raise ConfigError(
                f"--global-batch-size {size} is not divisible by {product}: change one of the two sizes, or "
                "the number of processes"
            )
        ramp = " ".join(map(str, config.batch.rampup_batch_size or ()))
        raise ConfigError(
            f"--rampup-batch-size {ramp} has a batch of {size}, which is not divisible by {product}: "
            "change START or INCREMENT"
        )


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
