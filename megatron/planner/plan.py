"""The plan of a run: stages, memory, time, communication and schedule. Sizes are in bytes, times in
seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from megatron.cluster.devices import device_memory_bytes
from megatron.config import Config, ConfigError
from megatron.pipeline.stages import StagePlan
from megatron.planner.in_flight import in_flight_micro_batches
from megatron.planner.layer_memory import planned_run
from megatron.planner.memory import StageMemory, fits, plan_memory, reserve_bytes
from megatron.planner.simulation.costs import spec_bytes
from megatron.planner.simulation.passes import Collective
from megatron.planner.simulation.stage_costs import rank_update, stage_costs
from megatron.planner.step_time import StepTime, planned_step, timeline
from megatron.run import Run
from megatron.text_table import counted

_MOST_EVENTS = 4000
"""Largest number of passes in a timeline."""
NO_GPU = "the time of a step depends on the device. Set its kind with --gpu, such as --gpu a100-80gb."


@dataclass(frozen=True)
class Event:
    """A pass in the timeline of a step, with its start and end in seconds."""

    rank: int
    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class CommunicationRow:
    """All communication calls of one kind that a rank makes in a step: their number and their total bytes."""

    rank: int
    group: str
    operation: str
    during: str
    """'forward', 'backward', 'weight', or 'step', which is the part of the step after the passes."""
    calls: int
    bytes: int


@dataclass(frozen=True)
class WhatIf:
    """The effect of one change to the plan. If the change was rejected, it has a reason, and all numbers are
    None."""

    change: str
    fits: bool | None
    peak_bytes: float | None
    tokens_per_second: float | None
    reason: str = ""
    changes_training: bool = False


@dataclass(frozen=True)
class Plan:
    """A run before it starts: its stages, its memory and its predicted step."""

    run: Run
    memory: tuple[StageMemory, ...]
    """The memory of each pipeline rank, in order."""
    step: StepTime | None
    """The predicted step; None without --gpu."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """Settings that a search has changed: 'section.field' -> value."""
    what_if: tuple[WhatIf, ...] = ()
    verdict: str = ""
    """The sentence on whether the plan fits, see `megatron.planner.fit.with_verdict`."""

    @property
    def config(self) -> Config:
        return self.run.config

    @property
    def title(self) -> str:
        """The names of the model and of the devices."""
        model, gpu = self.config.model, self.config.training.gpu
        number, stages = self.config.parallel.world_size, self.run.stages
        size = f"{_in_millions(stages.total_parameters)} parameters"
        if stages.active_parameters != stages.total_parameters:
            size += f", {_in_millions(stages.active_parameters)} used per token"
        devices = f"{number} x {gpu}" if gpu else counted(number, "device")
        return f"{size} ({model.num_layers} layers x {model.hidden_size}), {devices}"

    @property
    def assumption(self) -> str:
        """The assumption behind the numbers of a plan with experts; '' without experts."""
        has_experts = self.config.model.num_experts is not None
        return "balanced routing is assumed: all experts get equal numbers of tokens" if has_experts else ""

    @property
    def prediction(self) -> StepTime:
        """The predicted step. Raises ConfigError if --gpu is not given."""
        if self.step is None:
            raise ConfigError(NO_GPU)
        return self.step

    @property
    def tokens_per_second(self) -> float:
        return self.prediction.tokens_per_second

    @property
    def bytes_by_rank(self) -> list[float]:
        """Peak memory of each pipeline rank, in bytes."""
        return [part.total for part in self.memory]

    @property
    def peak_bytes(self) -> float:
        """Peak memory of the most loaded rank, in bytes."""
        return max(self.bytes_by_rank)

    @property
    def device_bytes(self) -> int | None:
        """Memory of the device that --gpu or --device-memory names, in bytes; None without these flags."""
        return device_memory_bytes(self.config)

    @property
    def reserve_bytes(self) -> float:
        """Memory that the most loaded rank needs in addition to its tensors, in bytes."""
        return reserve_bytes(self.config, self.peak_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether the most loaded rank fits the device; None if the device is not known."""
        return None if self.device_bytes is None else fits(self.config, self.peak_bytes)

    @property
    def best_change(self) -> WhatIf | None:
        """The fastest change that fits and computes equal numbers; None if the plan fits and is faster."""
        rows = [row for row in self.what_if if row.fits and not row.changes_training]
        best = max(rows, key=lambda row: row.tokens_per_second or 0, default=None)
        is_slower = best is not None and (best.tokens_per_second or 0) <= self.tokens_per_second
        return None if self.fits and is_slower else best

    @cached_property
    def communication(self) -> list[CommunicationRow]:
        """Communication calls in a step of the first device (TP rank 0, DP rank 0) of each pipeline rank."""
        ranks = range(self.config.parallel.pipeline_model_parallel_size)
        return [row for rank in ranks for row in _communication(self, rank)]

    @property
    def timeline_micro_batches(self) -> int:
        """Number of micro-batches in the timeline: all of the step, or as many as a plot can show."""
        if self.step is None:
            return 0
        parallel = self.config.parallel
        least = max(parallel.min_micro_batches, 1)
        most = max(_MOST_EVENTS // (2 * parallel.num_stages), least)
        shown = min(self.config.micro_batches_per_step, most, max(3 * parallel.num_stages, 8))
        multiple = parallel.micro_batch_multiple
        return max(shown // multiple, 1) * multiple

    @cached_property
    def timeline(self) -> list[Event]:
        """The passes of all pipeline ranks in the first micro-batches of the step."""
        if self.step is None:
            return []
        parallel, step = self.config.parallel, self.step
        pipeline = timeline(parallel, step.stages, step.transfers, self.timeline_micro_batches)
        return [
            Event(rank, span.action.chunk, span.action.kind, span.action.micro_batch, span.start, span.end)
            for rank, spans in enumerate(pipeline.spans)
            for span in spans
        ]

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan in JSON types, in the form that `tools/plan.py --json` writes and --html shows."""
        memory = [
            {**asdict(part), "rank": rank, "total": part.total} for rank, part in enumerate(self.memory)
        ]
        return {
            "title": self.title,
            "layout": _layout(self.config),
            "parameters": self.run.stages.total_parameters,
            "active_parameters": self.run.stages.active_parameters,
            "weight_unit": self.run.stages.partition.unit,
            "stages": _stages(self.config, self.run.stages),
            "memory": memory,
            "device_bytes": self.device_bytes,
            "reserve_bytes": self.reserve_bytes,
            "step": None if self.step is None else {**asdict(self.step), "total": self.step.total},
            "communication": list(map(asdict, self.communication)),
            "timeline": list(map(asdict, self.timeline)),
            "timeline_micro_batches": self.timeline_micro_batches,
            "what_if": list(map(asdict, self.what_if)),
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
            "verdict": self.verdict,
            "best_change": self.best_change and self.best_change.change,
        }


def _in_millions(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"


def make_plan(config: Config, vocab_size: int, change: Mapping[str, Any] | None = None) -> Plan:
    """Returns the plan of a run. vocab_size: size of its vocabulary. change: see `Plan.change`. Raises
    ConfigError if the layers cannot be partitioned."""
    return replace(plan_of(planned_run(config, vocab_size)), change=dict(change or {}))


def plan_of(run: Run) -> Plan:
    """Returns the plan of a run whose pipeline stages are known."""
    return Plan(run, tuple(plan_memory(run)), planned_step(run))


def _layout(config: Config) -> dict[str, Any]:
    """Returns the settings that a search varies, and further settings that help to understand them."""
    parallel, batch, training = config.parallel, config.batch, config.training
    return {
        "world_size": parallel.world_size,
        "tensor_parallel": parallel.tensor_model_parallel_size,
        "context_parallel": parallel.context_parallel_size,
        "pipeline_parallel": parallel.pipeline_model_parallel_size,
        "data_parallel": parallel.data_parallel_size,
        "expert_parallel": None if config.model.num_experts is None else parallel.expert_model_parallel_size,
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
    """Returns which activations are recomputed: 'full', the modules of --recompute-modules, or 'none'."""
    if config.training.recomputes_layers:
        return "full"
    return " ".join(config.training.recomputed_modules) or "none"


def _stages(config: Config, plan: StagePlan) -> list[dict[str, Any]]:
    """Returns a dictionary for each stage. Its 'layers' are indices in the layer list, such as '3-8'."""
    in_flight = in_flight_micro_batches(config)
    return [
        {
            "stage": stage,
            "rank": plan.rank_of(stage),
            "layers": plan.layer_range(stage),
            "transformer_layers": plan.num_transformer_layers(stage),
            "content": [layer.title for layer in plan.layers_of(stage) if layer.title],
            "parameters": plan.stage_parameters(stage),
            "weight": float(weight),
            "in_flight": in_flight[stage],
        }
        for stage, weight in enumerate(plan.partition.weights)
    ]


def _communication(plan: Plan, rank: int) -> list[CommunicationRow]:
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for during, times, call in _calls(plan.run, rank):
        group = call.group if isinstance(call.group, str) else "stages " + " and ".join(map(str, call.group))
        entry = sums[group, call.operation.strip("_"), during]
        entry[0] += times
        entry[1] += times * round(call.bytes)
    return [CommunicationRow(rank, *key, calls, size) for key, (calls, size) in sums.items()]


def _calls(run: Run, rank: int) -> Iterator[tuple[str, int, Collective]]:
    """Yields the communication calls of a rank in a step: (`CommunicationRow.during`, number of calls,
    call)."""
    micro_batches, update, plan = run.config.micro_batches_per_step, rank_update(run, rank), run.stages
    for stage in [stage for stage, holder in enumerate(plan.rank_of_stage) if holder == rank]:
        costs = stage_costs(run, stage)
        for during, actions in costs.passes.items():
            yield from ((during, micro_batches, call) for call in actions if isinstance(call, Collective))
        for neighbor, specs, parts, operations in (
            (stage - 1, costs.inputs, costs.receives, (("forward", "recv_"), ("backward", "send"))),
            (stage + 1, costs.outputs, costs.sends, (("forward", "send"), ("backward", "recv_"))),
        ):
            if parts and plan.rank_of(neighbor) != rank:
                for during, operation in operations:
                    sent = specs if during == "forward" else specs[:1]  # document ids have no gradient
                    size = spec_bytes(sent) / parts
                    yield during, micro_batches, Collective("stages", operation, size)
    after = chain(*update.reductions, update.reduce, update.step, *update.gathers)
    yield from (("step", 1, action) for action in after if isinstance(action, Collective))
