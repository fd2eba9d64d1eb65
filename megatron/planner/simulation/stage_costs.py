"""The costs of a run's stages: those of its layers, recorded on the simulated device, put together.

Other processes record (`layer_costs`), one per core: a model of few layers for each
tensor-parallel layout, micro-batch size and kind of recomputation, and an optimizer step for each kind of
rank. The processes stay, and what they have recorded is kept: a search records some dozens of models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from threading import Lock
from typing import Any

import torch

from megatron.config import Config
from megatron.config.sections.checkpoint import CheckpointConfig
from megatron.config.sections.logging import LoggingConfig
from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.schedule import ScheduleConfig
from megatron.model.attention_choice import run_uses_kernels
from megatron.optimizer.overlap import divide_into_buckets
from megatron.pipeline.methods import TRANSFORMER_LAYER
from megatron.pipeline.stages import StagePlan
from megatron.planner.simulation.costs import LayerCost, ModelCosts, PassCost, Spec, UpdateCosts, spec_bytes
from megatron.planner.simulation.layer_costs import record_layers, record_update
from megatron.planner.simulation.passes import Action, Collective, Kernel, Wait
from megatron.planner.simulation.processes import Worker

_FEW_LAYERS, _MANY_LAYERS = 2, 4
"""The optimizer step of a rank with more transformer layers than many is extrapolated from that of few."""
_MANY_REPLICAS = 64
"""That of a run with more replicas is extrapolated, too."""
_NO_BUCKETS = 10**15
# What neither the layers nor the optimizer step depend on.
_NEUTRAL: dict[str, Any] = {
    "parallel.partition_method": "type:transformer",
    "parallel.partition_profile": None,
    "parallel.distributed_backend": None,
    "parallel.node_size": None,
    "parallel.intra_node_gbps": None,
    "parallel.inter_node_gbps": None,
    "parallel.network_figures": None,
    "batch.rampup_batch_size": None,
    "training.train_iters": None,
    "training.train_samples": None,
    "training.train_tokens": None,
    "training.gpu": None,
    "training.device_memory": None,
    "training.compile": False,
    "training.simulate": False,
    "training.deepspeed_config": None,
}


@dataclass(frozen=True)
class StageCosts:
    """What a pass of a micro-batch through a stage costs.

    layers: in order. weight: the pass of --pipeline-schedule zero-bubble that computes the gradients of
    weights. inputs: shapes and dtypes of what the stage receives, or of the tokens. receives, sends: number
    of tensor-parallel ranks that each receive a part of the input, and send a part of the output; 1 if each
    has all of it, 0 at the ends of the pipeline. tables: bytes that stay allocated between micro-batches and
    are not state. host: bytes in host memory of a micro-batch in flight.
    """

    layers: tuple[LayerCost, ...]
    weight: PassCost
    inputs: tuple[Spec, ...]
    receives: int
    sends: int
    tables: int
    host: int

    @property
    def outputs(self) -> tuple[Spec, ...]:
        """Shapes and dtypes of what the stage returns; of the last stage, what the loss is computed from."""
        return self.layers[-1].output if self.layers else self.inputs

    @property
    def passes(self) -> dict[str, Iterator[Action]]:
        """The actions of the forward, the backward and the weight pass. The engine all-gathers what it has
        received in parts."""
        hidden = spec_bytes(self.outputs[:1])
        own_part = [Kernel("clone", 0.0, 2 * hidden / self.sends)] if self.sends > 1 else []
        of_layers = [layer.forward.actions for layer in self.layers]
        back = [layer.backward.actions for layer in reversed(self.layers)]
        return {
            "forward": chain(_gather(self.inputs, self.receives), *of_layers, own_part),
            "backward": chain(_gather(self.outputs, self.sends), *back),
            "weight": iter(self.weight.actions),
        }


def _gather(specs: Sequence[Spec], parts: int) -> tuple[Action, ...]:
    """The all-gather of a hidden state of which each tensor-parallel rank has a part."""
    return (Collective("tensor", "_allgather_base_", spec_bytes(specs[:1])), Wait(0)) if parts > 1 else ()


def stage_costs(config: Config, plan: StagePlan, vocab_size: int, stage: int) -> StageCosts:
    """The costs of a stage of the plan."""
    costs = _stage(config, plan.names, vocab_size, plan.bounds[stage], plan.bounds[stage + 1])
    own, following = plan.rank_of(stage), plan.rank_of_stage[stage + 1 :][:1]
    return replace(
        costs,
        receives=1 if stage and plan.rank_of(stage - 1) == own else costs.receives,
        sends=1 if following == (own,) else costs.sends,
    )


def _stage(config: Config, names: Sequence[str], vocab_size: int, first: int, end: int) -> StageCosts:
    """The costs of the layers `first` to `end` - 1 as a stage between other ranks."""
    count = list(names[first:end]).count(TRANSFORMER_LAYER)
    parts = _Parts.record(config, names, vocab_size, count)
    tokens = ((config.batch.micro_batch_size, config.model.seq_length), torch.int64)
    shards = config.parallel.tensor_model_parallel_size if config.parallel.sends_parts else 1
    return StageCosts(
        layers=tuple(parts.layers_between(first, end, count)),
        weight=_repeated(parts.model.weight, count, parts.few),
        inputs=parts.outputs_of(first - 1) if first else (tokens,),
        receives=shards if first > 0 else 0,
        sends=shards if end < len(names) else 0,
        tables=parts.model.tables if count else 0,
        host=parts.model.host * count // parts.few,
    )


def whole_model_costs(config: Config, names: Sequence[str], vocab_size: int) -> StageCosts:
    """The costs of all layers of the model as one stage. names: of the layers."""
    return _stage(config, names, vocab_size, 0, len(names))


def inputs_of_stages(config: Config, plan: StagePlan, vocab_size: int) -> list[tuple[Spec, ...]]:
    """Shapes and dtypes of what each stage but the first one receives."""
    inner = range(1, len(plan.bounds) - 1)
    return [stage_costs(config, plan, vocab_size, stage).inputs for stage in inner]


@dataclass(frozen=True)
class _Parts:
    """The layers of a recorded model, which stand for those of the run.

    begins: index of the first transformer layer. few, many: transformer layers of the recorded model and of
    the run. per_group: transformer layers that are recomputed together. rest: those of a smaller group at the
    end of a stage.
    """

    model: ModelCosts
    begins: int
    few: int
    many: int
    per_group: int
    rest: int

    @classmethod
    def record(cls, config: Config, names: Sequence[str], vocab_size: int, count: int) -> _Parts:
        """Records what a stage with `count` transformer layers needs: the first group of the model, which
        computes what all share, and another one; and a smaller group at the end of the stage. With ZeRO-2 and
        3 a layer starts collectives of the next but one."""
        per_group = config.training.checkpoint_num_layers if config.training.recomputes_layers else 1
        groups = 4 if config.parallel.shards_gradients else 2
        many, rest = config.model.num_layers, count % per_group
        few = min(many // per_group, groups) * per_group + rest
        settings, entries = _layers_config(config, few), len(names) - many + few
        recording = _RECORDINGS.get(record_layers, settings, vocab_size, entries, run_uses_kernels(config))
        return cls(recording.result(), names.index(TRANSFORMER_LAYER), few, many, per_group, rest)

    @property
    def _groups(self) -> list[LayerCost]:
        end = self.begins + self.few - self.rest
        return [layer for layer in self.model.layers if self.begins <= layer.first < end]

    def layers_between(self, first: int, end: int, count: int) -> list[LayerCost]:
        """The costs of the layers `first` to `end` - 1 of the run, with `count` transformer layers."""
        last = self.begins + self.few
        found = [layer for layer in self.model.layers if first <= layer.first < min(self.begins, end)]
        groups = self._groups_of(
            count // self.per_group, end >= self.begins + self.many, first <= self.begins
        )
        found += groups
        if self.rest:
            found += [layer for layer in self.model.layers if layer.first == last - self.rest]
        after = [layer for layer in self.model.layers if layer.first >= last]
        is_last = end == self.model.layers[-1].end + self.many - self.few
        return found + [
            layer
            for layer in after
            if first <= layer.first + self.many - self.few < end or (is_last and layer is after[-1])
        ]

    def _groups_of(self, count: int, has_last: bool, has_first: bool) -> list[LayerCost]:
        """The costs of `count` groups of a stage that has the first or the last transformer layer."""
        known = self._groups
        if has_first and has_last and count <= len(known):
            return known
        found = [known[-2 if len(known) > 2 else -1]] * count
        # What the layers of a stage share is computed in the first one of them.
        if count and (has_first or self.outputs_of(self.begins - 1) == known[0].output):
            found[0] = known[0]
        if count > 1 and has_last:
            found[-1] = known[-1]
        if has_first and has_last:
            found[: len(known) - 2] = known[:-2]
        return found

    def outputs_of(self, index: int) -> tuple[Spec, ...]:
        """What a layer of the run returns."""
        if index >= self.begins + self.many:
            index -= self.many - self.few
        elif index >= self.begins:
            index = self.begins
        return next(layer.output for layer in self.model.layers if layer.first <= index < layer.end)


def _repeated(weight: PassCost, count: int, few: int) -> PassCost:
    """The weight pass of `count` transformer layers. weight: of `few` ones."""
    of_one = weight.actions[: len(weight.actions) // few]
    return replace(weight, actions=of_one * count, change=weight.change * count // few)


def rank_update(config: Config, plan: StagePlan, vocab_size: int, rank: int) -> UpdateCosts:
    """The state and the optimizer step of the first tensor and data rank of a pipeline rank. Those of many
    layers or replicas are extrapolated from those of fewer ones."""
    held = [stage for stage, holder in enumerate(plan.rank_of_stage) if holder == rank]
    entries = [entry for stage in held for entry in range(plan.bounds[stage], plan.bounds[stage + 1])]
    count = [plan.names[entry] for entry in entries].count(TRANSFORMER_LAYER)
    parallel, last = config.parallel, max(plan.rank_of_stage)
    buckets: list[range] = []
    if parallel.bucket_size is not None:
        size = plan.parameters[plan.names.index(TRANSFORMER_LAYER)]
        buckets = divide_into_buckets([size] * count, parallel.bucket_size)

    inner = plan.names.index(TRANSFORMER_LAYER)

    def record(entries: Sequence[int], layers: int, replicas: int) -> UpdateCosts:
        place, bounds = _short_pipeline(plan.names, entries, layers, last + 1)
        settings = _update_config(config, len(bounds) - 1, max(layers, 1), replicas, bool(buckets))
        first = place * parallel.tensor_model_parallel_size * replicas
        recording = _RECORDINGS.get(
            record_update, settings, vocab_size, bounds, first, run_uses_kernels(config)
        )
        found: UpdateCosts = recording.result()
        return found

    def of_layers(replicas: int) -> UpdateCosts:
        if count <= _MANY_LAYERS:
            return record(entries, count, replicas)
        fewer, more = (record([inner], _FEW_LAYERS + number, replicas) for number in (0, 1))
        return record(entries, _FEW_LAYERS, replicas).plus(count - _FEW_LAYERS, fewer, more)

    replicas = parallel.data_parallel_size
    if replicas <= _MANY_REPLICAS:
        update = of_layers(replicas)
    else:  # affine in the share of a replica
        update, fewer = of_layers(_MANY_REPLICAS), of_layers(_MANY_REPLICAS // 2)
        update = update.plus(1 - _MANY_REPLICAS / replicas, fewer, update)
    return update.with_buckets([len(bucket) for bucket in buckets]).between_stages(last)


def _short_pipeline(
    names: Sequence[str], entries: Sequence[int], layers: int, ranks: int
) -> tuple[int, tuple[int, ...]]:
    """A pipeline of at most three ranks, one of which has `entries` of the layer list, but `layers`
    transformer layers: (that rank, bounds of the stages). The optimizer does not depend on the layers of the
    other ranks, nor on the number of a rank's stages. ranks: of the run."""
    begins, many = names.index(TRANSFORMER_LAYER), list(names).count(TRANSFORMER_LAYER)
    few = max(layers, 1)
    own = [entry for entry in entries if not begins <= entry < begins + many]
    inner = [entry if entry < begins else entry - many + few for entry in own]
    inner += range(begins, begins + layers)
    first, end = min(inner, default=begins), max(inner, default=begins - 1) + 1
    total = len(names) - many + few
    if first == 0 and end == total:
        return 0, (0, total)
    if first > 0 and end < total:
        return 1, (0, first, end, total)
    bound = [end if first == 0 else first] * (min(ranks, 3) - 1)
    return 0 if first == 0 else len(bound), (0, *bound, total)


