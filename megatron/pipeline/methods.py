"""The methods of --partition-method. They compute the bounds of the pipeline stages from the costs of the
layers.

They need no process group, so a dry run computes the same partition as the training run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from megatron.config import ConfigError
from megatron.config.registries import PARTITION_METHODS
from megatron.model.layer_kinds import LayerDescription, Role, embedding_and_head, transformer_layers
from megatron.pipeline.partition import TooLongError, Weight, partition, partition_v
from megatron.pipeline.partition_method import EXAMPLES, PartitionMethod, StageContent
from megatron.units import GIB

MEMORY_UNIT = "GiB"
TIME_UNITS = ("GFLOP", "ms")


@dataclass(frozen=True)
class MemoryCosts:
    """The memory of the layers on one rank, for the partition method 'memory'."""

    state_bytes: list[float]
    """Bytes of parameters, gradients and optimizer state of each layer."""
    activation_bytes: list[float]
    """Bytes that a micro-batch's activations occupy in each layer between its forward and its backward
    pass."""
    in_flight: list[float]
    """For each stage, the number of its in-flight micro-batches (between forward and backward pass) at the
    time when its rank has the most, as a multiple of `activation_bytes`."""


@dataclass(frozen=True)
class LayerTable:
    """The costs of each pipeline layer on one rank. All lists have one entry per layer."""

    layers: list[LayerDescription]
    parameters: list[int]
    flops: list[float]
    """FLOPs of a micro-batch's forward and backward pass, per layer."""
    seconds: list[float] | None = None
    """Measured seconds of a micro-batch's forward and backward pass, per layer, for the method 'profile'."""
    memory: MemoryCosts | None = None
    """The memory of the layers. Methods with `needs_memory` in the registry need it."""


@dataclass(frozen=True)
class Partition:
    """A partition: stage s holds the layers bounds[s] to bounds[s + 1] - 1. Its weight is weights[s], in
    `unit`."""

    bounds: list[int]
    weights: list[float]
    unit: str


@dataclass(frozen=True)
class PipelineShape:
    """The stages of a schedule. is_v_schedule: whether rank r of p holds the stages r and 2p - 1 - r."""

    ranks: int
    stages_per_rank: int
    is_v_schedule: bool

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank


def partition_layers(method: PartitionMethod, table: LayerTable, shape: PipelineShape) -> Partition:
    """Partitions the layers into the stages of a schedule. With a V schedule it balances the ranks, otherwise
    the stages.

    Raises ConfigError if a pattern matches no layer, if explicit stages do not match --num-layers or the
    number of stages, or if there are more stages than layers with a weight.
    """
    result: Partition = PARTITION_METHODS.load(method.kind)(method, table, shape)
    return result


def by_layer_count(method: PartitionMethod, table: LayerTable, shape: PipelineShape) -> Partition:
    """Balances the numbers of layers per stage."""
    return _balanced(method, table, shape, [1] * len(table.layers), "layers")


def by_parameters(method: PartitionMethod, table: LayerTable, shape: PipelineShape) -> Partition:
    """Balances the numbers of parameters per stage."""
    return _balanced(method, table, shape, table.parameters, "M parameters", 1e6)


def by_flops(method: PartitionMethod, table: LayerTable, shape: PipelineShape) -> Partition:
    """Balances the estimated FLOPs per stage."""
    return _balanced(method, table, shape, table.flops, "GFLOP", 1e9)


def by_measured_time(method: PartitionMethod, table: LayerTable, shape: PipelineShape) -> Partition:
    """Balances the measured times per stage. Raises ConfigError if no times were measured."""
    if table.seconds is None:
        raise ConfigError(
            f"--partition-method {method.text} measures the layers when a run starts, but a dry run cannot: "
            "set --partition-profile FILE to a file that a run with this flag has written"
        )
    return _balanced(method, table, shape, table.seconds, "ms", 1e-3)


def by_layer_type(method: PartitionMethod, table: LayerTable, shape: PipelineShape) -> Partition:
    """Balances, per stage, the weights that type:REGEX:WEIGHT assigns to the layers."""
    weights = _weights_by_name(method, [layer.type_name for layer in table.layers])
    return _balanced(method, table, shape, weights, "")


def explicit_stages(method: PartitionMethod, table: LayerTable, shape: PipelineShape) -> Partition:
    """Returns the stages that the flag lists."""
    bounds = _explicit_bounds(method, table.layers, shape)
    sums = [sum(table.flops[first:last]) / 1e9 for first, last in pairwise(bounds)]
    return Partition(bounds, sums, "GFLOP")


def _balanced(
    method: PartitionMethod,
    table: LayerTable,
    shape: PipelineShape,
    weights: Sequence[Weight],
    unit: str,
    scale: float = 1,
) -> Partition:
    """Balances the sums of the layers' weights per stage. The reported sums are divided by `scale` and have
    the unit `unit`."""
    return _balanced_costs(method, table, shape, [weights] * shape.stages, unit, scale)


def _balanced_costs(
    method: PartitionMethod,
    table: LayerTable,
    shape: PipelineShape,
    costs: Sequence[Sequence[Weight]],
    unit: str,
    scale: float,
) -> Partition:
    """Balances the costs of the stages. costs: row s has the cost of each layer on stage s. unit, scale: see
    `_balanced`."""
    merged = {id(row): _merge_functions(row, table.layers) for row in costs}
    costs = [merged[id(row)] for row in costs]
    _check_enough(method, table.layers, costs[-1], shape)
    try:
        bounds = partition_v(costs) if shape.is_v_schedule else partition(costs)
    except TooLongError as error:
        raise ConfigError(
            f"--partition-method {method.text} would take too long for a list of {len(table.layers):,} "
            "layers: list the stages with stages:, or use time with --pipeline-schedule 1f1b"
        ) from error
    sums = [sum(row[first:last]) for row, (first, last) in zip(costs, pairwise(bounds), strict=True)]
    return Partition(bounds, [float(value / scale) for value in sums], unit)


