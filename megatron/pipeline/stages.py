"""The layers of each pipeline stage, computed without parameters in memory and without process groups."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deepspeed.pipe import LayerSpec

from megatron.config import Config, ConfigError, ModelConfig
from megatron.config.model import padded_vocab_size
from megatron.config.registries import PARTITION_METHODS
from megatron.config.registry import load_object
from megatron.model import flops
from megatron.model.gpt_model import pipeline_layers
from megatron.model.layer_context import LayerContext
from megatron.model.pipeline_module import layer_names, layer_parameter_counts
from megatron.mpu.layout import TPGroup
from megatron.mpu.random import DropoutRNG
from megatron.pipeline.methods import (
    EMBEDDING,
    TRANSFORMER_LAYER,
    LayerTable,
    MemoryCosts,
    Partition,
    PipelineShape,
    embedding_and_head,
    is_untied,
    partition_layers,
)
from megatron.pipeline.partition_method import parse_partition_method

# Loaded on use: a run imports the planner only for the partition method 'memory'.
_MEMORY_COSTS = "megatron.planner.layer_memory:memory_costs"


@dataclass(frozen=True)
class StagePlan:
    """The layer list and its partition: stage s holds layers bounds[s] to bounds[s + 1] - 1."""

    method: str
    names: list[str]
    """Class or function name of each layer."""
    parameters: list[int]
    """Number of parameters of each layer on one tensor-parallel rank."""
    partition: Partition
    rank_of_stage: tuple[int, ...]
    """The pipeline rank that holds each stage."""
    total_parameters: int
    """Parameters of the whole model; the tied embedding counts once."""

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
        """Returns the pipeline rank that holds the stage."""
        return self.rank_of_stage[stage]

    def sum_by_rank(self, values: Sequence[float]) -> list[float]:
        """Returns the sums over the stages of each pipeline rank. values: one per stage."""
        sums = [0.0] * self.num_ranks
        for rank, value in zip(self.rank_of_stage, values, strict=True):
            sums[rank] += value
        return sums

    def rank_weights(self) -> list[float]:
        """Returns the weight of each pipeline rank."""
        return self.sum_by_rank(self.partition.weights)

    def layer_range(self, stage: int) -> str:
        """Returns the indices of the stage's layers, such as '3-8'; '-' for a stage without layers."""
        first, last = self.bounds[stage], self.bounds[stage + 1] - 1
        return f"{first}-{last}" if last > first else str(first) if last == first else "-"

    def stage_parameters(self, stage: int) -> int:
        """Returns the stage's parameters on one rank. A tied embedding and head on the rank count once."""
        first, last = self.bounds[stage], self.bounds[stage + 1]
        held = sum(self.parameters[first:last])
        _, head = embedding_and_head(self.names)
        shares_embedding = self.rank_of(stage) == 0 and not is_untied(self.names)
        return held - (self.parameters[head] if first <= head < last and shares_embedding else 0)

    def layer_titles(self) -> list[str]:
        """Returns the name of each layer for the report; '' for the functions between layers."""
        first, head = embedding_and_head(self.names)
        titles = {first: "embedding", head: "LM head"}
        kinds = {name: "final norm" if name[0].isupper() else "" for name in self.names}
        kinds[TRANSFORMER_LAYER] = "transformer layer"
        return [titles.get(index, kinds[name]) for index, name in enumerate(self.names)]


def plan_stages(
    config: Config,
    vocab_size: int,
    seconds: dict[str, float] | None = None,
    memory: MemoryCosts | None = None,
) -> StagePlan:
    """Partitions the layer list by `--partition-method`. Raises ConfigError if that is not possible.

    seconds: measured time per kind of layer (see `layer_kinds`), for the method 'profile'. memory: for the
    method 'memory'; None to compute it in this process, see `find_memory_costs`.
    """
    parallel = config.parallel
    layers = layer_list(config, vocab_size)
    names, parameters = layer_names(layers), layer_parameter_counts(layers)
    table = layer_table(config, vocab_size, names, parameters)
    if memory is None and needs_memory_costs(config):
        memory = find_memory_costs(config, vocab_size)
    partition = partition_layers(
        parse_partition_method(parallel.partition_method),
        replace(table, seconds=_per_layer(layer_kinds(names, config.model), seconds), memory=memory),
        PipelineShape(
            parallel.pipeline_model_parallel_size, parallel.stages_per_rank, parallel.schedule.is_v_schedule
        ),
    )
    unsharded = layer_parameter_counts(layers, unsharded=True)
    _, head = embedding_and_head(names)
    total = sum(unsharded) - (0 if is_untied(names) else unsharded[head])
    return StagePlan(parallel.partition_method, names, parameters, partition, parallel.rank_of_stage, total)


