"""Assembles the costs of a run's stages from the costs of its layers.

Other processes, one per core, record the layers on the simulated device (`layer_costs`): a model with few
layers for each tensor-parallel layout, micro-batch size and kind of recomputation, and an optimizer step for
each kind of rank. The processes and all recordings are kept, because a search needs dozens of models.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from math import lcm
from threading import Lock
from typing import Any

import torch

from megatron.config import Config
from megatron.config.sections.checkpoint import CheckpointConfig
from megatron.config.sections.logging import LoggingConfig
from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.parallel import ParallelConfig
from megatron.config.sections.schedule import ScheduleConfig
from megatron.config.sections.training import recomputation
from megatron.model.attention.choice import run_uses_kernels
from megatron.model.attention.qk_clip import records_logits
from megatron.model.layer_kinds import (
    LayerDescription,
    LayerKind,
    Role,
    layer_kinds,
    settings_for_kinds,
    transformer_layers,
)
from megatron.optimizer.overlap import divide_into_buckets
from megatron.planner.simulation.costs import LayerCost, ModelCosts, PassCost, Spec, UpdateCosts, spec_bytes
from megatron.planner.simulation.layer_costs import record_layers, record_update
from megatron.planner.simulation.passes import Action, Collective, Kernel, Wait
from megatron.planner.simulation.processes import Worker
from megatron.run import Run

_FEW_LAYERS, _MANY_LAYERS = 2, 4
"""For a rank with more than `_MANY_LAYERS` transformer layers, the optimizer step is extrapolated from the
steps with `_FEW_LAYERS` layers and with one more layer."""
_MANY_REPLICAS = 64
"""For a run with more replicas than this, the optimizer step is extrapolated from this number and half of
it."""
_NO_BUCKETS = 10**15
ONE_STAGE: dict[str, Any] = {
    "parallel.pipeline_model_parallel_size": 1,
    "parallel.pipeline_schedule": "1f1b",
    "parallel.virtual_pipeline_stages": 1,
}
"""The settings of a run without pipeline parallelism."""
# Settings that affect neither the layers nor the optimizer step.
_NEUTRAL: dict[str, Any] = {
    "parallel.partition_method": "type:transformer",
    "parallel.partition_profile": None,
    "parallel.distributed_backend": None,
    "parallel.node_size": None,
    "parallel.intra_node_gbps": None,
    "parallel.inter_node_gbps": None,
    "parallel.network_figures": None,
    "parallel.host_us_per_kernel": None,
    "batch.rampup_batch_size": None,
    "training.train_iters": None,
    "training.train_samples": None,
    "training.train_tokens": None,
    "training.gpu": None,
    "training.device_memory": None,
    "training.compile": False,
    "training.deterministic_mode": False,
    "training.deepspeed_config": None,
}


@dataclass(frozen=True)
class StageCosts:
    """The costs of the passes of a micro-batch through a stage.

    layers: costs of the layers, in order. inputs: shapes and dtypes of the stage's input. receives: number of
    parts in which the tensor-parallel ranks receive the input, each rank one part; 1 if each rank receives
    all of it, 0 in the first stage. sends: number of parts in which they send the output; 0 in the last
    stage. tables: bytes that stay allocated between micro-batches, without the state. host: bytes in host
    memory that each micro-batch in flight keeps.
    """

    layers: tuple[LayerCost, ...]
    inputs: tuple[Spec, ...]
    receives: int
    sends: int
    tables: int
    host: int

    @property
    def outputs(self) -> tuple[Spec, ...]:
        """Shapes and dtypes of the stage's output; in the last stage, of the loss's input."""
        return self.layers[-1].output if self.layers else self.inputs

    @cached_property
    def weight(self) -> PassCost:
        """The weight-gradient pass of --pipeline-schedule zero-bubble."""
        actions: list[Action] = []
        peak = change = 0
        for layer in reversed(self.layers):
            actions += layer.weight.actions
            peak = max(peak, change + layer.weight.peak)
            change += layer.weight.change
        return PassCost(tuple(actions), peak, change)

    @property
    def passes(self) -> dict[str, Iterator[Action]]:
        """The actions of the forward, the backward and the weight-gradient pass. They include the engine's
        all-gathers of tensors that were received in parts."""
        hidden = spec_bytes(self.outputs[:1])
        own_part = [Kernel("clone", 0.0, 2 * hidden / self.sends)] if self.sends > 1 else []
        forward = [layer.forward.actions for layer in self.layers]
        backward = [layer.backward.actions for layer in reversed(self.layers)]
        return {
            "forward": chain(_gather(self.inputs, self.receives), *forward, own_part),
            "backward": chain(_gather(self.outputs, self.sends), *backward),
            "weight": iter(self.weight.actions),
        }


def _gather(specs: Sequence[Spec], parts: int) -> tuple[Action, ...]:
    """Returns the all-gather of a hidden state that was received in parts; () if it was received in one
    part."""
    return (Collective("tensor", "_allgather_base_", spec_bytes(specs[:1])), Wait(0)) if parts > 1 else ()


def stage_costs(run: Run, stage: int) -> StageCosts:
    """Returns the costs of a pipeline stage of the run."""
    plan = run.stages
    costs = _stage(run.config, plan.layers, run.vocab.size, plan.bounds[stage], plan.bounds[stage + 1])
    own, following = plan.rank_of(stage), plan.rank_of_stage[stage + 1 :][:1]
    return replace(
        costs,
        receives=1 if stage and plan.rank_of(stage - 1) == own else costs.receives,
        sends=1 if following == (own,) else costs.sends,
    )


def _stage(
    config: Config, layers: Sequence[LayerDescription], vocab_size: int, first: int, end: int
) -> StageCosts:
    """Returns the costs of the layers `first` to `end` - 1 as a stage whose neighbors are on other ranks."""
    count = sum(layer.role is Role.TRANSFORMER for layer in layers[first:end])
    parts = _Parts.record(config, layers, vocab_size, range(first, end))
    tokens = ((config.batch.micro_batch_size, config.model.seq_length), torch.int64)
    shards = config.parallel.tensor_model_parallel_size if config.parallel.sends_parts else 1
    return StageCosts(
        layers=tuple(parts.layers_between(first, end)),
        inputs=parts.outputs_of(first - 1) if first else (tokens,),
        receives=shards if first > 0 else 0,
        sends=shards if end < len(layers) else 0,
        tables=parts.model.tables if count else 0,
        host=parts.model.host * count // parts.few,
    )


def whole_model_costs(config: Config, layers: Sequence[LayerDescription], vocab_size: int) -> StageCosts:
    """Returns the costs of all layers of the model as one stage."""
    return _stage(config, layers, vocab_size, 0, len(layers))


_Group = tuple[LayerKind, ...]
"""The kinds of layers that are recomputed together. Without recomputation a group has one layer."""


@dataclass(frozen=True)
class _Parts:
    """The layers of a small recorded model, from which the costs of the run's layers are taken.

    begins: index of the first transformer layer. few: number of transformer layers of the recorded model.
    many: number of transformer layers of the run. prefetches: whether a layer starts collectives of the layer
    after the next (ZeRO-2 and 3). stage, kinds: the groups of layers that are recomputed together, in the
    stage and in the recorded model. rest: number of transformer layers in the smaller group at the end of a
    stage, if its layers do not fill the last group.
    """

    model: ModelCosts
    begins: int
    few: int
    many: int
    prefetches: bool
    stage: tuple[_Group, ...]
    kinds: tuple[_Group, ...]
    rest: int

    @classmethod
    def record(
        cls, config: Config, layers: Sequence[LayerDescription], vocab_size: int, entries: range
    ) -> _Parts:
        """Returns the recording of a model for a stage with these entries of the layer list.

        The model has a first group of each kind, which also computes tensors that all layers of the kind
        share, a second group of each kind, and the smaller group at the end of the stage. With ZeRO-2 and 3
        the stage's first two groups precede these groups, and its last group follows them.
        """
        transformer = transformer_layers(layers)
        begins, many = transformer.start, len(transformer)
        per_group = config.training.checkpoint_num_layers if config.training.recomputes_layers else 1
        prefetches = config.parallel.shards_gradients
        every = [kind for layer in layers if (kind := layer.kind)]
        own = [kind for entry in entries if (kind := layers[entry].kind)]
        count, rest = divmod(len(own), per_group)
        stage = tuple(tuple(own[index * per_group : (index + 1) * per_group]) for index in range(count))
        last = stage[-1] if stage else tuple((every * per_group)[-per_group:])
        different = dict.fromkeys(stage or (last,))
        head = stage[:2] if prefetches else ()
        firsts = tuple(kind for kind in different if kind not in head)
        seconds = (*(kind for kind in different if kind != last), last)
        kinds = (*head, *firsts, *seconds, *((last,) if prefetches else ()))
        if count <= len(kinds):
            fewest = min(many // per_group, 4 if prefetches else 2)
            kinds = (*stage, *(last,) * (fewest - count))
        few = len(kinds) * per_group + rest
        settings = _layers_config(config, [*chain(*kinds), *own[len(own) - rest :]])
        recording = _RECORDINGS.get(
            record_layers, settings, vocab_size, len(layers) - many + few, run_uses_kernels(config)
        )
        return cls(recording.result(), begins, few, many, prefetches, stage, kinds, rest)

    @property
    def _groups(self) -> list[LayerCost]:
        end = self.begins + self.few - self.rest
        return [layer for layer in self.model.layers if self.begins <= layer.first < end]

    def layers_between(self, first: int, end: int) -> list[LayerCost]:
        """Returns the costs of the run's layers `first` to `end` - 1, which must be the entries given to
        `record`."""
        last = self.begins + self.few
        found = [layer for layer in self.model.layers if first <= layer.first < min(self.begins, end)]
        found += self._groups_of(end >= self.begins + self.many, first <= self.begins)
        if self.rest:
            found += [layer for layer in self.model.layers if layer.first == last - self.rest]
        after = [layer for layer in self.model.layers if layer.first >= last]
        is_last = end == self.model.layers[-1].end + self.many - self.few
        found += [
            layer
            for layer in after
            if first <= layer.first + self.many - self.few < end or (is_last and layer is after[-1])
        ]
        ends = accumulate((layer.end - layer.first for layer in found), initial=first)
        return [replace(layer, first=a, end=b) for layer, (a, b) in zip(found, pairwise(ends), strict=True)]

    def _groups_of(self, has_last: bool, has_first: bool) -> list[LayerCost]:
        """Returns the costs of the stage's groups. has_last, has_first: whether the stage contains the last
        or the first transformer layer of the model."""
        known, count = self._groups, len(self.stage)
        if has_first and has_last and count <= len(known):
            return known
        groups = list(zip(self.kinds, known, strict=True))
        inner = dict(groups)  # keeps the last group of each kind
        if self.prefetches and len(known) > 2:  # the last group of the model prefetches nothing
            inner |= dict(groups[:-1])
        found = [inner[kind] for kind in self.stage]
        # The first layer of each kind in a stage also computes the tensors that all its layers share.
        if has_first or self.outputs_of(self.begins - 1) == known[0].output:
            for kind in set(self.stage):
                found[self.stage.index(kind)] = known[self.kinds.index(kind)]
        if count > 1 and has_last:
            found[-1] = known[-1]
        if self.prefetches and has_first and has_last:
            found[:2] = known[:2]
        return found

    def outputs_of(self, index: int) -> tuple[Spec, ...]:
        """Returns the shapes and dtypes of the output of the run's layer `index` in the layer list."""
        if index >= self.begins + self.many:
            index -= self.many - self.few
        elif index >= self.begins:
            index = self.begins
        return next(layer.output for layer in self.model.layers if layer.first <= index < layer.end)


