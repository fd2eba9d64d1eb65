"""The plan of a run as data: stages, memory, time, communication, schedule.

`Plan` and its parts are frozen dataclasses of plain values; `as_dict` makes what `tools/plan.py --json`
writes, and what pages and pictures are made of. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron.cluster.devices import device_memory_bytes
from megatron.config import Config
from megatron.pipeline.methods import TRANSFORMER_LAYER
from megatron.pipeline.stages import StagePlan, plan_stages
from megatron.planner.in_flight import in_flight_micro_batches
from megatron.planner.memory.fit import reserve_bytes
from megatron.planner.memory.stage_memory import StageMemory, plan_memory
from megatron.planner.timing.step_time import PipelineTime, StepTime, planned_step
from megatron.simulation.costs import spec_bytes
from megatron.simulation.passes import Collective
from megatron.simulation.stage_costs import rank_update, stage_costs

_MOST_EVENTS = 4000


@dataclass(frozen=True)
class PlannedStage:
    """A pipeline stage."""

    stage: int
    rank: int
    layers: str
    """Indices in the layer list, as '3-8'."""
    transformer_layers: int
    content: tuple[str, ...]
    parameters: int
    weight: float
    in_flight: int


@dataclass(frozen=True)
class Event:
    """A pass in the timeline of a step."""

    rank: int
    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class CommunicationRow:
    """All calls of one kind that a rank makes in a step."""

    rank: int
    group: str
    operation: str
    during: str
    """A forward, backward or weight pass, or the step after the passes."""
    calls: int
    bytes: int


@dataclass(frozen=True)
class WhatIf:
    """One change to the plan and what it gives; None if the change is refused, with the reason."""

    change: str
    fits: bool | None
    peak_bytes: float | None
    tokens_per_second: float | None
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """Everything that is known of a run before it starts."""

    layout: dict[str, Any]
    parameters: int
    weight_unit: str
    stages: tuple[PlannedStage, ...]
    memory: tuple[StageMemory, ...]
    """By pipeline rank."""
    device_bytes: int | None
    reserve_bytes: float
    """What the fullest rank needs beside its tensors (`megatron.planner.memory.fit`)."""
    step: StepTime | None
    """None without --gpu."""
    communication: tuple[CommunicationRow, ...]
    timeline: tuple[Event, ...]
    timeline_micro_batches: int
    what_if: tuple[WhatIf, ...] = ()

    @property
    def peak_bytes(self) -> float:
        """Of the fullest rank."""
        return max(part.total for part in self.memory)

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank fits; None if the device is not known."""
        return None if self.device_bytes is None else self.spare_bytes >= 0

    @property
    def spare_bytes(self) -> float:
        """What the fullest rank leaves of the device; negative if it does not fit, and without a device."""
        return (self.device_bytes or 0) - self.peak_bytes - self.reserve_bytes

    def as_dict(self) -> dict[str, Any]:
        """The plan in JSON types, with the totals that are computed from it."""
        plan = dataclasses.asdict(self)
        plan["peak_bytes"], plan["fits"] = self.peak_bytes, self.fits
        for rank, (values, part) in enumerate(zip(plan["memory"], self.memory, strict=True)):
            values["rank"], values["total"] = rank, part.total
        if self.step is not None:
            plan["step"]["total"] = self.step.total
        return plan


def make_plan(config: Config, vocab_size: int, stages: StagePlan | None = None) -> Plan:
    """The plan of a configuration. ConfigError if its layers cannot be partitioned."""
    stages = stages or plan_stages(config, vocab_size)
    memory = plan_memory(config, vocab_size, stages)
    return assemble_plan(config, vocab_size, stages, memory, planned_step(config, stages, vocab_size))


def assemble_plan(
    config: Config, vocab_size: int, stages: StagePlan, memory: Sequence[StageMemory], step: StepTime | None
) -> Plan:
    """The plan of a configuration whose memory and step are known."""
    shown = _shown_micro_batches(config)
    return Plan(
        layout=layout_of(config),
        parameters=stages.total_parameters,
        weight_unit=stages.partition.unit,
        stages=_planned_stages(config, stages),
        memory=tuple(memory),
        device_bytes=device_memory_bytes(config),
        reserve_bytes=reserve_bytes(config, max(part.total for part in memory)),
        step=step,
        communication=_communication(config, stages, vocab_size),
        timeline=() if step is None else _timeline(config, step, shown),
        timeline_micro_batches=0 if step is None else shown,
    )


