"""Search of the fastest layout that fits: all sizes of TP (within a node), PP, DP, micro-batch, and more.

Every combination gets an estimate of memory and time from the formulas of one layer, in microseconds. The
best of them are planned in full (`megatron.planner.plan`): stages, memory of each rank, simulated schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron.config import Config, ConfigError
from megatron.config.checks.validate import validate
from megatron.config.registries import PIPELINE_SCHEDULES
from megatron.config.vocab import padded_vocab_size
from megatron.model.attention_choice import Implementation
from megatron.mpu.layout import ParallelLayout
from megatron.planner.implementations import attention_of
from megatron.planner.memory import layer_memory
from megatron.planner.memory.fit import fits
from megatron.planner.memory.stage_memory import StageMemory, plan_memory
from megatron.planner.stages import StagePlan, micro_batches_per_step, plan_stages
from megatron.planner.timing.communication import ALL_REDUCE, DATA, TENSOR, Exchange
from megatron.planner.timing.hardware import device_memory_bytes
from megatron.planner.timing.step_time import Cluster, StepTime, find_cluster, planned_step
from megatron.planner.timing.work import layer_work, program_of

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
PARTITION_METHODS = ("type:transformer", "type:transformer|embedding", "time", "memory")
VIRTUAL_STAGES = (2, 4)
PLANNED = 30
"""Combinations that are planned in full, per partition method at most."""
_MOST_PARTITIONS = 5
_FEWEST, _SLOWER = 12, 1.3
"""A search ends when it has this many layouts and the next estimate is this much slower than the best."""

NO_GPU = "the time of a step depends on the device: give its kind with --gpu, as a100-80gb"

Change = Mapping[str, Any]
"""'section.field' -> value."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its stages, memory and simulated step."""

    config: Config
    change: dict[str, Any]
    stages: StagePlan
    memory: tuple[StageMemory, ...]
    """By pipeline rank."""
    step: StepTime
    fits: bool

    @property
    def peak_bytes(self) -> float:
        """Of the fullest rank."""
        return max(part.total for part in self.memory)

    @property
    def tokens_per_second(self) -> float:
        return self.step.tokens_per_second


@dataclass(frozen=True)
class SearchResult:
    """The fitting layouts, fastest first, and how many were looked at."""

    candidates: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    """Planned layouts that do not fit."""
    combinations: int
    planned: int


def changed(config: Config, change: Change) -> Config:
    """The configuration with other settings, checked; ConfigError if they do not go together."""
    result = config.with_settings(change)
    validate(result)
    return result