def _weights_by_name(method: PartitionMethod, types: Sequence[str]) -> list[Fraction]:
    """Returns each layer's weight: the weight of the first alternative that matches the layer, or 0."""
    weights: list[Fraction | None] = [None] * len(types)
    for alternative in method.alternatives:
        pattern = re.compile(alternative.pattern, re.IGNORECASE)
        found = [index for index, name in enumerate(types) if pattern.search(name)]
        if not found:
            raise ConfigError(
                f"--partition-method {method.text}: '{alternative.text}' matches none of the layers, which "
                f"are {', '.join(dict.fromkeys(types))}; expected something like {EXAMPLES['type']}"
            )
        chosen = {"": found, "first": found[:1], "last": found[-1:]}[alternative.place]
        without_weight = [index for index in chosen if weights[index] is None]
        if not without_weight:
            raise ConfigError(
                f"--partition-method {method.text}: '{alternative.text}' has no effect, since earlier "
                "alternatives match all its layers: remove it, or put it first"
            )
        for index in without_weight:
            weights[index] = alternative.weight
    return [weight or Fraction(0) for weight in weights]


def _check_enough(
    method: PartitionMethod,
    layers: Sequence[LayerDescription],
    weights: Sequence[Weight],
    shape: PipelineShape,
) -> None:
    weighted = [layer.name for layer, weight in zip(layers, weights, strict=True) if weight > 0]
    if len(weighted) >= shape.stages:
        return
    kinds = ", ".join(dict.fromkeys(weighted)) or "none"
    needed, advice = f"{shape.stages} stages", "lower --pipeline-model-parallel-size"
    if shape.stages_per_rank > 1:
        needed += f" ({shape.stages_per_rank} x --pipeline-model-parallel-size)"
        advice += "" if shape.is_v_schedule else " or --virtual-pipeline-stages"
    if method.kind == "type":
        names = dict.fromkeys(layer.name for layer in layers if layer.role is not Role.FUNCTION)
        classes = ", ".join(names)
        advice += f", give more of {classes} a weight"
    raise ConfigError(
        f"--partition-method {method.text} has {len(weighted)} layers with a weight above 0 "
        f"({kinds}) and {needed} need one each: {advice}, or list empty stages with stages:"
    )


def _merge_functions(weights: Sequence[Weight], layers: Sequence[LayerDescription]) -> list[Weight]:
    """Adds the weight of each function, which has no parameters, to the next layer. Adds the weights of all
    entries after the head to the head.

    The partition therefore keeps them on one stage. So each stage has parameters, and stages exchange only
    hidden states, and never token ids or logits (which are sharded over the tensor-parallel ranks).
    """
    head = embedding_and_head(layers)[1]
    merged: list[Weight] = [0] * len(layers)
    before: Weight = 0
    for index, (weight, layer) in enumerate(zip(weights, layers, strict=True)):
        before += weight
        if layer.role is not Role.FUNCTION and index <= head:
            merged[index], before = before, 0
    merged[head] += before
    return merged


def by_memory(method: PartitionMethod, table: LayerTable, shape: PipelineShape) -> Partition:
    """Balances the estimated memory, which includes the activations of each stage's in-flight
    micro-batches."""
    memory = table.memory
    assert memory is not None  # see `needs_memory` in the registry
    costs = [
        [state + live * kept for state, kept in zip(memory.state_bytes, memory.activation_bytes, strict=True)]
        for live in memory.in_flight
    ]
    return _balanced_costs(method, table, shape, costs, MEMORY_UNIT, GIB)


def _explicit_bounds(
    method: PartitionMethod, layers: Sequence[LayerDescription], shape: PipelineShape
) -> list[int]:
    number = len(transformer_layers(layers))
    given = sum(stage.transformer_layers for stage in method.stages)
    if len(method.stages) != shape.stages:
        per_rank = f", {shape.stages_per_rank} per pipeline rank" if shape.stages_per_rank > 1 else ""
        raise ConfigError(
            f"--partition-method {method.text} lists {len(method.stages)} stages, but there are "
            f"{shape.stages}{per_rank}: correct the list, or --pipeline-model-parallel-size"
        )
    if given != number:
        raise ConfigError(
            f"--partition-method {method.text} places {given} transformer layers, but --num-layers is "
            f"{number}: correct one of the two"
        )
    return [0, *accumulate(_entries(method.stages, layers))]


def _entries(stages: Sequence[StageContent], layers: Sequence[LayerDescription]) -> list[int]:
    """Returns the number of layer-list entries per stage. Functions before the first transformer layer belong
    to the stage of the next entry. Entries after the last transformer layer belong to the head's stage."""
    inner = transformer_layers(layers)
    between = inner.start - embedding_and_head(layers)[0] - 1
    entries, functions_placed = [], False
    for stage in stages:
        count = stage.transformer_layers
        if stage.embedding:
            count += inner.start - between
        if (stage.transformer_layers or stage.head) and not functions_placed:
            count += between
            functions_placed = True
        if stage.head:
            count += len(layers) - inner.stop
        entries.append(count)
    return entries
