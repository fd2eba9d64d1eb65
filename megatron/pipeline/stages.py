"""The layers of each pipeline stage, computed without parameters in memory and without process groups."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from deepspeed.pipe import LayerSpec

from megatron.config import Config, ConfigError
from megatron.config.model import padded_vocab_size
from megatron.config.registries import PARTITION_METHODS
from megatron.model.flops import layer_flops
from megatron.model.gpt_model import pipeline_layers
from megatron.model.layer_context import LayerContext
from megatron.model.layer_kinds import LayerDescription, Role
from megatron.model.pipeline_module import describe, layer_parameter_counts
from megatron.mpu.mesh import Mesh
from megatron.mpu.random import DropoutRNG
from megatron.pipeline.methods import LayerTable, MemoryCosts, Partition, PipelineShape, partition_layers
from megatron.pipeline.partition_method import parse_partition_method


@dataclass(frozen=True)
class StagePlan:
    """The layer list and its partition: stage s holds the layers bounds[s] to bounds[s + 1] - 1."""

    method: str
    layers: list[LayerDescription]
    parameters: list[int]
    """Number of parameters of each layer on one tensor-parallel rank."""
    partition: Partition
    rank_of_stage: tuple[int, ...]
    """The pipeline rank that holds each stage."""
    total_parameters: int
    """Number of parameters of the whole model. The tied embedding counts once."""
    expert_parameters: int = 0
    """Number of parameters of all experts."""
    expert_share: float = 1.0
    """Number of experts per token divided by the number of experts."""

    @property
    def active_parameters(self) -> int:
        """Number of parameters of the whole model that a token uses."""
        return self.total_parameters - round(self.expert_parameters * (1 - self.expert_share))

    @property
    def bounds(self) -> list[int]:
        return self.partition.bounds

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of_stage) + 1

    @property
    def has_one_stage_per_rank(self) -> bool:
        return self.num_ranks == len(self.rank_of_stage)

    def rank_of(self, stage: int) -> int:
        """Returns the pipeline rank that holds a stage."""
        return self.rank_of_stage[stage]

    def sum_by_rank(self, values: Sequence[float]) -> list[float]:
        """Returns the sum over the stages of each pipeline rank. values: one number per stage."""
        sums = [0.0] * self.num_ranks
        for rank, value in zip(self.rank_of_stage, values, strict=True):
            sums[rank] += value
        return sums

    def rank_weights(self) -> list[float]:
        """Returns the weight of each pipeline rank, the sum of its stages' weights."""
        return self.sum_by_rank(self.partition.weights)

    def layer_range(self, stage: int) -> str:
        """Returns the indices of the stage's layers as text, such as '3-8'; '-' for a stage without
        layers."""
        first, last = self.bounds[stage], self.bounds[stage + 1] - 1
        return f"{first}-{last}" if last > first else str(first) if last == first else "-"

    def stage_parameters(self, stage: int) -> int:
        """Returns the number of the stage's parameters on one rank. A tied embedding and head on the rank
        count once."""
        first, last = self.bounds[stage], self.bounds[stage + 1]
        shares_embedding = self.rank_of(stage) == 0
        held = zip(self.layers[first:last], self.parameters[first:last], strict=True)
        return sum(number for layer, number in held if not (layer.is_tied and shares_embedding))

    def layers_of(self, stage: int) -> list[LayerDescription]:
        """Returns the layers of a stage."""
        return self.layers[self.bounds[stage] : self.bounds[stage + 1]]

    def num_transformer_layers(self, stage: int) -> int:
        """Returns the number of transformer layers of a stage."""
        return sum(layer.role is Role.TRANSFORMER for layer in self.layers_of(stage))


