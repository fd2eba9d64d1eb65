"""--dry-run: the startup report of a run, with its planned memory and predicted time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.checkpoint.compatibility import starting_from
from megatron.checkpoint.record import Checkpoint
from megatron.cluster import processes
from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.preflight import read_network_figures
from megatron.config import Config
from megatron.errors import printable
from megatron.optimizer.batch_schedule import BatchSchedule, check_remaining_batches, first_supported_sample
from megatron.pipeline.stages import stage_flops
from megatron.planner.fit import free_saving, with_verdict
from megatron.planner.layer_memory import memory_costs
from megatron.planner.plan import Plan, plan_of
from megatron.planner.step_time import planned_step, time_lines
from megatron.run import Run
from megatron.text_table import format_table
from megatron.training.build import new_run
from megatron.training.data import planned_data_report
from megatron.training.run_report import planned_start, run_report, start_notes
from megatron.units import GIB


def dry_run(config: Config, notes: list[str]) -> ExitStatus:
    """Prints the plan. Returns FINISHED, or USER_ERROR if the plan does not fit the device. notes: sentences
    about the flags, which are printed at the start of the report."""
    run = new_run(config, memory_costs)
    plan = with_verdict(plan_of(run))
    if processes.is_main_process():
        print(printable(_report(plan, notes)))
        if plan.verdict:
            print(f"\n{verdict_lines(plan)}")
    return ExitStatus.FINISHED if plan.fits is not False else ExitStatus.USER_ERROR


def _report(plan: Plan, notes: list[str]) -> str:
    checkpoint, found = planned_start(plan.run)
    notes = [*notes, *ramp_up_notes(plan.run, checkpoint)]
    run = starting_from(checkpoint, plan.run)
    data = planned_data_report(run)
    learning_rate = run.lr_schedule.describe()
    notes += found + start_notes(checkpoint, run)
    text = planned_run_report(replace(plan, run=run, step=planned_step(run)), notes, learning_rate)
    return f"{text}\n\n{data}"


def verdict_lines(plan: Plan) -> str:
    """Returns the lines on whether the plan fits, and on memory that --zero-stage 1 saves at no cost."""
    saving = free_saving(plan) if plan.fits else ""
    return f"memory     {plan.verdict}" + (f"\nnote       {saving}" if saving else "")


def planned_run_report(plan: Plan, notes: Sequence[str] = (), learning_rate: str = "") -> str:
    """Returns the report that a run prints at its start, followed by the planned memory and the predicted
    time."""
    parts = [
        run_report(plan.run, notes, learning_rate, _network_lines(plan.config)),
        f"planned memory of a device in GiB{plan.assumption and f' ({plan.assumption})'}\n"
        + memory_table(plan),
        *([time_lines(plan.step)] if plan.step is not None else []),
    ]
    return "\n\n".join(parts)


def _network_lines(config: Config) -> list[str]:
    """Returns the line on --network-figures (the measured rates that the prediction uses); [] without this
    flag."""
    figures = None if config.training.gpu is None else read_network_figures(config)
    return [] if figures is None else [f"network    {figures.describe()} ({config.parallel.network_figures})"]


def memory_table(plan: Plan) -> str:
    """Returns a table: for each pipeline rank the parts of `StageMemory` in GiB, and its share of the
    FLOPs."""
    stages = plan.run.stages
    work = stages.sum_by_rank(stage_flops(plan.config, stages, plan.run.vocab.size))
    parts = ("state", "activations", "head", "temporaries", "tables", "total", "host")
    rows = [["stage" if stages.has_one_stage_per_rank else "rank", *parts, "work"]]
    for rank, planned in enumerate(plan.memory):
        sizes = [f"{getattr(planned, part) / GIB:.3f}" for part in parts]
        rows.append([str(rank), *sizes, f"{100 * work[rank] / sum(work):.1f} %"])
    return format_table(rows)


def ramp_up_notes(run: Run, checkpoint: Checkpoint | None) -> list[str]:
    """Returns a note on the batch sizes of --rampup-batch-size that remain after `checkpoint`, the one that
    --load names. Returns [] without --rampup-batch-size and --load.

    If --load has no checkpoint on this machine, the note names the batch sizes that the layout supports, and
    the number of consumed samples from which a run can resume. Raises ConfigError if the layout does not
    support a batch size that remains.
    """
    config, schedule, load = run.config, run.batches, run.config.checkpoint.load
    if load is None or config.batch.rampup_batch_size is None:
        return []
    if checkpoint is not None:
        consumed = checkpoint.start_state.consumed_samples
        check_remaining_batches(config, consumed)
        return [
            f"a run resumes {checkpoint.folder} at {consumed:,} consumed samples: "
            f"{_sizes(schedule, consumed)} remain"
        ]
    first = first_supported_sample(config)
    if first == 0:
        return []
    return [
        f"--load {load} has no checkpoint on this machine, and the layout does not support the smaller "
        f"batches of the ramp-up: a run fails at startup unless its checkpoint has at least {first:,} "
        f"consumed samples; {_sizes(schedule, first)} remain after that"
    ]


def _sizes(schedule: BatchSchedule, consumed_samples: int) -> str:
    sizes = schedule.sizes(consumed_samples)
    if len(sizes) == 1:
        return f"batches of {sizes[0]}"
    return f"batches of {sizes[0]} to {sizes[-1]} in steps of {sizes.step}"