def layout_of(config: Config) -> dict[str, Any]:
    """The settings that a search varies, and those that they are read with."""
    parallel, batch, training = config.parallel, config.batch, config.training
    return {
        "world_size": parallel.world_size,
        "tensor_parallel": parallel.tensor_model_parallel_size,
        "pipeline_parallel": parallel.pipeline_model_parallel_size,
        "data_parallel": parallel.data_parallel_size,
        "zero_stage": parallel.zero_stage,
        "schedule": parallel.schedule_title,
        "stages_per_rank": parallel.stages_per_rank,
        "partition_method": parallel.partition_method,
        "sequence_parallel": parallel.sequence_parallel,
        "recompute": recomputation_of(config),
        "micro_batch_size": batch.micro_batch_size,
        "micro_batches": config.micro_batches_per_step,
        "global_batch_size": batch.global_batch_size,
        "precision": config.precision.name,
        "gpu": training.gpu,
    }


def recomputation_of(config: Config) -> str:
    """'full', 'selective' or 'none'."""
    if config.training.recomputes_layers:
        return "full"
    return "selective" if config.training.recomputes_attention else "none"


def _planned_stages(config: Config, plan: StagePlan) -> tuple[PlannedStage, ...]:
    in_flight, titles = in_flight_micro_batches(config), plan.layer_titles()
    stages = []
    for stage, weight in enumerate(plan.partition.weights):
        layers = slice(plan.bounds[stage], plan.bounds[stage + 1])
        stages.append(
            PlannedStage(
                stage=stage,
                rank=plan.rank_of(stage),
                layers=plan.layer_range(stage),
                transformer_layers=plan.names[layers].count(TRANSFORMER_LAYER),
                content=tuple(title for title in titles[layers] if title),
                parameters=plan.stage_parameters(stage),
                weight=float(weight),
                in_flight=in_flight[stage],
            )
        )
    return tuple(stages)


def _communication(config: Config, plan: StagePlan, vocab_size: int) -> tuple[CommunicationRow, ...]:
    rows = []
    for rank in range(config.parallel.pipeline_model_parallel_size):
        sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
        for during, times, call in _calls(config, plan, vocab_size, rank):
            group = (
                call.group if isinstance(call.group, str) else "stages " + " and ".join(map(str, call.group))
            )
            entry = sums[group, call.operation.strip("_"), during]
            entry[0] += times
            entry[1] += times * round(call.bytes)
        rows += [CommunicationRow(rank, *key, calls, size) for key, (calls, size) in sums.items()]
    return tuple(rows)


def _calls(
    config: Config, plan: StagePlan, vocab_size: int, rank: int
) -> Iterator[tuple[str, int, Collective]]:
    """(during what, number of times, collective or message) of a rank in a step."""
    micro_batches, update = config.micro_batches_per_step, rank_update(config, plan, vocab_size, rank)
    for stage in [stage for stage, holder in enumerate(plan.rank_of_stage) if holder == rank]:
        costs = stage_costs(config, plan, vocab_size, stage)
        for during, actions in costs.passes.items():
            yield from ((during, micro_batches, one) for one in actions if isinstance(one, Collective))
        for neighbour, specs, parts, operations in (
            (stage - 1, costs.inputs, costs.receives, (("forward", "recv_"), ("backward", "send"))),
            (stage + 1, costs.outputs, costs.sends, (("forward", "send"), ("backward", "recv_"))),
        ):
            if parts and plan.rank_of(neighbour) != rank:
                size = spec_bytes(specs) / parts
                for during, operation in operations:
                    yield during, micro_batches, Collective("stages", operation, size)
    after = chain(*update.reductions, update.reduce, update.step, *update.gathers)
    yield from (("step", 1, action) for action in after if isinstance(action, Collective))


def _shown_micro_batches(config: Config) -> int:
    """Micro-batches of the timeline: those of the step, or as many as a picture can show."""
    least = max(config.parallel.min_micro_batches, 1)
    most = max(_MOST_EVENTS // (2 * config.parallel.num_stages), least)
    shown = min(config.micro_batches_per_step, most, max(3 * config.parallel.num_stages, 8))
    multiple = config.parallel.micro_batch_multiple
    return max(shown // multiple, 1) * multiple


def _timeline(config: Config, step: StepTime, micro_batches: int) -> tuple[Event, ...]:
    pipeline = PipelineTime.measure(config.parallel, step.stages, step.transfers, micro_batches)
    spans = pipeline.timeline(micro_batches).spans
    return tuple(
        Event(rank, span.action.chunk, span.action.kind, span.action.micro_batch, span.start, span.end)
        for rank, of_rank in enumerate(spans)
        for span in of_rank
    )
