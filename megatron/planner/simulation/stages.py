"""All stages of a run, simulated in parallel, and what `--dry-run --simulate` prints of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from megatron.config import Config, ConfigError
from megatron.engine.instructions import pipeline_schedule
from megatron.mpu.layout import ParallelLayout
from megatron.planner.simulation.matching import Batch, calls_of_other, find_deadlock, rank_calls
from megatron.planner.simulation.processes import run_in_processes
from megatron.planner.simulation.record import STEP, Instruction, StepRecord
from megatron.planner.simulation.stage_costs import inputs_of_stages
from megatron.planner.simulation.trace import QueuedMessages
from megatron.planner.simulation.world import plan_of, simulate_rank
from megatron.text_table import format_table
from megatron.units import GIB

# The calls of every rank name all members of its groups: 4,096 ranks take 3 GB and minutes. Every simulated
# rank makes all groups: 16,384 ranks take half a minute, four times as many ten minutes.
_MOST_MATCHED = 4096
_MOST_SIMULATED = 16_384


def simulate_stages(config: Config) -> list[StepRecord]:
    """A record of each pipeline rank, of its first tensor and data rank. ConfigError if the stages are not
    known or the ranks are too many, SimulationError if a step cannot be simulated."""
    if config.optimizer.use_apex:
        raise ConfigError(
            "--use-apex cannot be simulated, apex needs a GPU: remove --use-apex or --simulate "
            "(PyTorch's norm and Adam keep the same tensors)"
        )
    parallel = config.parallel
    if parallel.world_size > _MOST_SIMULATED:
        raise ConfigError(
            f"--simulate with --world-size {parallel.world_size}: expected {_MOST_SIMULATED:,} at most; plan "
            "without --simulate, or with fewer data-parallel replicas"
        )
    per_stage = parallel.world_size // parallel.pipeline_model_parallel_size
    return simulate_ranks(config, range(0, parallel.world_size, per_stage))


def simulate_ranks(
    config: Config, ranks: Iterable[int], micro_batches: int | None = None
) -> list[StepRecord]:
    """A record of each of these ranks; see `world.simulate_rank`."""
    vocab, plan = plan_of(config)
    inputs = inputs_of_stages(config, plan, vocab.size)
    return run_in_processes(simulate_rank, [(config, rank, inputs, micro_batches) for rank in ranks])


def run_order(config: Config, stage: int, micro_batches: int | None = None) -> tuple[Instruction, ...]:
    """The instructions of the run's training step on a pipeline rank, with the run's number of micro-batches
    or another."""
    queued = QueuedMessages()
    count = micro_batches or config.micro_batches_per_step
    schedule = pipeline_schedule(config.parallel, stage, count, trains=True)
    return tuple(
        queued.name(Instruction(type(command).__name__, command.kwargs.get("model_chunk_id", 0)))
        for commands in schedule
        for command in commands
    )


def all_calls(
    config: Config, records: Sequence[StepRecord], micro_batches: int | None = None
) -> dict[int, list[Batch]]:
    """The collective calls of every rank of the run in one step, from a record per pipeline rank."""
    calls: dict[int, list[Batch]] = {}
    for record in records:
        simulated = ParallelLayout.from_config(config.parallel, record.rank)
        own = rank_calls(record, run_order(config, record.stage, micro_batches))
        per_stage = simulated.tp_size * simulated.dp_size
        for rank in range(record.stage * per_stage, (record.stage + 1) * per_stage):
            calls[rank] = calls_of_other(own, simulated, ParallelLayout.from_config(config.parallel, rank))
    return calls


def simulation_report(config: Config) -> str:
    """The simulated table of --dry-run --simulate: memory, work, messages and host synchronizations per
    stage, and whether the collective calls of all ranks fit."""
    records = simulate_stages(config)
    parallel = config.parallel
    few = 2 * parallel.pipeline_model_parallel_size + 2
    few = min(
        config.micro_batches_per_step,
        -(-few // parallel.micro_batch_multiple) * parallel.micro_batch_multiple,
    )
    if parallel.world_size > _MOST_MATCHED:
        fit = f"not compared: {parallel.world_size:,} ranks, expected {_MOST_MATCHED:,} at most"
    else:
        deadlock = find_deadlock(all_calls(config, records, few))
        fit = deadlock or f"all calls of {parallel.world_size} ranks fit, with {few} micro-batches"
    notes = ["note: --compile is not simulated: the operations are those of the layers as written"]
    return "\n\n".join(
        [
            *(notes if config.training.compile else []),
            "simulated memory, GiB of the fullest time of a step\n" + memory_table(records),
            "simulated step of one rank per stage\n" + work_table(config, records),
            f"collectives {fit}",
        ]
    )


def memory_table(records: Sequence[StepRecord]) -> str:
    """A row per stage: the peak by owner, and what stays allocated between steps."""
    names = "stage parameters gradients optimizer activations temporary tables peak during end"
    rows = [names.split()]
    for record in records:
        peak = record.peak
        parts = [
            peak.parameters,
            peak.gradients,
            peak.optimizer,
            sum(peak.activations),
            peak.temporaries,
            sum(peak.tables.values()),
            peak.total,
        ]
        shown = [f"{part / GIB:.3f}" for part in parts]
        rows.append([str(record.stage), *shown, peak.during or STEP, f"{record.end.total / GIB:.3f}"])
    return format_table(rows)


def work_table(config: Config, records: Sequence[StepRecord]) -> str:
    """A row per stage: FLOPs, operations, bytes that pass through memory, bytes that are sent or reduced, and
    host synchronizations, per step, and those synchronizations that occur in every micro-batch."""
    rows = [["stage", "TFLOP", "operations", "memory TiB", "messages GiB", "host syncs", "per micro-batch"]]
    for record in records:
        works = record.works_of(run_order(config, record.stage))
        counts = [count for work in works for count in work.operations.values()]
        moved = sum(count.bytes_read + count.bytes_written for count in counts)
        rows.append(
            [
                str(record.stage),
                f"{sum(work.flops for work in works) / 1e12:,.1f}",
                f"{sum(work.launched for work in works):,}",
                f"{moved / 2**40:,.2f}",
                f"{sum(call.bytes for work in works for call in work.calls) / GIB:,.2f}",
                str(sum(len(work.syncs) for work in works)),
                str(sum(syncs_per_micro_batch(record).values())),
            ]
        )
    return format_table(rows)


def syncs_per_micro_batch(record: StepRecord) -> Counter[tuple[str, str, str]]:
    """(instruction, cause, place) -> host synchronizations in every micro-batch."""
    return Counter(
        (str(instruction), sync.cause, sync.place)
        for instruction, work in record.rest.items()
        for sync in work.syncs
    )
