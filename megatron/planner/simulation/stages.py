"""Simulates all stages of a run in parallel, and makes the report of `--dry-run --simulate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from megatron.config import Config, ConfigError
from megatron.engine.instructions import pipeline_schedule
from megatron.mpu.mesh import Mesh
from megatron.planner.simulation.matching import Batch, calls_of_other, find_deadlock, rank_calls
from megatron.planner.simulation.processes import run_in_processes
from megatron.planner.simulation.record import STEP, Instruction, StepRecord
from megatron.planner.simulation.trace import QueuedMessages
from megatron.planner.simulation.world import find_stages, simulate_rank
from megatron.text_table import format_table
from megatron.units import GIB

# Most ranks whose calls are compared. Each call lists all ranks of its group, so 4,096 ranks take 3 GB and
# minutes.
_MOST_MATCHED = 4096
# Most ranks of a run that is simulated. Every simulated rank makes all process groups: with 16,384 ranks they
# take half a minute, with four times as many ten minutes.
_MOST_SIMULATED = 16_384


def simulate_stages(config: Config) -> list[StepRecord]:
    """Simulates the first device (TP rank 0, DP rank 0) of each pipeline rank; returns their records. Raises
    ConfigError if the stages are not known or the run has too many ranks, and SimulationError if a step
    cannot be simulated."""
    if config.optimizer.use_apex:
        raise ConfigError(
            "--use-apex: apex needs a GPU, so it cannot be simulated. Remove --use-apex (PyTorch's norm and "
            "Adam keep equal tensors) or --simulate."
        )
    parallel = config.parallel
    if parallel.world_size > _MOST_SIMULATED:
        raise ConfigError(
            f"--simulate with --world-size {parallel.world_size}: expected {_MOST_SIMULATED:,} at most. "
            "Remove --simulate, or plan fewer data-parallel replicas."
        )
    per_stage = parallel.world_size // parallel.pipeline_model_parallel_size
    return simulate_ranks(config, range(0, parallel.world_size, per_stage))


def simulate_ranks(
    config: Config, ranks: Iterable[int], micro_batches: int | None = None
) -> list[StepRecord]:
    """Simulates these ranks in parallel; returns their records. See `world.simulate_rank`."""
    find_stages(config)  # raises an error at once
    return run_in_processes(simulate_rank, [(config, rank, micro_batches) for rank in ranks])


def step_instructions(config: Config, rank: int, micro_batches: int | None = None) -> tuple[Instruction, ...]:
    """Returns the instructions of a step on a pipeline rank. micro_batches: None takes the run's number."""
    queued = QueuedMessages()
    count = micro_batches or config.micro_batches_per_step
    schedule = pipeline_schedule(config.parallel, rank, count, trains=True)
    return tuple(
        queued.name(Instruction(type(command).__name__, command.kwargs.get("model_chunk_id", 0)))
        for commands in schedule
        for command in commands
    )


def all_calls(
    config: Config, records: Sequence[StepRecord], micro_batches: int | None = None
) -> dict[int, list[Batch]]:
    """Returns the collective calls in one step of every rank of the run, given a record per pipeline rank."""
    calls: dict[int, list[Batch]] = {}
    for record in records:
        simulated = Mesh.from_config(config.parallel, record.rank)
        own = rank_calls(record, step_instructions(config, record.stage, micro_batches))
        per_stage = simulated.ranks_per_stage
        for rank in range(record.stage * per_stage, (record.stage + 1) * per_stage):
            calls[rank] = calls_of_other(own, simulated, Mesh.from_config(config.parallel, rank))
    return calls


def simulation_report(config: Config) -> str:
    """Returns the report of --dry-run --simulate: memory, operations, messages and host synchronizations per
    stage, and whether the collective calls of all ranks match."""
    records = simulate_stages(config)
    parallel = config.parallel
    few = 2 * parallel.pipeline_model_parallel_size + 2
    few = min(
        config.micro_batches_per_step,
        -(-few // parallel.micro_batch_multiple) * parallel.micro_batch_multiple,
    )
    if parallel.world_size > _MOST_MATCHED:
        match = f"not compared: {parallel.world_size:,} ranks, expected {_MOST_MATCHED:,} at most"
    else:
        deadlock = find_deadlock(all_calls(config, records, few))
        match = deadlock or f"all calls of {parallel.world_size} ranks match, with {few} micro-batches"
    notes = ["note: --compile is not simulated: the layers run uncompiled"]
    return "\n\n".join(
        [
            *(notes if config.training.compile else []),
            "simulated memory at the peak of a step, in GiB\n" + memory_table(records),
            "simulated step of one rank per stage\n" + work_table(config, records),
            f"collectives {match}",
        ]
    )


def memory_table(records: Sequence[StepRecord]) -> str:
    """Returns a table with a row per stage: memory at the peak by owner, and at the end of the step."""
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
    """Returns a table with a row per stage. Per step: FLOPs, operations, memory traffic, bytes sent or
    reduced, and host synchronizations. Per micro-batch: host synchronizations."""
    rows = [["stage", "TFLOP", "operations", "memory TiB", "messages GiB", "host syncs", "per micro-batch"]]
    for record in records:
        counts = record.counts_of(step_instructions(config, record.stage))
        operations = [operation for count in counts for operation in count.operations.values()]
        moved = sum(operation.bytes_read + operation.bytes_written for operation in operations)
        rows.append(
            [
                str(record.stage),
                f"{sum(count.flops for count in counts) / 1e12:,.1f}",
                f"{sum(count.launched for count in counts):,}",
                f"{moved / 2**40:,.2f}",
                f"{sum(call.bytes for count in counts for call in count.calls) / GIB:,.2f}",
                str(sum(len(count.syncs) for count in counts)),
                str(sum(syncs_per_micro_batch(record).values())),
            ]
        )
    return format_table(rows)


def syncs_per_micro_batch(record: StepRecord) -> Counter[tuple[str, str, str]]:
    """Returns the host synchronizations in every micro-batch: (instruction, cause, place) -> number."""
    return Counter(
        (str(instruction), sync.cause, sync.place)
        for instruction, count in record.rest.items()
        for sync in count.syncs
    )
