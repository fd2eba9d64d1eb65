"""Searches for the fastest layout that fits: all sizes of TP (within a node), PP, DP, micro-batch, and more.

Every combination gets an estimate of memory and time from the costs of one layer. The fastest estimates are
then planned in full (`megatron.planner.plan`): stages, memory of each rank, simulated schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron.arguments import validate
from megatron.cluster.devices import device_memory_bytes
from megatron.config import Config, ConfigError
from megatron.config.model import padded_vocab_size
from megatron.config.registries import PIPELINE_SCHEDULES
from megatron.errors import UserError
from megatron.model.attention_choice import Implementation, training_attention
from megatron.model.flops import head_flops
from megatron.model.layer_kinds import layer_kinds, period, transformer_layers
from megatron.mpu.mesh import Mesh
from megatron.planner.layer_memory import bytes_per_parameter, planned_run
from megatron.planner.network import ALL_REDUCE
from megatron.planner.plan import NO_GPU, Plan, make_plan
from megatron.planner.simulation.costs import spec_bytes
from megatron.planner.simulation.passes import Collective, Kernel
from megatron.planner.simulation.stage_costs import ONE_STAGE, fewest_replicas, stage_costs
from megatron.planner.step_time import Cluster, Rank, find_cluster

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
PARTITION_METHODS = ("type:transformer", "type:transformer|embedding", "time", "memory")
VIRTUAL_STAGES = (2, 4)
PLANNED = 30
"""A search ends when it has planned this many fitting layouts, or four times as many in all."""
_MOST_PARTITIONS = 5
"""Number of the fastest layouts that are also planned with the other partition methods."""
_AT_ONCE = 6
_FEWEST, _SLOWER = 12, 1.3
"""It also ends when `_FEWEST` layouts fit, and the next estimate is `_SLOWER` times the fastest step."""

Change = Mapping[str, Any]
"""Settings that a layout changes in the configuration: 'section.field' -> value."""


@dataclass(frozen=True)
class SearchResult:
    """candidates: plans that fit, fastest first. too_large: plans that do not fit. combinations: number of
    estimated combinations of settings. planned: number of layouts that were planned in full."""

    candidates: tuple[Plan, ...]
    too_large: tuple[Plan, ...]
    combinations: int
    planned: int


def changed(config: Config, change: Change) -> Config:
    """Returns the configuration with the changed settings. Raises ConfigError if they are not compatible."""
    result = config.with_settings(change)
    validate(result)
    return result


def combinations(config: Config, node_size: int) -> Iterator[dict[str, Any]]:
    """Yields all changes to estimate: TP within a node, CP of long sequences, PP, EP, micro-batch,
    recomputation, ZeRO, schedule, stages per rank, and sequence parallelism, which experts need with TP."""
    world, layers, experts = config.parallel.world_size, config.model.num_layers, config.model.num_experts
    own = config.parallel.virtual_pipeline_stages
    has_scores = training_attention(config) == Implementation.UNFUSED
    recomputations: list[tuple[bool, str | None]] = [(False, None), (True, None)]
    recomputations += [(False, "selective")] if has_scores else []
    for tp_size in _divisors(world):
        if node_size % tp_size or config.model.heads_problem(tp_size):
            continue
        sequence = (True,) if tp_size > 1 and experts else (False, True) if tp_size > 1 else (False,)
        wants_overlap = config.parallel.tp_comm_overlap
        for cp_size, pp_size in _context_and_pipeline_sizes(config, world // tp_size):
            dp_size = world // tp_size // cp_size // pp_size
            replicas = dp_size * cp_size
            if pp_size > layers or config.batch.global_batch_size % dp_size:
                continue
            expert_sizes = [size for size in _divisors(tp_size * replicas) if (experts or 1) % size == 0]
            for micro_batch in MICRO_BATCHES:
                count, rest = divmod(config.batch.global_batch_size // dp_size, micro_batch)
                if rest or not count:
                    continue
                for schedule, virtual in schedules(pp_size, layers, count):
                    overlaps = not PIPELINE_SCHEDULES[schedule].splits_backward
                    for zero_stage in (1, 2, 3) if pp_size == 1 and replicas > 1 else (1,):
                        for (recomputes, granularity), sharded, ep_size in product(
                            recomputations, sequence, expert_sizes
                        ):
                            yield {
                                "parallel.tensor_model_parallel_size": tp_size,
                                "parallel.pipeline_model_parallel_size": pp_size,
                                "parallel.context_parallel_size": cp_size,
                                **({"parallel.expert_model_parallel_size": ep_size} if experts else {}),
                                "parallel.zero_stage": zero_stage if replicas > 1 else 0,
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


def schedules(pp_size: int, layers: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """Yields (schedule, --virtual-pipeline-stages) if a replica has enough layers and micro-batches."""
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
    """Searches the layouts of `config.parallel.world_size` devices; planned: see `PLANNED`. Raises
    ConfigError without --gpu."""
    cluster, device = find_cluster(config), device_memory_bytes(config)
    if cluster is None or device is None:
        raise ConfigError(NO_GPU)
    estimates: list[tuple[float, float, dict[str, Any]]] = []
    estimator = _Estimator(config, vocab_size, cluster)
    count = 0
    for change in combinations(config, cluster.network.node_size):
        count += 1
        try:
            # Not validated: checking a whole configuration takes longer than the estimate.
            seconds, size = estimator.estimate(config.with_settings(change))
        except UserError:
            continue
        estimates.append((seconds, size, change))
    estimates.sort(key=lambda estimate: estimate[0])
    found: list[Plan] = []
    too_large: list[Plan] = []
    # The memory estimate is not exact, so layouts that exceed the device by up to 15 % are planned, too.
    near = [(seconds, change) for seconds, size, change in estimates if size <= 1.15 * device]
    for start in range(0, len(near), _AT_ONCE):
        if len(found) >= _FEWEST and near[start][0] > _SLOWER * min(plan.prediction.total for plan in found):
            break
        for made in _evaluate_all(
            config, [change for _, change in near[start : start + _AT_ONCE]], vocab_size
        ):
            (found if made.fits else too_large).append(made)
        if len(found) >= planned or len(found) + len(too_large) >= 4 * planned:
            break
    found.sort(key=lambda plan: -plan.tokens_per_second)
    found += _other_partitions(config, found[:_MOST_PARTITIONS], vocab_size)
    found.sort(key=lambda plan: -plan.tokens_per_second)
    return SearchResult(tuple(found), tuple(too_large), count, len(found) + len(too_large))


def _context_and_pipeline_sizes(config: Config, ranks: int) -> Iterator[tuple[int, int]]:
    """Yields (CP, PP) that divide `ranks`, with CP above 1 only for long sequences."""
    for cp_size in _divisors(ranks):
        is_possible = config.model.seq_length % (2 * cp_size) == 0 and config.is_long_enough_for(cp_size)
        if cp_size == 1 or is_possible:
            for pp_size in _divisors(ranks // cp_size):
                yield cp_size, pp_size


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def evaluate(config: Config, change: Change, vocab_size: int) -> Plan:
    """Returns the full plan with the changed settings. Raises ConfigError if they are invalid, or without
    --gpu."""
    plan = make_plan(changed(config, change), vocab_size, change)
    if plan.step is None:
        raise ConfigError(NO_GPU)
    return plan


def _evaluate_all(config: Config, changes: Sequence[Change], vocab_size: int) -> list[Plan]:
    """Returns the plans of the changes that are valid, in order. Threads suffice, since recording, which
    takes most of the time, runs in other processes."""

    def evaluate_one(change: Change) -> Plan | None:
        with suppress(UserError):
            return evaluate(config, change, vocab_size)
        return None

    with ThreadPoolExecutor() as pool:
        return [made for made in pool.map(evaluate_one, changes) if made is not None]


def _other_partitions(config: Config, best: Sequence[Plan], vocab_size: int) -> list[Plan]:
    """Returns the plans of the `best` layouts with the other partition methods, if they fit and differ."""
    found: list[Plan] = []
    for candidate in best:
        parallel = candidate.config.parallel
        if parallel.pipeline_model_parallel_size == 1:
            continue
        methods = [method for method in PARTITION_METHODS if method != parallel.partition_method]
        changes = [{**candidate.change, "parallel.partition_method": method} for method in methods]
        for made in _evaluate_all(config, changes, vocab_size):
            if made.fits and made.run.stages.bounds != candidate.run.stages.bounds:
                found.append(made)
    return found


class _Estimator:
    """Estimates time and memory of layouts from one transformer layer per tensor-parallel layout, recorded at
    two micro-batch sizes: all costs of a layer are affine in the micro-batch size."""

    def __init__(self, config: Config, vocab_size: int, cluster: Cluster) -> None:
        self._vocab_size, self._cluster = vocab_size, cluster
        self._layers: dict[tuple[Any, ...], _LayerEstimate] = {}
        self._state = bytes_per_parameter(config, vocab_size)

    def estimate(self, config: Config) -> tuple[float, float]:
        """Returns (seconds of a step, bytes of the most loaded rank), assuming equal stages."""
        parallel, model, training = config.parallel, config.model, config.training
        ranks, tp_size = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
        mesh, layers = Mesh.from_config(parallel, 0), -(-model.num_layers // ranks)
        layer = self._layer(config)
        batch, count = config.batch.micro_batch_size, config.micro_batches_per_step
        forward, backward, kept = layer.at(batch)
        weight = backward / 2 if parallel.schedule.splits_backward else 0.0
        held = kept
        if training.recomputes_layers:
            backward, held = backward + forward, layer.input_bytes * batch
        padded = padded_vocab_size(self._vocab_size, model, tp_size)
        tokens, flops = batch * config.seq_length_per_rank, head_flops(config, padded)
        product = Kernel("mm", flops, 0.0, (tokens, padded / tp_size, model.hidden_size))
        head = self._cluster.kernel_seconds(product, config.precision.name)
        seconds = forward + backward
        heaviest = max((model.num_layers * seconds + head) / ranks, layers * seconds)
        # The warm-up and cool-down of the schedule, see `pipeline.schedule_actions`.
        fill = (ranks - 1) / parallel.stages_per_rank * (1 - 2 * weight / seconds)
        step = heaviest * (count + fill)
        outside, calls = padded * model.hidden_size // tp_size, count if parallel.zero_stage >= 2 else 1
        reduced = {"data": layer.parameters * layers + outside, "expert data": layer.of_experts * layers}
        for group, number in reduced.items():
            reduction = Collective(group, ALL_REDUCE, 4.0 * number)
            step += calls * 1.25 * self._cluster.network.seconds(reduction, mesh)
        state = layer.parameters * layers * self._state.in_layers(parallel)
        state += layer.of_experts * layers * self._state.in_layers(parallel, of_experts=True)
        state += outside * self._state.in_others(parallel)
        return step, state + held * layers * min(count, ranks) + (kept - held)

    def _layer(self, config: Config) -> _LayerEstimate:
        parallel = config.parallel
        key = (
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            parallel.expert_model_parallel_size,
            parallel.sequence_parallel,
            parallel.tp_comm_overlap,
        )
        if key not in self._layers:
            self._layers[key] = _LayerEstimate.record(config, self._vocab_size, self._cluster)
        return self._layers[key]


@dataclass(frozen=True)
class _LayerEstimate:
    """Costs of a transformer layer without recomputation, the means over the kinds of layers: forward
    seconds, backward seconds, and bytes of the activations that are kept between the passes.

    first: costs of a micro-batch of one sample. further: costs that each further sample adds. input_bytes:
    bytes of the layer's input per sample. parameters: on one rank, without those of experts. of_experts:
    parameters of experts on one rank.
    """

    first: tuple[float, ...]
    further: tuple[float, ...]
    input_bytes: int
    parameters: float
    of_experts: float

    @classmethod
    def record(cls, config: Config, vocab_size: int, cluster: Cluster) -> _LayerEstimate:
        """Records the costs in a model with the layers after which the kinds repeat."""
        costs, count, parallel = [], period(layer_kinds(config.model)), config.parallel
        ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
        for batch in (1, 2):
            alone = config.with_settings(
                {
                    "model.num_layers": count,
                    "batch.micro_batch_size": batch,
                    **ONE_STAGE,
                    "parallel.zero_stage": 0,
                    "parallel.world_size": ranks * fewest_replicas(parallel),
                    "training.checkpoint_activations": False,
                }
            )
            run = planned_run(alone, vocab_size)
            plan = run.stages
            inner = transformer_layers(plan.layers)
            layers = [cost for cost in stage_costs(run, 0).layers if cost.first in inner]
            rank = Rank(alone, cluster, 0)
            passes = ([layer.forward for layer in layers], [layer.backward for layer in layers])
            times = [sum(rank.time(part.actions).total for part in parts) / count for parts in passes]
            costs.append((*times, sum(part.change for part in passes[0]) / count))
        further = tuple(two - one for one, two in zip(*costs, strict=True))
        of_experts = plan.expert_parameters / parallel.expert_model_parallel_size / count
        dense = sum(plan.parameters[inner.start : inner.stop]) / count - of_experts
        return cls(costs[0], further, spec_bytes(layers[0].output) // 2, dense, of_experts)

    def at(self, batch: int) -> tuple[float, ...]:
        """Returns (forward seconds, backward seconds, kept bytes) at a micro-batch of `batch` samples."""
        return tuple(one + (batch - 1) * more for one, more in zip(self.first, self.further, strict=True))