def combinations(config: Config, node_size: int) -> Iterator[dict[str, Any]]:
    """All changes to look at: TP within a node, PP, micro-batch, recomputation, ZeRO, schedule, stages per
    rank, and whether activations are sharded along the sequence."""
    world, layers = config.parallel.world_size, config.model.num_layers
    own = config.parallel.virtual_pipeline_stages
    has_scores = attention_of(config) == Implementation.UNFUSED
    recomputations: list[tuple[bool, str | None]] = [(False, None), (True, None)]
    recomputations += [(False, "selective")] if has_scores else []
    for tp_size in _divisors(world):
        if node_size % tp_size or not config.model.heads_divide(tp_size):
            continue
        sequence = (False, True) if tp_size > 1 else (False,)
        wants_overlap = config.parallel.tp_comm_overlap
        for pp_size in _divisors(world // tp_size):
            dp_size = world // tp_size // pp_size
            if pp_size > layers or config.batch.global_batch_size % dp_size:
                continue
            for micro_batch in MICRO_BATCHES:
                count, rest = divmod(config.batch.global_batch_size // dp_size, micro_batch)
                if rest or not count:
                    continue
                for schedule, virtual in _schedules(pp_size, layers, count):
                    overlaps = wants_overlap and not PIPELINE_SCHEDULES[schedule].splits_backward
                    for zero_stage in (1, 2, 3) if pp_size == 1 and dp_size > 1 else (1,):
                        for (recomputes, granularity), sharded in product(recomputations, sequence):
                            yield {
                                "parallel.tensor_model_parallel_size": tp_size,
                                "parallel.pipeline_model_parallel_size": pp_size,
                                "parallel.zero_stage": zero_stage if dp_size > 1 else 0,
                                "parallel.pipeline_schedule": schedule,
                                **({"parallel.virtual_pipeline_stages": virtual} if virtual != own else {}),
                                "parallel.sequence_parallel": sharded,
                                **(
                                    {"parallel.tp_comm_overlap": overlaps and sharded}
                                    if wants_overlap
                                    else {}
                                ),
                                "batch.micro_batch_size": micro_batch,
                                "training.checkpoint_activations": recomputes,
                                "training.recompute_granularity": granularity,
                            }


def _schedules(pp_size: int, layers: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """(schedule, --virtual-pipeline-stages) that the layers and micro-batches of a replica suffice for."""
    yield "1f1b", 1
    for name, schedule in PIPELINE_SCHEDULES.items() if pp_size > 1 else ():
        if name == "1f1b" or micro_batches < schedule.micro_batches_per_rank * pp_size:
            continue
        if schedule.micro_batches_multiple_of_ranks and micro_batches % pp_size:
            continue
        for stages in (schedule.stages_per_rank,) if schedule.stages_per_rank else VIRTUAL_STAGES:
            if stages * pp_size <= layers:
                yield name, 1 if schedule.stages_per_rank else stages


def search(config: Config, vocab_size: int, planned: int = PLANNED) -> SearchResult:
    """Searches the layouts of `config.parallel.world_size` devices. ConfigError without --gpu."""
    cluster, device = find_cluster(config), device_memory_bytes(config)
    if cluster is None or device is None:
        raise ConfigError(NO_GPU)
    estimates: list[tuple[float, float, dict[str, Any]]] = []
    count = 0
    for change in combinations(config, cluster.network.node_size):
        count += 1
        try:
            # The checks of a whole configuration take longer than the estimate.
            seconds, size = _estimate(config.with_settings(change), vocab_size, cluster)
        except ConfigError:
            continue
        estimates.append((seconds, size, change))
    estimates.sort(key=lambda estimate: estimate[0])
    found: list[Candidate] = []
    too_large: list[Candidate] = []
    # The estimate of memory is a little too small or too large: those near the limit are planned too.
    for seconds, size, change in estimates:
        if size > 1.15 * device:
            continue
        if len(found) >= _FEWEST and seconds > _SLOWER * min(one.step.total for one in found):
            break
        made = _evaluate(config, change, vocab_size)
        if made is not None:
            (found if made.fits else too_large).append(made)
        if len(found) >= planned or len(found) + len(too_large) >= 4 * planned:
            break
    found.sort(key=lambda one: -one.tokens_per_second)
    found += _other_partitions(config, found[:_MOST_PARTITIONS], vocab_size)
    found.sort(key=lambda one: -one.tokens_per_second)
    return SearchResult(tuple(found), tuple(too_large), count, len(found) + len(too_large))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def evaluate(config: Config, change: Change, vocab_size: int) -> Candidate:
    """The layout with other settings, planned in full. ConfigError if they do not go together."""
    candidate = changed(config, change)
    stages = plan_stages(candidate, vocab_size)
    step = planned_step(candidate, stages, vocab_size)
    if step is None:
        raise ConfigError(NO_GPU)
    parts = tuple(plan_memory(candidate, vocab_size, stages))
    fitting = fits(candidate, max(part.total for part in parts))
    return Candidate(candidate, dict(change), stages, parts, step, fitting)


def _evaluate(config: Config, change: Change, vocab_size: int) -> Candidate | None:
    try:
        return evaluate(config, change, vocab_size)
    except ConfigError:
        return None


def _other_partitions(config: Config, best: Sequence[Candidate], vocab_size: int) -> list[Candidate]:
    """The best layouts with the other partition methods, where these fit."""
    found = []
    for candidate in best:
        if candidate.config.parallel.pipeline_model_parallel_size == 1:
            continue
        for method in PARTITION_METHODS:
            if method == candidate.config.parallel.partition_method:
                continue
            made = _evaluate(config, {**candidate.change, "parallel.partition_method": method}, vocab_size)
            other = made is not None and made.stages.bounds != candidate.stages.bounds
            if made is not None and made.fits and other:
                found.append(made)
    return found


def _estimate(config: Config, vocab_size: int, cluster: Cluster) -> tuple[float, float]:
    """(seconds of a step, bytes of the fullest rank) from one layer, with equal stages."""
    parallel, model = config.parallel, config.model
    ranks, tp_size = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    layout = ParallelLayout.from_config(parallel, 0)
    padded = padded_vocab_size(vocab_size, model, tp_size)
    layers = -(-model.num_layers // ranks)
    work = layer_work(config, program_of(config))
    rate = cluster.achieved.matmul * cluster.gpu.peak_flops[config.precision.name]
    bandwidth = cluster.achieved.memory * cluster.gpu.bandwidth
    both = work.forward + work.backward
    seconds = both.flops / rate + 16 * both.misaligned_flops / rate + both.bytes / bandwidth
    size = 4 if config.precision.name == "fp32" else 2
    hidden = config.batch.micro_batch_size * model.seq_length * model.hidden_size * size
    if tp_size > 1:
        calls = 4 if config.training.recomputes_layers else 3
        seconds += calls * cluster.network.seconds(Exchange(TENSOR, ALL_REDUCE, "", hidden), layout)
    tokens = config.batch.micro_batch_size * model.seq_length
    head = 6 * tokens * model.hidden_size * padded / tp_size / rate
    count = micro_batches_per_step(config)
    heaviest = max(model.num_layers * seconds / ranks + head / ranks, layers * seconds)
    per_layer = 12 * model.hidden_size**2 / tp_size
    held = per_layer * layers + padded * model.hidden_size / tp_size
    fill = (ranks - 1) / parallel.stages_per_rank
    if parallel.schedule.splits_backward:
        fill *= 1 - 2 * work.weight.flops / both.flops  # (p - 1) (F + B - W), see `pipeline.orders`
    step = heaviest * (count + fill)
    if layout.dp_size > 1:
        calls = count if parallel.zero_stage >= 2 else 1
        reduction = cluster.network.seconds(Exchange(DATA, ALL_REDUCE, "", int(4 * held)), layout)
        step += calls * 1.25 * reduction
    in_layer = layer_memory.state_bytes_per_parameter(config, in_transformer_layer=True)
    outside = layer_memory.state_bytes_per_parameter(config)
    of_layer = layer_memory.transformer_layer_activation_bytes(config)
    if parallel.schedule.splits_backward:
        of_layer = max(of_layer, layer_memory.deferred_layer_bytes(config))
    kept = of_layer * layers * min(count, ranks)
    embedding = outside * padded * model.hidden_size / tp_size
    return step, per_layer * layers * in_layer + embedding + kept