def rank_update(run: Run, rank: int) -> UpdateCosts:
    """Returns the state and the optimizer step of the first device (TP rank 0, DP rank 0) of a pipeline rank.
    For many layers or replicas they are extrapolated from fewer. With an optimizer of whole matrices they are
    not, because the number of matrices that the most loaded rank owns grows in steps."""
    config, plan = run.config, run.stages
    held = [stage for stage, holder in enumerate(plan.rank_of_stage) if holder == rank]
    entries = [entry for stage in held for entry in range(plan.bounds[stage], plan.bounds[stage + 1])]
    inner = transformer_layers(plan.layers)
    kinds = [kind.parameter_kind for entry in entries if (kind := plan.layers[entry].kind)]
    parallel, last = config.parallel, max(plan.rank_of_stage)
    extrapolates = not config.optimizer.updates_matrices
    buckets: list[range] = []
    predicted = [entry for entry in entries if plan.layers[entry].role is Role.MULTI_TOKEN]
    if parallel.bucket_size is not None:
        sizes = [plan.parameters[entry] for entry in entries if entry in inner or entry in predicted]
        buckets = divide_into_buckets(sizes, parallel.bucket_size)

    def record(entries: Sequence[int], kinds: Sequence[LayerKind], replicas: int) -> UpdateCosts:
        place, bounds = _short_pipeline(plan.layers, entries, len(kinds), last + 1)
        settings = _update_config(config, len(bounds) - 1, kinds, replicas, bool(buckets))
        first = place * parallel.tensor_model_parallel_size * replicas
        recording = _RECORDINGS.get(
            record_update, settings, run.vocab.size, bounds, first, run_uses_kernels(config)
        )
        found: UpdateCosts = recording.result()
        return found

    few, recorded = Counter(kinds), kinds
    if len(kinds) > _MANY_LAYERS and extrapolates:
        few = Counter({kind: min(number, _FEW_LAYERS) for kind, number in few.items()})
        recorded = [*few.elements()]

    def with_replicas(replicas: int) -> UpdateCosts:
        update = record(entries, recorded, replicas)
        for kind, number in few.items() if recorded is not kinds else ():
            fewer, more = (record([inner.start], [kind] * (number + one), replicas) for one in (0, 1))
            update = update.plus(kinds.count(kind) - number, fewer, more)
        return update

    replicas, many = parallel.dp_cp_size, _MANY_REPLICAS
    if config.model.num_experts is not None:  # `many` and half of `many` must be possible with the experts
        multiple = 2 * fewest_replicas(parallel) * parallel.context_parallel_size
        many = max(many // multiple, 2) * multiple
    if replicas <= many or not extrapolates:
        update = with_replicas(replicas)
    else:  # because the costs are affine in 1 / replicas
        update, fewer = with_replicas(many), with_replicas(many // 2)
        update = update.plus(1 - many / replicas, fewer, update)
    same_costs = [*map(recorded.index, kinds), *range(len(recorded), len(recorded) + len(predicted))]
    same = [[same_costs[layer] for layer in bucket] for bucket in buckets]
    return update.with_buckets(same).between_stages(last)


def _short_pipeline(
    layers: Sequence[LayerDescription], entries: Sequence[int], count: int, ranks: int
) -> tuple[int, tuple[int, ...]]:
    """Returns a pipeline of at most three ranks: (rank, bounds of the stages). Its rank `rank` has the
    `entries` of the layer list, but with only `count` transformer layers.

    The pipeline stands for the run's pipeline of `ranks` ranks: the optimizer step of a rank depends neither
    on the layers of other ranks, nor on how its own layers form stages.
    """
    transformer, few = transformer_layers(layers), max(count, 1)
    begins, fewer = transformer.start, len(transformer) - few
    own = [entry if entry < begins else entry - fewer for entry in entries if entry not in transformer]
    own += range(begins, begins + count)
    first, end = min(own, default=begins), max(own, default=begins - 1) + 1
    total = len(layers) - fewer
    if first == 0 and end == total:
        return 0, (0, total)
    if first > 0 and end < total:
        return 1, (0, first, end, total)
    bound = [end if first == 0 else first] * (min(ranks, 3) - 1)
    return 0 if first == 0 else len(bound), (0, *bound, total)


class _Recordings:
    """Recordings that are complete or running, and idle processes. Processes with and without Triton kernels
    are kept separately. One thread per core waits for a process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._recordings: dict[tuple[Any, ...], Future[Any]] = {}
        self._idle: dict[bool, list[Worker]] = {True: [], False: []}

    def get(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Returns the future result of a function of `layer_costs`, which runs in a process. It runs only
        once for equal arguments. The last argument is whether the device runs Triton kernels."""
        with self._lock:
            call = (function, *arguments)
            if call not in self._recordings:
                self._recordings[call] = self._threads.submit(self._record, function, arguments)
            return self._recordings[call]

    def _record(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        kernels = arguments[-1]
        try:
            worker = self._idle[kernels].pop()
        except IndexError:
            worker = Worker({"MEGATRON_KERNELS": "" if kernels else "pytorch"})
        try:
            return worker.run(function, *arguments)
        finally:
            if worker.is_alive():
                self._idle[kernels].append(worker)


_RECORDINGS = _Recordings()


def _layers_config(config: Config, kinds: Sequence[LayerKind]) -> Config:
    """Returns the configuration of a model with layers of these kinds. Settings that do not affect the costs
    of layers are reset, so that equal configurations are recorded only once."""
    parallel = config.parallel
    shards = parallel.shards_gradients
    context = parallel.context_parallel_size
    # With sharded layers the recorded run has at least as many replicas as context-parallel ranks.
    replicas = max(min(parallel.dp_cp_size, _MANY_REPLICAS) // context, 1) if shards else 1
    if config.model.num_experts is not None:
        # If the run has several expert-parallel groups, the recorded run has several, too. Then all process
        # groups have their names.
        fewest = fewest_replicas(parallel)
        replicas = max(replicas // fewest * fewest, min(parallel.data_parallel_size, 2 * fewest))
    settings = {
        **_NEUTRAL,
        **ONE_STAGE,
        "parallel.world_size": parallel.tensor_model_parallel_size * context * replicas,
        "parallel.pipeline_schedule": "zero-bubble" if parallel.schedule.splits_backward else "1f1b",
        "parallel.zero_stage": parallel.zero_stage if shards else 0,
        "parallel.ddp_bucket_size": None,
        "parallel.cpu_offload": False,
        **settings_for_kinds(kinds),
        "batch.global_batch_size": config.batch.micro_batch_size * replicas,
    }
    return _without_run(config.with_settings(settings), OptimizerConfig())


def fewest_replicas(parallel: ParallelConfig) -> int:
    """Returns the smallest data-parallel size with which TP x CP x DP is divisible by EP."""
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    return lcm(parallel.expert_model_parallel_size, ranks) // ranks


def _update_config(
    config: Config, ranks: int, kinds: Sequence[LayerKind], replicas: int, has_buckets: bool
) -> Config:
    """Returns the configuration of a pipeline with these numbers of ranks and replicas, layers of these kinds
    (or one layer), and one bucket per layer or no buckets. Settings that do not affect the optimizer step are
    reset."""
    parallel, has_experts = config.parallel, config.model.num_experts is not None
    settings = {
        **_NEUTRAL,
        "parallel.world_size": parallel.tensor_model_parallel_size * replicas * ranks,
        # Only process groups of experts can be parts of the data- and context-parallel ranks.
        "parallel.context_parallel_size": parallel.context_parallel_size if has_experts else 1,
        "parallel.pipeline_model_parallel_size": ranks,
        "parallel.pipeline_schedule": "1f1b",
        "parallel.virtual_pipeline_stages": 1,
        "parallel.ddp_bucket_size": 1 if has_buckets else _NO_BUCKETS,
        **settings_for_kinds(kinds or [layer_kinds(config.model)[-1].parameter_kind]),
        "model.hidden_dropout": 0.0,
        "model.attention_dropout": 0.0,
        "batch.micro_batch_size": 1,
        "batch.global_batch_size": replicas,
        **recomputation(),
        "training.partition_activations": False,
        "training.checkpoint_in_cpu": False,
    }
    return _without_run(config.with_settings(settings), config.optimizer)


def _without_run(config: Config, optimizer: OptimizerConfig) -> Config:
    """Returns the configuration with these optimizer settings and without settings that read, write or log.
    All experts get equal numbers of tokens, which are then known although tensors have no values."""
    balanced = {"model.moe_router_force_load_balancing": config.model.num_experts is not None}
    return replace(
        config.with_settings(balanced),
        optimizer=optimizer,
        schedule=ScheduleConfig(lr=1.0),
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(log_max_attention_logit=records_logits(config)),
        curriculum=None,
    )