def layer_list(config: Config, vocab_size: int) -> list[LayerSpec | Callable]:
    """Returns the list of the model's layers on a tensor-parallel rank."""
    tp_group = TPGroup(size=config.parallel.tensor_model_parallel_size)
    context = LayerContext(config, tp_group, DropoutRNG(config.training.seed))
    return pipeline_layers(context, vocab_size, eod=0)


def needs_memory_costs(config: Config) -> bool:
    """Returns whether `plan_stages` needs the memory of the layers."""
    kind = parse_partition_method(config.parallel.partition_method).kind
    return PARTITION_METHODS[kind].needs_memory


def find_memory_costs(config: Config, vocab_size: int) -> MemoryCosts:
    """Returns the memory of the layers, which the planner predicts. Rank 0 of a run calls it."""
    costs: MemoryCosts = load_object(_MEMORY_COSTS)(config, vocab_size)
    return costs


def stage_flops(config: Config, plan: StagePlan, vocab_size: int) -> list[float]:
    """Returns the FLOPs of a micro-batch per stage, forward and backward, on one rank."""
    flops_of = layer_table(config, vocab_size, plan.names, plan.parameters).flops
    return [sum(flops_of[first:last]) for first, last in zip(plan.bounds[:-1], plan.bounds[1:], strict=True)]


def layer_table(config: Config, vocab_size: int, names: list[str], parameters: list[int]) -> LayerTable:
    """Returns the parameters and FLOPs of each layer on one rank."""
    padded = padded_vocab_size(vocab_size, config.model, config.parallel.tensor_model_parallel_size)
    _, head = embedding_and_head(names)
    work = {window: flops.transformer_layer_flops(config, window) for window in (False, True)}
    first = names.index(TRANSFORMER_LAYER)
    layer_flops = [
        work[config.model.has_window(index - first)] if name == TRANSFORMER_LAYER else 0.0
        for index, name in enumerate(names)
    ]
    layer_flops[head] = flops.head_flops(config, padded)
    types = layer_types(names, config.model)
    return LayerTable(names, held_parameters(config, names, parameters), layer_flops, types)


def held_parameters(config: Config, names: list[str], parameters: list[int]) -> list[int]:
    """Returns each layer's parameters on one rank; 0 for a tied head on the embedding's rank (one matrix)."""
    held = list(parameters)
    if config.parallel.rank_of_stage[-1] == 0 and not is_untied(names):
        held[embedding_and_head(names)[1]] = 0
    return held


def _per_layer(kinds: list[str], seconds: dict[str, float] | None) -> list[float] | None:
    if seconds is None:
        return None
    missing = set(kinds) - seconds.keys()
    if missing:
        raise ConfigError(
            f"--partition-profile has no time of {', '.join(sorted(missing))}: delete the file; the next run "
            "measures again and writes it"
        )
    times, of_functions = [], 0.0
    for kind in kinds:
        # The time of a function is added to the next layer, since functions are not partitioned separately.
        if kind[0].isupper():
            times.append(seconds[kind] + of_functions)
            of_functions = 0.0
        else:
            times.append(0.0)
            of_functions += seconds[kind]
    times[-1] += of_functions
    return times


def layer_types(names: list[str], model: ModelConfig) -> list[str]:
    """Returns the name of each layer. With --window-pattern the names of transformer layers end with @window
    or @full."""
    if model.window_pattern is None:
        return names
    first = names.index(TRANSFORMER_LAYER)
    ends = {True: "@window", False: "@full"}
    return [
        name + ends[model.has_window(index - first)] if name == TRANSFORMER_LAYER else name
        for index, name in enumerate(names)
    ]


def layer_kinds(names: list[str], model: ModelConfig) -> list[str]:
    """Returns the kind of each layer: its type, with @first for the embedding and @last for the head."""
    first = names.index(EMBEDDING)
    return [
        f"{name}@{'first' if index == first else 'last'}" if name == EMBEDDING else name
        for index, name in enumerate(layer_types(names, model))
    ]
