"""The flat buffers of the optimizer on one rank, by formula: their lengths and what is in them.

They are those of `megatron.optimizer.flat_group`: a buffer per kind of parameter, padded so that it divides
into equal partitions, one per data-parallel rank with ZeRO. With ZeRO-2 and ZeRO-3 each transformer layer has
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from deepspeed.pipe import LayerSpec

from megatron.config import Config, OptimizerConfig
from megatron.config.sections.batch import BatchConfig
from megatron.config.sections.model import ModelConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.config.sections.schedule import ScheduleConfig
from megatron.model.gpt_model import pipeline_layers
from megatron.model.layer_context import LayerContext
from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import is_sequence_parallel_grad, spec_of
from megatron.mpu.random import DropoutRNG
from megatron.optimizer.buckets import divide_into_buckets
from megatron.optimizer.eight_bit import moment_bits
from megatron.optimizer.flat_group import ALIGNMENT
from megatron.optimizer.quantized import BLOCK_SIZE
from megatron.pipeline.methods import EMBEDDING, TRANSFORMER_LAYER, embedding_and_head, is_untied
from megatron.planner.stages import StagePlan


@dataclass(frozen=True)
class Parameter:
    """A parameter of a layer on one tensor-parallel rank."""

    elements: int
    is_replicated: bool
    """Over the tensor-parallel ranks."""
    is_sequence_parallel: bool
    """Whether each tensor-parallel rank has a part of the gradient, with --sequence-parallel."""
    has_partial_gradient: bool
    """The same without --sequence-parallel."""
    is_word_embedding: bool
    """Or the head that is tied to it."""
    kind: tuple[bool, int, float]
    """Weight decay, bits of a moment, multiplier of the learning rate: the flat group that it is in."""


@dataclass(frozen=True)
class FlatBuffer:
    """A flat buffer of the optimizer (`megatron.optimizer.flat_group`)."""

    parameters: tuple[Parameter, ...]
    length: int
    partitions: int
    shards_gradients: bool
    in_bucket: bool = False
    """Whether it is that of a bucket of layers (`megatron.optimizer.buckets`)."""

    def first_partition(self, wanted: Callable[[Parameter], bool]) -> int:
        """Elements of the wanted parameters in the partition of data rank 0; without ZeRO all of them."""
        end, offset, found = self.length // self.partitions, 0, 0
        alignment = _alignment(self.parameters)
        for parameter in self.parameters:
            offset = -(-offset // alignment) * alignment
            if wanted(parameter):
                found += max(min(offset + parameter.elements, end) - offset, 0)
            offset += parameter.elements
        return found


def is_replicated(parameter: Parameter) -> bool:
    """Whether all tensor-parallel ranks hold the whole parameter."""
    return parameter.is_replicated


def is_sequence_parallel(parameter: Parameter) -> bool:
    """Whether each tensor-parallel rank has a part of the gradient, with --sequence-parallel."""
    return parameter.is_sequence_parallel


def has_partial_gradient(parameter: Parameter) -> bool:
    """Whether each tensor-parallel rank has a part of the gradient, without --sequence-parallel too."""
    return parameter.has_partial_gradient


def rank_buffers(config: Config, plan: StagePlan, vocab_size: int, stages: Sequence[int]) -> list[FlatBuffer]:
    """The flat buffers of a rank: of its parameters outside of ZeRO's units, of the tied embedding if it is
    partitioned and on another rank too, then of each unit or bucket of layers."""
    partitioned, sharded = config.parallel.optimizer_partitions > 1, config.parallel.shards_gradients
    table = layer_parameters(config, vocab_size)
    first, head = embedding_and_head(plan.names)
    layers = [layer for stage in stages for layer in range(plan.bounds[stage], plan.bounds[stage + 1])]
    untied = is_untied(plan.names)
    if first in layers and head in layers and not untied:
        layers.remove(head)  # the same parameter
    # DeepSpeed registers the tied modules first.
    layers.sort(key=lambda layer: layer != first and (untied or layer != head))
    transformer = sorted(layer for layer in layers if plan.names[layer] == TRANSFORMER_LAYER)
    units = [[layer] for layer in transformer] if sharded else _buckets(config, transformer, table)
    in_units = {layer for unit in units for layer in unit}
    others = [p for layer in layers if layer not in in_units for p in table[layer]]
    separate = partitioned and is_tied_across_ranks(plan)
    flats = flat_buffers(config, [p for p in others if not (separate and p.is_word_embedding)], False)
    flats += flat_buffers(config, [p for p in others if separate and p.is_word_embedding], False)
    for unit in units:
        found = flat_buffers(config, [p for layer in unit for p in table[layer]], sharded)
        flats += found if sharded else [replace(flat, in_bucket=True) for flat in found]
    return flats


def _buckets(
    config: Config, layers: Sequence[int], table: Sequence[tuple[Parameter, ...]]
) -> list[list[int]]:
    """The transformer layers of each bucket of a rank that holds `layers`."""
    bucket_size = config.parallel.bucket_size
    if bucket_size is None:
        return []
    sizes = [sum(parameter.elements for parameter in table[layer]) for layer in layers]
    return [[layers[index] for index in part] for part in divide_into_buckets(sizes, bucket_size)]


def is_tied_across_ranks(plan: StagePlan) -> bool:
    """Whether two pipeline ranks hold the tied embedding."""
    return len(embedding_ranks(plan)) == 2 and not is_untied(plan.names)


def embedding_ranks(plan: StagePlan) -> set[int]:
    """The pipeline ranks of the embedding and of the head."""
    return {plan.rank_of(_stage_of(plan, layer)) for layer in embedding_and_head(plan.names)}


def _stage_of(plan: StagePlan, layer: int) -> int:
    return next(stage for stage, end in enumerate(plan.bounds[1:]) if layer < end)


def flat_buffers(config: Config, parameters: Iterable[Parameter], is_unit: bool) -> list[FlatBuffer]:
    """A flat buffer per kind of parameter; ZeRO divides it into equal partitions."""
    partitions = config.parallel.optimizer_partitions
    by_kind: dict[tuple[bool, int, float], list[Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault(parameter.kind, []).append(parameter)
    flats = []
    for held in by_kind.values():
        alignment, offset = _alignment(held), 0
        for parameter in held:
            offset = -(-offset // alignment) * alignment + parameter.elements
        unit = max(alignment, ALIGNMENT) * partitions
        flats.append(FlatBuffer(tuple(held), -(-offset // unit) * unit, partitions, is_unit))
    return flats


def _alignment(parameters: Sequence[Parameter]) -> int:
    _, bits, _ = parameters[0].kind
    return BLOCK_SIZE if bits == 8 else 1


def layer_parameters(config: Config, vocab_size: int) -> tuple[tuple[Parameter, ...], ...]:
    """The parameters of each layer of the layer list on one tensor-parallel rank."""
    return _build_parameters(
        config.model,
        config.precision,
        config.optimizer,
        config.parallel.tensor_model_parallel_size,
        vocab_size,
    )


@lru_cache(maxsize=64)  # a search asks for the same table thousands of times
def _build_parameters(
    model: ModelConfig, precision: PrecisionConfig, optimizer: OptimizerConfig, tp_size: int, vocab_size: int
) -> tuple[tuple[Parameter, ...], ...]:
    config = Config(
        model=model,
        precision=precision,
        optimizer=optimizer,
        batch=BatchConfig(micro_batch_size=1, global_batch_size=1),
        schedule=ScheduleConfig(lr=1.0),
    )
    tp_group = TPGroup(size=tp_size)
    context = LayerContext(config, tp_group, DropoutRNG(config.training.seed))
    made: dict[tuple, tuple[Parameter, ...]] = {}
    table = []
    for layer in pipeline_layers(context, vocab_size, eod=0):
        if not isinstance(layer, LayerSpec):
            table.append(())
            continue
        key = (layer.typename, layer.module_kwargs.get("is_head", False))
        if key not in made:
            with torch.device("meta"):
                module = layer.build()
            made[key] = tuple(
                _describe(config, name, parameter, layer.typename.__name__)
                for name, parameter in module.named_parameters()
            )
        table.append(made[key])
    return tuple(table)


def _describe(config: Config, name: str, parameter: torch.Tensor, layer: str) -> Parameter:
    spec = spec_of(parameter)
    # `moment_bits` knows the word embedding by its name in the whole model.
    is_word_embedding = layer == EMBEDDING and name == "word_embeddings.weight"
    name = f"tied_modules.embed.{name}" if layer == EMBEDDING else name
    bits = moment_bits(name, spec) if config.optimizer.use_bnb_optimizer else 32
    return Parameter(
        parameter.numel(),
        spec.shard_dim is None,
        spec.shard_dim is None and layer in (TRANSFORMER_LAYER, EMBEDDING),
        is_sequence_parallel_grad(parameter),
        is_word_embedding,
        (spec.weight_decay, bits, spec.lr_mult),
    )
