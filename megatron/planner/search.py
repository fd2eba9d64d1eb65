"""Searches for the fastest layout that fits: all sizes of TP (within a node), PP, DP, micro-batch, and more.

Every combination gets an estimate of memory and time from the costs of one layer. The fastest estimates are
then planned in full (`megatron.planner.plan`): stages, memory of each rank, simulated schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice, pairwise, product
from typing import Any

from megatron.arguments import validate
from megatron.config import Config, ConfigError
from megatron.config.model import padded_vocab_size
from megatron.config.registries import PIPELINE_SCHEDULES
from megatron.config.sections.parallel import ParallelConfig
from megatron.config.sections.training import recomputation
from megatron.errors import UserError
from megatron.model.layer_kinds import layer_kinds, period, transformer_layers
from megatron.model.pipeline_module import describe, layer_parameter_counts
from megatron.mpu.mesh import Mesh
from megatron.pipeline.methods import LayerTable, PipelineShape, partition_layers
from megatron.pipeline.partition_method import parse_partition_method
from megatron.pipeline.stages import flops_of_layers, layer_list
from megatron.planner.layer_memory import bytes_per_parameter, planned_run
from megatron.planner.memory import fits
from megatron.planner.network import ALL_REDUCE
from megatron.planner.plan import NO_GPU, Plan, make_plan
from megatron.planner.simulation.costs import PassCost, spec_bytes
from megatron.planner.simulation.passes import Collective, Kernel
from megatron.planner.simulation.stage_costs import ONE_STAGE, fewest_replicas, stage_costs
from megatron.planner.step_time import Cluster, Rank, find_cluster
from megatron.training.out_of_memory import cheap_modules, stores_scores

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
PARTITION_METHODS = ("type:transformer", "type:transformer|embedding", "time", "memory")
VIRTUAL_STAGES = (2, 4)
PLANNED = 30
"""A search ends when it has planned this many fitting layouts, or four times as many in all."""
_MOST_PARTITIONS = 5
"""Number of the fastest layouts that are also planned with the other partition methods."""
_AT_ONCE = 6
_FEWEST, _SLOWER = 12, 1.15
"""It also ends when `_FEWEST` layouts fit, and the next estimate is `_SLOWER` times the fastest step."""

_NAMED_IF_CHANGED = (
    "parallel.expert_model_parallel_size",
    "parallel.virtual_pipeline_stages",
    "parallel.tp_comm_overlap",
    "training.recompute_modules",
)

Change = Mapping[str, Any]
"""Settings that a layout changes in the configuration: 'section.field' -> value."""


@dataclass(frozen=True)
class SearchResult:
    """candidates: plans that fit, fastest first. too_large: plans that do not fit. combinations: number of
    combinations of settings. planned: number of layouts that were planned in full."""

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
    parallel, layers, experts = config.parallel, config.model.num_layers, config.model.num_experts
    own = {name: config.value(name) for name in _NAMED_IF_CHANGED}
    modules: list[tuple[str, ...]] = [(), cheap_modules(config)]
    modules += [("core_attn",)] if stores_scores(config) else []
    recomputations = [recomputation(layers=True), *map(recomputation, dict.fromkeys(modules))]
    for tp_size in _divisors(parallel.world_size):
        if node_size % tp_size or config.model.heads_problem(tp_size):
            continue
        sequence = (True,) if tp_size > 1 and experts else (False, True) if tp_size > 1 else (False,)
        for cp_size, pp_size in _context_and_pipeline_sizes(config, parallel.world_size // tp_size):
            dp_size = parallel.world_size // tp_size // cp_size // pp_size
            replicas = dp_size * cp_size
            if pp_size > layers or config.batch.global_batch_size % dp_size:
                continue
            zero_stages = (0,) if replicas == 1 else (1, 2, 3) if pp_size == 1 else (1,)
            expert_sizes = [size for size in _divisors(tp_size * replicas) if (experts or 1) % size == 0]
            for micro_batch in MICRO_BATCHES:
                count, rest = divmod(config.batch.global_batch_size // dp_size, micro_batch)
                if rest or not count:
                    continue
                for (schedule, virtual), zero_stage, recomputed, sharded, ep_size in product(
                    schedules(pp_size, layers, count), zero_stages, recomputations, sequence, expert_sizes
                ):
                    overlaps = sharded and not PIPELINE_SCHEDULES[schedule].splits_backward
                    change = {
                        "parallel.tensor_model_parallel_size": tp_size,
                        "parallel.pipeline_model_parallel_size": pp_size,
                        "parallel.context_parallel_size": cp_size,
                        "parallel.expert_model_parallel_size": ep_size,
                        "parallel.zero_stage": zero_stage,
                        "parallel.pipeline_schedule": schedule,
                        "parallel.virtual_pipeline_stages": virtual,
                        "parallel.sequence_parallel": sharded,
                        "parallel.tp_comm_overlap": overlaps and parallel.tp_comm_overlap,
                        "batch.micro_batch_size": micro_batch,
                        **recomputed,
                    }
                    yield {n: value for n, value in change.items() if n not in own or own[n] != value}


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
    cluster = find_cluster(config)
    if cluster is None:
        raise ConfigError(NO_GPU)
    estimates: list[tuple[float, float, Change]] = []
    own = config.parallel.partition_method
    # Not validated: checking a whole configuration takes longer than the estimate.
    layouts = [(config.with_settings(c), c) for c in combinations(config, cluster.network.node_size)]
    with closing(Estimator(config, vocab_size, cluster)) as estimator:
        for layout, _ in layouts:
            estimator.record_layer(layout)
        for layout, change in layouts:
            with suppress(UserError):
                seconds, size, method = estimator.estimate(layout)
                partition = {} if method == own else {"parallel.partition_method": method}
                estimates.append((seconds, size, {**change, **partition}))
    estimates.sort(key=lambda estimate: estimate[0])
    found: list[Plan] = []
    too_large: list[Plan] = []
    # The memory estimate is not exact, so layouts that exceed the device by up to 15 % are planned, too.
    near = (
        (seconds, change)
        for seconds, size, change in estimates
        if fits(config.with_settings(change), size / 1.15)
    )
    while batch := list(islice(near, _AT_ONCE)):
        if len(found) >= _FEWEST and batch[0][0] > _SLOWER * min(plan.prediction.total for plan in found):
            break
        for made in _evaluate_all(config, [change for _, change in batch], vocab_size):
            (found if made.fits else too_large).append(made)
        if len(found) >= planned or len(found) + len(too_large) >= 4 * planned:
            break
    found.sort(key=lambda plan: -plan.tokens_per_second)
    found += _other_partitions(config, found[:_MOST_PARTITIONS], vocab_size)
    found.sort(key=lambda plan: -plan.tokens_per_second)
    return SearchResult(tuple(found), tuple(too_large), len(layouts), len(found) + len(too_large))


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
        methods = [method for method in _partition_methods(config) if method != parallel.partition_method]
        changes = [{**candidate.change, "parallel.partition_method": method} for method in methods]
        for made in _evaluate_all(config, changes, vocab_size):
            if made.fits and made.run.stages.bounds != candidate.run.stages.bounds:
                found.append(made)
    return found


class Estimator:
    """Estimates time and memory of layouts from one transformer layer per tensor- and expert-parallel layout,
    recorded at two micro-batch sizes: all costs of a layer are affine in the micro-batch size."""

    def __init__(self, config: Config, vocab_size: int, cluster: Cluster) -> None:
        self._vocab_size, self._cluster = vocab_size, cluster
        self._layers: dict[tuple[Any, ...], Future[_LayerEstimate]] = {}
        self._threads = ThreadPoolExecutor()
        self._state = bytes_per_parameter(config, vocab_size)
        entries = layer_list(config, vocab_size)
        layers = list(map(describe, entries))
        flops = flops_of_layers(config, layers, vocab_size)
        self._table = LayerTable(layers, layer_parameter_counts(entries), flops)
        self._methods = [method for method in _partition_methods(config) if method != "memory"]
        self._stages: dict[tuple[str, PipelineShape], list[int]] = {}

    def estimate(self, config: Config) -> tuple[float, float, str]:
        """Returns (seconds of a step, bytes of the most loaded rank, partition method with the fastest
        slowest rank). Raises ConfigError if no method can partition the layers."""
        parallel, count = config.parallel, config.micro_batches_per_step
        ranks, batch = parallel.pipeline_model_parallel_size, config.batch.micro_batch_size
        layer = self.record_layer(config).result()
        forward, backward, kept, *end_seconds = layer.at(batch)
        weight = backward / 2 if parallel.schedule.splits_backward else 0.0
        held = kept
        if config.training.recomputes_layers:
            backward, held = backward + forward, layer.input_bytes * batch
        seconds = forward + backward
        slowest, method, layers = self._partition(parallel, seconds, end_seconds)
        # Warm-up and cool-down pass once through the other ranks, see `pipeline.schedule_actions`.
        others = sum(layers) * seconds + sum(end_seconds) - slowest
        fill = others / parallel.stages_per_rank * (1 - 2 * weight / seconds)
        padded = padded_vocab_size(self._vocab_size, config.model, parallel.tensor_model_parallel_size)
        outside = padded * config.model.hidden_size // parallel.tensor_model_parallel_size
        most = max(layers)
        parameters = layer.parameters * most + outside, layer.of_experts * most
        after = self._after_passes(config, *parameters, forward * most, backward * most)
        state = layer.parameters * self._state.in_layers(parallel)
        state += layer.of_experts * self._state.in_layers(parallel, of_experts=True)
        is_1f1b = parallel.pipeline_schedule == "1f1b"
        in_flight = [min(count, ranks - rank * is_1f1b) for rank in range(ranks)]
        ends = dict.fromkeys((0, parallel.rank_of_stage[-1]), outside * self._state.in_others(parallel))
        size = max(
            layers[rank] * (state + held * in_flight[rank]) + ends.get(rank, 0.0) for rank in range(ranks)
        )
        size += kept - held
        return slowest * count + fill + after, size, method

    def _after_passes(
        self, config: Config, dense: float, of_experts: float, forward: float, backward: float
    ) -> float:
        """Returns the seconds that gradient reduction, optimizer and all-gather of weights add to a step.
        dense, of_experts: parameters on a rank. forward, backward: seconds of the passes of a micro-batch
        through a rank, which hide the collectives but share the device with them."""
        parallel, cluster, mesh = config.parallel, self._cluster, Mesh.from_config(config.parallel, 0)
        weight_bytes, gradient_bytes, _ = self._state.layers
        zero_stage, count = parallel.zero_stage, config.micro_batches_per_step
        reduction = gather = updated = 0.0
        for group, number, replicas in (
            ("data", dense, parallel.dp_cp_size),
            ("expert data", of_experts, parallel.expert_replicas),
        ):
            operation = "_reduce_scatter_base_" if zero_stage else ALL_REDUCE
            reduction += cluster.network.seconds(Collective(group, operation, gradient_bytes * number), mesh)
            if zero_stage:
                gathered = Collective(group, "_allgather_base_", weight_bytes * number)
                gather += cluster.network.seconds(gathered, mesh)
            updated += number / (replicas if zero_stage else 1)
        # The optimizer reads and writes this rank's part of weights, gradients and moments.
        update = Kernel("optimizer", 0.0, 2 * sum(self._state.layers) * updated)
        optimizer = cluster.kernel_seconds(update, config.precision.name)

        def exposed(collectives: float, passes: float) -> float:
            hidden = 0.0 if config.training.uses_cuda_graph else min(collectives, passes)
            return collectives - hidden + cluster.contention * hidden

        if zero_stage == 3:  # both passes gather
            passes = exposed(gather, forward) + exposed(gather + reduction, backward)
            return optimizer + count * passes
        reductions = (count if zero_stage == 2 else 1) * exposed(reduction, backward)
        return optimizer + reductions + exposed(gather, forward)

    def _partition(
        self, parallel: ParallelConfig, layer: float, ends: Sequence[float]
    ) -> tuple[float, str, list[int]]:
        """Returns (seconds of a micro-batch on the slowest rank, method, transformer layers of each rank) for
        the best partition method. layer: seconds of a layer. ends: seconds of embedding, and of head with
        loss."""
        ranks, rank_of_stage = parallel.pipeline_model_parallel_size, parallel.rank_of_stage
        shape = PipelineShape(ranks, parallel.stages_per_rank, parallel.schedule.is_v_schedule)
        found: list[tuple[float, str, list[int]]] = []
        for method in self._methods:
            with suppress(ConfigError):
                layers = [0] * ranks
                for rank, number in zip(rank_of_stage, self._layers_of_stages(method, shape), strict=True):
                    layers[rank] += number
                seconds = [layer * number for number in layers]
                seconds[0] += ends[0]
                seconds[rank_of_stage[-1]] += ends[1]
                found.append((max(seconds), method, layers))
        if not found:
            raise ConfigError(f"no partition method makes {shape.stages} stages")
        return min(found, key=lambda one: one[0])

    def _layers_of_stages(self, method: str, shape: PipelineShape) -> list[int]:
        """Returns the number of transformer layers of each stage."""
        key = method, shape
        if key not in self._stages:
            inner = transformer_layers(self._table.layers)
            bounds = partition_layers(parse_partition_method(method), self._table, shape).bounds
            self._stages[key] = [sum(index in inner for index in range(*pair)) for pair in pairwise(bounds)]
        return self._stages[key]

    def record_layer(self, config: Config) -> Future[_LayerEstimate]:
        """Starts to record the layer of a layout, once for equal layers. Returns the future result."""
        parallel = config.parallel
        key = (
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            parallel.expert_model_parallel_size,
            parallel.sequence_parallel,
            parallel.tp_comm_overlap,
            config.training.recomputed_modules,
        )
        if key not in self._layers:
            arguments = (config, self._vocab_size, self._cluster)
            self._layers[key] = self._threads.submit(_LayerEstimate.record, *arguments)
        return self._layers[key]

    def close(self) -> None:
        """Cancels the recordings that have not started, and waits for the others."""
        self._threads.shutdown(cancel_futures=True)


def _partition_methods(config: Config) -> list[str]:
    """Returns the partition methods of a search, the run's own first."""
    return [*dict.fromkeys((config.parallel.partition_method, *PARTITION_METHODS))]