class _Recordings:
    """What has been recorded, and the processes that record nothing now, by whether they count the Triton
    kernels. A thread per core waits for a process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._recordings: dict[tuple[Any, ...], Future[Any]] = {}
        self._idle: dict[bool, list[Worker]] = {True: [], False: []}

    def get(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """The result of a function of `layer_costs`, whose last argument says whether it
        counts the kernels. Equal calls are recorded once."""
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


def _layers_config(config: Config, num_layers: int) -> Config:
    """The configuration of a model of few layers, without what its layers do not depend on."""
    parallel = config.parallel
    shards = parallel.shards_gradients
    replicas = min(parallel.data_parallel_size, _MANY_REPLICAS) if shards else 1
    settings = {
        **_NEUTRAL,
        "parallel.world_size": parallel.tensor_model_parallel_size * replicas,
        "parallel.pipeline_model_parallel_size": 1,
        "parallel.virtual_pipeline_stages": 1,
        "parallel.pipeline_schedule": "zero-bubble" if parallel.schedule.splits_backward else "1f1b",
        "parallel.zero_stage": parallel.zero_stage if shards else 0,
        "parallel.ddp_bucket_size": None,
        "parallel.cpu_offload": False,
        "model.num_layers": num_layers,
        "batch.global_batch_size": config.batch.micro_batch_size * replicas,
    }
    return _without_run(config.with_settings(settings), OptimizerConfig())


def _update_config(config: Config, ranks: int, num_layers: int, replicas: int, has_buckets: bool) -> Config:
    """The configuration for a pipeline with other numbers of ranks, layers and replicas, with a bucket per
    layer or none, without what the optimizer step does not depend on."""
    parallel = config.parallel
    settings = {
        **_NEUTRAL,
        "parallel.world_size": parallel.tensor_model_parallel_size * replicas * ranks,
        "parallel.pipeline_model_parallel_size": ranks,
        "parallel.pipeline_schedule": "1f1b",
        "parallel.virtual_pipeline_stages": 1,
        "parallel.ddp_bucket_size": 1 if has_buckets else _NO_BUCKETS,
        "model.num_layers": num_layers,
        "model.hidden_dropout": 0.0,
        "model.attention_dropout": 0.0,
        "batch.micro_batch_size": 1,
        "batch.global_batch_size": replicas,
        "training.checkpoint_activations": False,
        "training.recompute_granularity": None,
        "training.partition_activations": False,
        "training.checkpoint_in_cpu": False,
    }
    return _without_run(config.with_settings(settings), config.optimizer)


def _without_run(config: Config, optimizer: OptimizerConfig) -> Config:
    """The configuration with other settings for what a run does besides: reads, writes and logs."""
    return replace(
        config,
        optimizer=optimizer,
        schedule=ScheduleConfig(lr=1.0),
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(),
        curriculum=None,
    )
