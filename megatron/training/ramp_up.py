"""What a dry run can say about a resumed batch size ramp-up."""

from pathlib import Path

from megatron.checkpoint.lineage.start import choose_checkpoint
from megatron.config import BatchSchedule, Config
from megatron.config.checks.batch import check_remaining_batches, first_supported_sample


def ramp_up_notes(config: Config) -> list[str]:
    """With --load and --rampup-batch-size: one sentence on the batch sizes that remain, or [].

    Raises ConfigError if the checkpoint of --load cannot be opened, or if the layout does not support a batch
    size that remains after it. Without a checkpoint on this machine the note has the sizes that the layout
    supports, and the number of samples from which on a run can resume.
    """
    load = config.checkpoint.load
    if load is None or config.batch.rampup_batch_size is None:
        return []
    schedule = BatchSchedule.from_config(config.batch)
    checkpoint = choose_checkpoint(config.checkpoint, None) if Path(load).is_dir() else None
    if checkpoint is not None:
        consumed = checkpoint.start_state.consumed_samples
        check_remaining_batches(config, consumed)
        return [
            f"a run resumes {checkpoint.folder} at {consumed:,} samples: {_sizes(schedule, consumed)} remain"
        ]
    first = first_supported_sample(config)
    if first == 0:
        return []
    return [
        f"--load {load} holds no checkpoint here, and the layout does not support the smaller batches of the "
        f"ramp-up: a run is refused unless it resumes from at least {first:,} consumed samples, when "
        f"{_sizes(schedule, first)} remain"
    ]


def _sizes(schedule: BatchSchedule, consumed_samples: int) -> str:
    sizes = schedule.sizes(consumed_samples)
    if len(sizes) == 1:
        return f"batches of {sizes[0]}"
    return f"batches of {sizes[0]} to {sizes[-1]} in steps of {sizes.step}"