@dataclass(frozen=True)
class _LayerEstimate:
    """Costs of a transformer layer without recomputation, the means over the kinds of layers: forward
    seconds, backward seconds, and bytes of the activations that are kept between the passes; then the seconds
    of both passes through embedding, and through head and loss.

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
            every = stage_costs(run, 0).layers
            layers = [cost for cost in every if cost.first in inner]
            rank = Rank(alone, cluster, 0)

            def seconds(passes: Iterable[PassCost], rank: Rank = rank) -> float:
                return sum(rank.time(part.actions, is_pass=True).total for part in passes)

            times = [seconds(layer.forward for layer in layers), seconds(layer.backward for layer in layers)]
            kept = sum(layer.forward.change for layer in layers)
            before = [cost for cost in every if cost.first < inner.start]
            after = [cost for cost in every if cost.first >= inner.stop]
            ends = (
                seconds(p for cost in end for p in (cost.forward, cost.backward)) for end in (before, after)
            )
            costs.append((*(cost / count for cost in (*times, kept)), *ends))
        further = tuple(two - one for one, two in zip(*costs, strict=True))
        of_experts = plan.expert_parameters / parallel.expert_model_parallel_size / count
        dense = sum(plan.parameters[inner.start : inner.stop]) / count - of_experts
        return cls(costs[0], further, spec_bytes(layers[0].output) // 2, dense, of_experts)

    def at(self, batch: int) -> tuple[float, ...]:
        """Returns (forward seconds, backward seconds, kept bytes, seconds of embedding, seconds of head and
        loss) at a micro-batch of `batch` samples."""
        return tuple(one + (batch - 1) * more for one, more in zip(self.first, self.further, strict=True))