def plan_stages(
    config: Config,
    vocab_size: int,
    seconds: dict[str, float] | None = None,
    memory: MemoryCosts | None = None,
) -> StagePlan:
    """Partitions the layer list by `--partition-method`. Raises ConfigError if this is not possible.

    seconds: measured times (see `LayerDescription.time_name`), needed by the method 'profile'. memory: memory
    of the layers, needed by the method 'memory' (see `needs_memory_costs`).
    """
    parallel = config.parallel
    layers = layer_list(config, vocab_size)
    described, parameters = list(map(describe, layers)), layer_parameter_counts(layers)
    table = LayerTable(
        described,
        held_parameters(config, described, parameters),
        flops_of_layers(config, described, vocab_size),
        None if seconds is None else _per_layer(described, seconds),
        memory,
    )
    partition = partition_layers(
        parse_partition_method(parallel.partition_method),
        table,
        PipelineShape(
            parallel.pipeline_model_parallel_size, parallel.stages_per_rank, parallel.schedule.is_v_schedule
        ),
    )
    unsharded = layer_parameter_counts(layers, unsharded=True)
    total = sum(number for layer, number in zip(described, unsharded, strict=True) if not layer.is_tied)
    plan = StagePlan(
        parallel.partition_method, described, parameters, partition, parallel.rank_of_stage, total
    )
    if config.model.num_experts is None:
        return plan
    of_experts = layer_parameter_counts(layers, True, lambda spec: "ep" in spec.axis_names)
    share = config.model.moe_router_topk / config.model.num_experts
    return replace(plan, expert_parameters=sum(of_experts), expert_share=share)


def layer_list(config: Config, vocab_size: int) -> list[LayerSpec | Callable]:
    """Returns the list of the model's layers for one tensor- and expert-parallel rank."""
    experts = config.parallel.expert_model_parallel_size
    mesh = Mesh(config.parallel.tensor_model_parallel_size, 1, experts, ep_size=experts)
    context = LayerContext(config, mesh, DropoutRNG(config.training.seed))
    return pipeline_layers(context, vocab_size, eod=0)


def needs_memory_costs(config: Config) -> bool:
    """Returns whether `plan_stages` needs the memory of the layers (`memory`)."""
    kind = parse_partition_method(config.parallel.partition_method).kind
    return PARTITION_METHODS[kind].needs_memory


def stage_flops(config: Config, plan: StagePlan, vocab_size: int) -> list[float]:
    """Returns the FLOPs of each stage on one rank for a micro-batch's forward and backward pass."""
    flops = flops_of_layers(config, plan.layers, vocab_size)
    return [sum(flops[first:last]) for first, last in pairwise(plan.bounds)]


def flops_of_layers(config: Config, layers: Sequence[LayerDescription], vocab_size: int) -> list[float]:
    """Returns the FLOPs of each layer on one rank for a micro-batch's forward and backward pass."""
    padded = padded_vocab_size(vocab_size, config.model, config.parallel.tensor_model_parallel_size)
    by_description = {layer: layer_flops(config, layer, padded) for layer in set(layers)}
    return [by_description[layer] for layer in layers]


def held_parameters(
    config: Config, layers: Sequence[LayerDescription], parameters: Sequence[int]
) -> list[int]:
    """Returns the number of each layer's parameters on one rank; 0 for a tied head on the embedding's rank
    (one matrix)."""
    is_alone = config.parallel.rank_of_stage[-1] == 0
    return [
        0 if layer.is_tied and is_alone else number for layer, number in zip(layers, parameters, strict=True)
    ]


def _per_layer(layers: Sequence[LayerDescription], seconds: Mapping[str, float]) -> list[float]:
    missing = {layer.time_name for layer in layers} - seconds.keys()
    if missing:
        raise ConfigError(
            f"--partition-profile has no time of {', '.join(sorted(missing))}: delete the file; the next run "
            "measures again and writes it"
        )
    times, of_functions = [], 0.0
    for layer in layers:
        # The time of a function counts for the next layer, since functions are not partitioned separately.
        if layer.role is Role.FUNCTION:
            times.append(0.0)
            of_functions += seconds[layer.time_name]
        else:
            times.append(seconds[layer.time_name] + of_functions)
            of_functions = 0.0
    times[-1] += of_functions
    return times
