"""The methods of --partition-method: from the costs of the layers to the bounds of the pipeline stages.

No process group is needed: a dry run computes the same partition as the training run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from megatron.config import ConfigError
from megatron.config.registries import PARTITION_METHODS
from megatron.pipeline.partition import TooLongError, Weight, partition, partition_v
from megatron.pipeline.partition_method import EXAMPLES, PartitionMethod, StageContent
from megatron.units import GIB

# Class names of the input embedding (and tied head), of an untied head, and of a transformer layer.
EMBEDDING = "EmbeddingPipe"
UNTIED_HEAD = "LMHeadPipe"
TRANSFORMER_LAYER = "ParallelTransformerLayerPipe"

MEMORY_UNIT = "GiB"
TIME_UNITS = ("GFLOP", "ms")


@dataclass(frozen=True)
class MemoryCosts:
    """The memory of the layers on one rank, for the method 'memory'."""

    state_bytes: list[float]
    """Parameters, gradients and optimizer state of each layer."""
    activation_bytes: list[float]
    """Activations of each layer that a micro-batch keeps between its forward and its backward pass."""
    in_flight: list[float]
    """For each stage, its in-flight micro-batches (between forward and backward pass) when its rank has the
    most, in units of `activation_bytes`."""


@dataclass(frozen=True)
class LayerTable:
    """The costs of each pipeline layer on one rank; all lists have one entry per layer."""

    names: list[str]
    parameters: list[int]
    flops: list[float]
    """FLOPs of a micro-batch's forward and backward pass."""
    types: list[str]
    """The names that type:REGEX selects by: see `stages.layer_types`."""
    seconds: list[float] | None = None
    """Measured seconds of a micro-batch's forward and backward pass, for the method 'profile'."""
    memory: MemoryCosts | None = None
    """Needed by the methods with `needs_memory` in the registry."""


@dataclass(frozen=True)
class Partition:
    """Stage s holds layers bounds[s] to bounds[s + 1] - 1; its weight is weights[s], in `unit`."""

    bounds: list[int]
    weights: list[float]
    unit: str


@dataclass(frozen=True)
class PipelineShape:
    """The stages of a schedule. is_v_schedule: rank r of p holds stages r and 2p - 1 - r."""

    ranks: int
    stages_per_rank: int
    is_v_schedule: bool

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank


def embedding_and_head(names: Sequence[str]) -> tuple[int, int]:
    """Returns the indices of the input embedding and the head, which share a class name if tied."""
    found = [index for index, name in enumerate(names) if name in (EMBEDDING, UNTIED_HEAD)]
    return found[0], found[-1]


def is_untied(names: Sequence[str]) -> bool:
    """Returns whether the head has its own weight."""
    return UNTIED_HEAD in names


def partition_layers(method: PartitionMethod, layers: LayerTable, shape: PipelineShape) -> Partition:
    """Partitions the layers into the stages of a schedule.

    With a V schedule the ranks are balanced, otherwise the stages.

    Raises ConfigError for a pattern that matches no layer, explicit stages that do not match --num-layers or
    the number of stages, and more stages than layers with a weight.
    """
    result: Partition = PARTITION_METHODS.load(method.kind)(method, layers, shape)
    return result


def by_layer_count(method: PartitionMethod, layers: LayerTable, shape: PipelineShape) -> Partition:
    """Balances the numbers of layers."""
    return _balanced(method, layers, shape, [1] * len(layers.names), "layers")


def by_parameters(method: PartitionMethod, layers: LayerTable, shape: PipelineShape) -> Partition:
    """Balances the numbers of parameters."""
    return _balanced(method, layers, shape, layers.parameters, "M parameters", 1e6)


def by_flops(method: PartitionMethod, layers: LayerTable, shape: PipelineShape) -> Partition:
    """Balances the estimated FLOPs."""
    return _balanced(method, layers, shape, layers.flops, "GFLOP", 1e9)


def by_measured_time(method: PartitionMethod, layers: LayerTable, shape: PipelineShape) -> Partition:
    """Balances the measured times. Raises ConfigError if no times were measured."""
    if layers.seconds is None:
        raise ConfigError(
            f"--partition-method {method.text} measures the layers when a run starts, but a dry run cannot: "
            "set --partition-profile FILE to a file that a run with this flag has written"
        )
    return _balanced(method, layers, shape, layers.seconds, "ms", 1e-3)


def by_layer_type(method: PartitionMethod, layers: LayerTable, shape: PipelineShape) -> Partition:
    """Balances the weights that type:REGEX:WEIGHT assigns to the layers."""
    return _balanced(method, layers, shape, _weights_by_name(method, layers.types), "")


def explicit_stages(method: PartitionMethod, layers: LayerTable, shape: PipelineShape) -> Partition:
    """Returns the stages that the flag lists."""
    bounds = _explicit_bounds(method, layers.names, shape)
    sums = [sum(layers.flops[first:last]) / 1e9 for first, last in pairwise(bounds)]
    return Partition(bounds, sums, "GFLOP")


