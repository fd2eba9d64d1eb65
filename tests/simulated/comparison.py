"""Finds the figures in which the plan of a step and the complete simulated step differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megatron.config import Config
from megatron.mpu.mesh import Mesh
from megatron.planner.layer_memory import planned_run
from megatron.planner.plan import CommunicationRow, plan_of
from megatron.planner.simulation.device import CollectiveCall
from megatron.planner.simulation.passes import Action, Collective, Group, Kernel, group_name
from megatron.planner.simulation.stage_costs import rank_update, stage_costs
from megatron.run import Run
from tests.support.simulation.record import Instruction, OpCounts, StepRecord

STATE_TOLERANCE, PEAK_TOLERANCE, BYTES_TOLERANCE = 0.001, 0.01, 0.02
# DeepSpeed and the engine launch a few copies of messages and additions of losses.
LAUNCHES_TOLERANCE = 6
PASSES = {"forward": "ForwardPass", "backward": "BackwardPass", "weight": "WeightGradPass"}
# Collectives up to this size exchange losses, norms, overflows and exit codes.
_LARGEST_SCALARS = 64

Calls = Counter[tuple[Group, str, float]]
"""(group, operation, bytes) -> number of calls."""


def disagreements(config: Config, records: Sequence[StepRecord]) -> list[str]:
    """Returns a sentence for each figure that differs from the simulation. records: a record per pipeline
    rank."""
    run = planned_run(config)
    plan, planned = run.stages, plan_of(run)
    found = []
    for record, memory in zip(records, planned.memory, strict=True):
        held = [stage for stage, rank in enumerate(plan.rank_of_stage) if rank == record.stage]
        checks = [
            ("parameters", sum(map(plan.stage_parameters, held)), record.parameters, 0.0),
            ("state", memory.state, record.end.state, STATE_TOLERANCE),
            ("peak memory", memory.total, record.peak.total, PEAK_TOLERANCE),
            *_messages(config, planned.communication, record),
        ]
        found += [f"rank {record.stage}: {text}" for text in _beyond(checks)]
        for chunk, stage in enumerate(held):
            found += _of_passes(run, record, stage, chunk)
        found += _of_step(run, record)
    return found


def _messages(
    config: Config, rows: Iterable[CommunicationRow], record: StepRecord
) -> Iterator[tuple[str, float, float, float]]:
    """Yields the bytes that a rank sends and receives per micro-batch: planned, simulated, and the tolerance,
    which covers shapes and tables of parts."""
    for operation in ("send", "recv_"):
        planned = sum(
            row.bytes
            for row in rows
            if (row.rank, row.group, row.operation) == (record.stage, "stages", operation.strip("_"))
        )
        simulated = sum(call.bytes for call in record.calls if call.operation == operation)
        yield (
            operation,
            planned / config.micro_batches_per_step,
            simulated / record.micro_batches,
            BYTES_TOLERANCE,
        )


def _of_passes(run: Run, record: StepRecord, stage: int, chunk: int) -> Iterator[str]:
    """Compares each pass of a micro-batch in the middle of a step."""
    mesh = Mesh.from_config(run.config.parallel, record.rank)
    for name, actions in stage_costs(run, stage).passes.items():
        planned = list(actions)
        instruction = Instruction(PASSES[name], chunk)
        # A step of one micro-batch has only first occurrences.
        works = record.rest if instruction in record.rest else record.first
        simulated = works.get(instruction, OpCounts())
        kernels = [action for action in planned if isinstance(action, Kernel)]
        counts = simulated.operations.values()
        checks = [
            ("FLOPs", sum(kernel.flops for kernel in kernels), simulated.flops, 0.0),
            (
                "bytes",
                sum(kernel.bytes for kernel in kernels),
                sum(count.bytes_read + count.bytes_written for count in counts),
                BYTES_TOLERANCE,
            ),
        ]
        texts = [*_beyond(checks)]
        if abs(len(kernels) - simulated.launched) > LAUNCHES_TOLERANCE:
            texts.append(f"{len(kernels)} launches, simulated {simulated.launched}")
        texts += _other_calls(_planned_calls(planned, mesh), _simulated_calls(simulated.calls, mesh))
        yield from (f"{name} pass of stage {stage}: {text}" for text in texts)


def _of_step(run: Run, record: StepRecord) -> Iterator[str]:
    """Compares the collectives of a step, in its passes and in the optimizer."""
    mesh = Mesh.from_config(run.config.parallel, record.rank)
    update = rank_update(run, record.stage)
    parts = (*update.reductions, update.reduce, update.step, *update.gathers)
    planned = _planned_calls((action for part in parts for action in part), mesh)
    own = [stage for stage, rank in enumerate(run.stages.rank_of_stage) if rank == record.stage]
    for stage in own:
        costs = stage_costs(run, stage)
        for actions in costs.passes.values():
            calls = _planned_calls(actions, mesh)
            planned += Counter({call: number * record.micro_batches for call, number in calls.items()})
    yield from (
        f"step of rank {record.stage}: {text}"
        for text in _other_calls(_large(planned), _large(_simulated_calls(record.calls, mesh)))
    )


def _beyond(checks: Iterable[tuple[str, float, float, float]]) -> Iterator[str]:
    """Yields a sentence for each row (what, planned, simulated, tolerance) that differs by more than the
    tolerance."""
    for what, planned, simulated, tolerance in checks:
        if abs(planned - simulated) > tolerance * simulated:
            yield f"{what} {planned:,.0f}, simulated {simulated:,}"


def _other_calls(planned: Mapping, simulated: Mapping) -> Iterator[str]:
    for call in sorted(planned.keys() | simulated.keys()):
        if planned.get(call, 0) != simulated.get(call, 0):
            yield f"{call} {planned.get(call, 0)} times, simulated {simulated.get(call, 0)}"


def _planned_calls(actions: Iterable[Action], mesh: Mesh) -> Calls:
    """Returns the planned calls. With one replica the data-parallel group equals the context-parallel group,
    and gets its name."""
    alias = "context" if mesh.cp_size > mesh.dp_size == 1 else "data"
    return Counter(
        (alias if action.group == "data" else action.group, action.operation, action.bytes)
        for action in actions
        if isinstance(action, Collective)
    )


def _simulated_calls(calls: Iterable[CollectiveCall], mesh: Mesh) -> Calls:
    return Counter((group_name(call.ranks, mesh), call.operation, call.bytes) for call in calls)


def _large(calls: Calls) -> Calls:
    """Returns the calls of collectives that exchange more than `_LARGEST_SCALARS` bytes."""
    return Counter(
        {
            call: number
            for call, number in calls.items()
            if call[2] > _LARGEST_SCALARS and call[1] not in ("send", "recv_")
        }
    )
