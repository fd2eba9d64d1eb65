"""The layers of each pipeline stage, computed without parameters in memory and without process groups."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config import Config, ConfigError
from megatron.config.parsing.partition_method import parse_partition_method
from megatron.config.vocab import padded_vocab_size
from megatron.model.gpt_model import pipeline_layers
from megatron.model.layer_context import LayerContext
from megatron.model.norm import norm_class
from megatron.model.pipeline_module import layer_names, layer_parameter_counts
from megatron.mpu.layout import TPGroup
from megatron.mpu.random import DropoutRNG
from megatron.pipeline.methods import (
    EMBEDDING,
    TRANSFORMER_LAYER,
    UNTIED_HEAD,
    LayerTable,
    Partition,
    PipelineShape,
    embedding_and_head,
    is_untied,
    partition_layers,
)
from megatron.pipeline.orders import interleaved_in_flight, zero_bubble_in_flight
from megatron.planner.memory import layer_memory
from megatron.planner.timing import flops


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
        """The pipeline rank that holds the stage."""
        return self.rank_of_stage[stage]

    def sum_by_rank(self, values: Sequence[float]) -> list[float]:
        """The sums over the stages of each pipeline rank. values: one per stage."""
        sums = [0.0] * self.num_ranks
        for rank, value in zip(self.rank_of_stage, values, strict=True):
            sums[rank] += value
        return sums

    def rank_weights(self) -> list[float]:
        """Weight per pipeline rank."""
        return self.sum_by_rank(self.partition.weights)

    def layer_range(self, stage: int) -> str:
        """The indices of the stage's layers, such as '3-8'; '-' for a stage without layers."""
        first, last = self.bounds[stage], self.bounds[stage + 1] - 1
        return f"{first}-{last}" if last > first else str(first) if last == first else "-"

    def stage_parameters(self, stage: int) -> int:
        """Parameters that one rank of the stage holds. A tied embedding and head on one rank are one
        matrix."""
        first, last = self.bounds[stage], self.bounds[stage + 1]
        held = sum(self.parameters[first:last])
        _, head = embedding_and_head(self.names)
        shares_embedding = self.rank_of(stage) == 0 and not is_untied(self.names)
        return held - (self.parameters[head] if first <= head < last and shares_embedding else 0)

    def layer_titles(self) -> list[str]:
        """The name of each layer for the report; '' for the functions between layers."""
        first, head = embedding_and_head(self.names)
        titles = {first: "embedding", head: "LM head"}
        kinds = {name: "final norm" if name[0].isupper() else "" for name in self.names}
        kinds[TRANSFORMER_LAYER] = "transformer layer"
        return [titles.get(index, kinds[name]) for index, name in enumerate(self.names)]


def plan_stages(config: Config, vocab_size: int, seconds: dict[str, float] | None = None) -> StagePlan:
    """Partitions the layer list by `--partition-method`; ConfigError if that is not possible.

    seconds: measured time per kind of layer (see `layer_kinds`), for the method 'profile'.
    """
    parallel = config.parallel
    tp_group = TPGroup(size=parallel.tensor_model_parallel_size)
    context = LayerContext(config, tp_group, DropoutRNG(config.training.seed))
    layers = pipeline_layers(context, vocab_size, eod=0)
    names, parameters = layer_names(layers), layer_parameter_counts(layers)
    partition = partition_layers(
        parse_partition_method(parallel.partition_method),
        layer_table(config, vocab_size, names, parameters, seconds),
        PipelineShape(
            parallel.pipeline_model_parallel_size,
            parallel.stages_per_rank,
            parallel.schedule.is_v_schedule,
            mean_in_flight_micro_batches(config),
        ),
    )
    unsharded = layer_parameter_counts(layers, unsharded=True)
    _, head = embedding_and_head(names)
    total = sum(unsharded) - (0 if is_untied(names) else unsharded[head])
    return StagePlan(parallel.partition_method, names, parameters, partition, parallel.rank_of_stage, total)


def stage_flops(config: Config, plan: StagePlan, vocab_size: int) -> list[float]:
    """FLOPs of a micro-batch per stage, forward and backward, on one rank."""
    flops_of = layer_table(config, vocab_size, plan.names, plan.parameters, None).flops
    return [sum(flops_of[first:last]) for first, last in zip(plan.bounds[:-1], plan.bounds[1:], strict=True)]


