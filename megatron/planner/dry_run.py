"""--dry-run: the report of a run, and the plan of its memory and time."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.compatibility import resumed_schedule
from megatron.checkpoint.lineage.start import choose_checkpoint
from megatron.cluster import processes
from megatron.cluster.exit_status import ExitStatus
from megatron.config import BatchSchedule, Config
from megatron.config.batch import check_remaining_batches, first_supported_sample
from megatron.errors import printable
from megatron.pipeline.stages import StagePlan
from megatron.planner.memory.fit import fit_summary
from megatron.planner.memory.stage_memory import StageMemory, plan_memory
from megatron.planner.planned_report import planned_run_report
from megatron.planner.timing.step_time import planned_step
from megatron.training.build import Setup
from megatron.training.data import planned_data_report
from megatron.training.run_report import planned_start, start_notes


def dry_run(config: Config, notes: list[str]) -> ExitStatus:
    """Prints the plan, and with --simulate the simulated step; returns FINISHED, or USER_ERROR if the plan
    does not fit the device.

    notes: sentences about the flags, for the start of the report.
    """
    setup = Setup.from_config(config)
    assert setup.plan is not None
    memory = plan_memory(config, setup.vocab.size, setup.plan)
    fits, sentence = fit_summary(config, setup.vocab.size, memory)
    if processes.is_main_process():
        print(printable(_report(config, notes, setup, setup.plan, memory)))
        if sentence:
            print(f"\nmemory     {sentence}")
        if config.training.simulate:
            from megatron.simulation.stages import simulation_report

            print("\n" + simulation_report(config))
    return ExitStatus.FINISHED if fits else ExitStatus.USER_ERROR


def _report(
    config: Config, notes: list[str], setup: Setup, plan: StagePlan, memory: list[StageMemory]
) -> str:
    vocab, length = setup.vocab, setup.length
    notes = [*notes, *ramp_up_notes(config)]
    data = planned_data_report(config, length)
    checkpoint, found = planned_start(config, length, vocab)
    lr_schedule = resumed_schedule(checkpoint, config)
    notes += found + start_notes(checkpoint, config, length, setup.batches, lr_schedule)
    step = planned_step(config, plan, vocab.size)
    text = planned_run_report(config, plan, vocab.size, notes, lr_schedule.describe(), memory, step)
    return f"{text}\n\n{data}"


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