def _balanced(
    method: PartitionMethod,
    layers: LayerTable,
    shape: PipelineShape,
    weights: Sequence[Weight],
    unit: str,
    scale: float = 1,
) -> Partition:
    """Balances the sums of the layers' weights. Reports the sums in `unit`, divided by `scale`."""
    return _balanced_costs(method, layers, shape, [weights] * shape.stages, unit, scale)


def _balanced_costs(
    method: PartitionMethod,
    layers: LayerTable,
    shape: PipelineShape,
    costs: Sequence[Sequence[Weight]],
    unit: str,
    scale: float,
) -> Partition:
    """Balances the costs of the stages. costs: row s has the cost of each layer on stage s."""
    merged = {id(row): _merge_end_functions(row, layers.names) for row in costs}
    costs = [merged[id(row)] for row in costs]
    _check_enough(method, layers.names, costs[-1], shape)
    try:
        bounds = partition_v(costs) if shape.is_v_schedule else partition(costs)
    except TooLongError as error:
        raise ConfigError(
            f"--partition-method {method.text} would take too long for a list of {len(layers.names):,} "
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
    method: PartitionMethod, names: Sequence[str], weights: Sequence[Weight], shape: PipelineShape
) -> None:
    weighted = [name for name, weight in zip(names, weights, strict=True) if weight > 0]
    if len(weighted) >= shape.stages:
        return
    kinds = ", ".join(dict.fromkeys(weighted)) or "none"
    needed, advice = f"{shape.stages} stages", "lower --pipeline-model-parallel-size"
    if shape.stages_per_rank > 1:
        needed += f" ({shape.stages_per_rank} x --pipeline-model-parallel-size)"
        advice += "" if shape.is_v_schedule else " or --virtual-pipeline-stages"
    if method.kind == "type":
        classes = ", ".join(name for name in dict.fromkeys(names) if name[0].isupper())
        advice += f", give more of {classes} a weight"
    raise ConfigError(
        f"--partition-method {method.text} has {len(weighted)} layers with a weight above 0 "
        f"({kinds}) and {needed} need one each: {advice}, or list empty stages with stages:"
    )


def _merge_end_functions(weights: Sequence[Weight], names: Sequence[str]) -> list[Weight]:
    """Adds the weights of the functions before the embedding and after the head to embedding and head.

    The partition then keeps them on the same stage. So stages exchange only hidden states, never token ids or
    logits (logits are sharded over the tensor-parallel ranks).
    """
    first, head = embedding_and_head(names)
    inner = list(weights[first : head + 1])
    inner[0] += sum(weights[:first])
    inner[-1] += sum(weights[head + 1 :])
    return [0] * first + inner + [0] * (len(names) - 1 - head)


def by_memory(method: PartitionMethod, layers: LayerTable, shape: PipelineShape) -> Partition:
    """Balances the estimated memory, including the activations of each stage's in-flight micro-batches."""
    memory = layers.memory
    assert memory is not None  # see `needs_memory` in the registry
    costs = [
        [state + live * kept for state, kept in zip(memory.state_bytes, memory.activation_bytes, strict=True)]
        for live in memory.in_flight
    ]
    return _balanced_costs(method, layers, shape, costs, MEMORY_UNIT, GIB)


def _explicit_bounds(method: PartitionMethod, names: Sequence[str], shape: PipelineShape) -> list[int]:
    layers = names.count(TRANSFORMER_LAYER)
    given = sum(stage.transformer_layers for stage in method.stages)
    if len(method.stages) != shape.stages:
        per_rank = f", {shape.stages_per_rank} per pipeline rank" if shape.stages_per_rank > 1 else ""
        raise ConfigError(
            f"--partition-method {method.text} lists {len(method.stages)} stages, but there are "
            f"{shape.stages}{per_rank}: correct the list, or --pipeline-model-parallel-size"
        )
    if given != layers:
        raise ConfigError(
            f"--partition-method {method.text} places {given} transformer layers, but --num-layers is "
            f"{layers}: correct one of the two"
        )
    return [0, *accumulate(_entries(method.stages, names))]


def _entries(stages: Sequence[StageContent], names: Sequence[str]) -> list[int]:
    """Returns the number of layer-list entries per stage. Functions before the first transformer layer belong
    to the stage of the next entry; entries after the last transformer layer belong to the head's stage."""
    first_layer, last_layer = (
        names.index(TRANSFORMER_LAYER),
        len(names) - names[::-1].index(TRANSFORMER_LAYER),
    )
    between = first_layer - names.index(EMBEDDING) - 1
    entries, functions_placed = [], False
    for stage in stages:
        count = stage.transformer_layers
        if stage.embedding:
            count += first_layer - between
        if (stage.transformer_layers or stage.head) and not functions_placed:
            count += between
            functions_placed = True
        if stage.head:
            count += len(names) - last_layer
        entries.append(count)
    return entries