def layer_table(
    config: Config,
    vocab_size: int,
    names: list[str],
    parameters: list[int],
    seconds: dict[str, float] | None,
) -> LayerTable:
    """The costs of each layer on one rank, estimated by `planner.timing.flops` and `planner.memory`."""
    padded = padded_vocab_size(vocab_size, config.model, config.parallel.tensor_model_parallel_size)
    first, head = embedding_and_head(names)
    work: dict[str, float] = {TRANSFORMER_LAYER: flops.transformer_layer_flops(config)}
    kept: dict[str, float] = {
        TRANSFORMER_LAYER: layer_memory.transformer_layer_activation_bytes(config),
        norm_class(config).__name__: layer_memory.norm_activation_bytes(config),
    }
    layer_flops = [work.get(name, 0.0) for name in names]
    activation_bytes = [kept.get(name, 0.0) for name in names]
    layer_flops[head] = flops.head_flops(config, padded)
    activation_bytes[first] = layer_memory.embedding_activation_bytes(config)
    activation_bytes[head] = layer_memory.head_activation_bytes(config, padded)
    per_parameter = dict.fromkeys(names, layer_memory.state_bytes_per_parameter(config))
    # 8-bit Adam keeps 32-bit moments for norms and biases, a thousandth of a layer; that is neglected.
    moment_bytes = layer_memory.EIGHT_BIT if config.optimizer.use_bnb_optimizer else layer_memory.FP32
    per_parameter[UNTIED_HEAD] = layer_memory.state_bytes_per_parameter(config, moment_bytes)
    per_parameter[TRANSFORMER_LAYER] = layer_memory.state_bytes_per_parameter(
        config, moment_bytes, in_transformer_layer=True
    )
    held = list(parameters)
    if config.parallel.rank_of_stage[-1] == 0 and not is_untied(names):
        held[head] = 0  # the rank of the head also has the embedding, which is the same matrix
    state_bytes = [count * per_parameter[name] for name, count in zip(names, held, strict=True)]
    return LayerTable(names, held, layer_flops, state_bytes, activation_bytes, _per_layer(names, seconds))


def _per_layer(names: list[str], seconds: dict[str, float] | None) -> list[float] | None:
    if seconds is None:
        return None
    missing = set(layer_kinds(names)) - seconds.keys()
    if missing:
        raise ConfigError(
            f"--partition-profile has no time of {', '.join(sorted(missing))}: delete the file, the next run "
            "measures and writes it"
        )
    times, of_functions = [], 0.0
    for kind in layer_kinds(names):
        # The time of a function is added to the layer after it; functions are not partitioned on their own.
        if kind[0].isupper():
            times.append(seconds[kind] + of_functions)
            of_functions = 0.0
        else:
            times.append(0.0)
            of_functions += seconds[kind]
    times[-1] += of_functions
    return times


def layer_kinds(names: list[str]) -> list[str]:
    """The kind of each layer: its name, with @first for the embedding and @last for the head."""
    first = names.index(EMBEDDING)
    return [
        f"{name}@{'first' if index == first else 'last'}" if name == EMBEDDING else name
        for index, name in enumerate(names)
    ]


def head_kind(names: list[str]) -> str:
    """The kind of the LM head."""
    return layer_kinds(names)[embedding_and_head(names)[1]]


@dataclass(frozen=True)
class InFlight:
    """Micro-batches of a stage at one time. waiting: between their forward and their backward pass. deferred:
    between their backward and their weight pass, if the schedule has such passes."""

    waiting: int
    deferred: int = 0


def in_flight_micro_batches(config: Config) -> list[int]:
    """For each stage, the largest number of micro-batches between their forward and their last pass."""
    return [
        max(number.waiting + number.deferred for number in numbers) for numbers in _in_flight_by_stage(config)
    ]


def mean_in_flight_micro_batches(config: Config) -> list[float]:
    """The same in units of what is kept for a backward pass, and the mean over the times when the stage's
    rank has most: with several stages per rank they do not reach their largest numbers together."""
    kept = layer_memory.transformer_layer_activation_bytes(config)
    ratio = layer_memory.deferred_layer_bytes(config) / kept if kept else 1.0
    sizes = [[n.waiting + ratio * n.deferred for n in numbers] for numbers in _in_flight_by_stage(config)]
    if config.parallel.schedule.splits_backward:
        return [max(of_stage) for of_stage in sizes]
    return [sum(of_stage) / len(of_stage) for of_stage in sizes]


def in_flight_on_rank(config: Config, rank: int) -> list[dict[int, InFlight]]:
    """Stage -> micro-batches in flight, for the stages of a pipeline rank, at each of the times when the rank
    has most of them.

    Under 1F1B and under DualPipeV stage s of p has p - s of them; `pipeline.schedule` simulates these and
    the other schedules.
    """
    parallel, micro_batches = config.parallel, micro_batches_per_step(config)
    ranks = parallel.pipeline_model_parallel_size
    stages = [stage for stage, holder in enumerate(parallel.rank_of_stage) if holder == rank]
    if parallel.schedule.splits_backward:
        return [{rank: InFlight(*moment)} for moment in zero_bubble_in_flight(rank, ranks, micro_batches)]
    if parallel.schedule.micro_batches_multiple_of_ranks:
        moments = interleaved_in_flight(rank, ranks, micro_batches, parallel.stages_per_rank)
        return [dict(zip(stages, map(InFlight, numbers), strict=True)) for numbers in moments]
    return [{stage: InFlight(min(micro_batches, parallel.num_stages - stage)) for stage in stages}]


def _in_flight_by_stage(config: Config) -> list[list[InFlight]]:
    parallel = config.parallel
    by_rank = [in_flight_on_rank(config, rank) for rank in range(parallel.pipeline_model_parallel_size)]
    return [[moment[stage] for moment in by_rank[rank]] for stage, rank in enumerate(parallel.rank_of_stage)]


def micro_batches_per_step(config: Config) -> int:
    """Micro-batches of a step on each data-parallel replica, at the full batch size."""
    batch = config.batch
    return batch.global_batch_size // (batch.micro_batch_size * config.parallel.data_parallel_size)
