"""What each pipeline stage will hold, found without allocating a parameter or making a process group."""

from dataclasses import dataclass

from megatron.config import Config, ConfigError
from megatron.config.parsing.partition_method import parse_partition_method
from megatron.config.vocab import padded_vocab_size
from megatron.model.gpt_model import layer_names, layer_parameter_counts, pipeline_layers
from megatron.model.norm import norm_class
from megatron.model.transformer import LayerContext
from megatron.mpu.layout import TPGroup
from megatron.mpu.random import DropoutRNG
from megatron.pipeline.methods import (
    EMBEDDING,
    TRANSFORMER_LAYER,
    LayerTable,
    Partition,
    embedding_and_head,
    partition_layers,
)
from megatron.planner import flops, memory


@dataclass(frozen=True)
class StagePlan:
    """The list of layers and where it is cut: stage s holds layers bounds[s] to bounds[s + 1] - 1."""

    method: str
    names: list[str]
    parameters: list[int]
    """Per layer, on one tensor-parallel rank."""
    partition: Partition
    is_v_schedule: bool
    """Each rank holds two stages: r, and as many from the end."""
    total_parameters: int
    """Of the whole model, the tied embedding counted once."""

    @property
    def bounds(self) -> list[int]:
        return self.partition.bounds

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds the stage."""
        return min(stage, len(self.partition.weights) - 1 - stage) if self.is_v_schedule else stage

    def rank_weights(self) -> list[float]:
        """Weight per pipeline rank."""
        weights = self.partition.weights
        return (
            [a + b for a, b in zip(weights, weights[::-1], strict=True)][: len(weights) // 2]
            if self.is_v_schedule
            else weights
        )

    def layer_range(self, stage: int) -> str:
        """The indices of the stage's layers, as 3-8."""
        first, last = self.bounds[stage], self.bounds[stage + 1] - 1
        return f"{first}-{last}" if last > first else str(first) if last == first else "-"

    def stage_parameters(self, stage: int) -> int:
        """Parameters that one rank of the stage holds; embedding and head on one stage are one matrix."""
        first, last = self.bounds[stage], self.bounds[stage + 1]
        held = sum(self.parameters[first:last])
        _, head = embedding_and_head(self.names)
        has_embedding_too = self.rank_of(stage) == 0
        return held - (self.parameters[head] if first <= head < last and has_embedding_too else 0)


def plan_stages(config: Config, vocab_size: int, seconds: dict[str, float] | None = None) -> StagePlan:
    """Lists the layers and cuts them by `--partition-method`; ConfigError where that cannot be done.

    seconds: measured per kind of layer (see `layer_kinds`), for the method 'profile'.
    """
    parallel = config.parallel
    tp_group = TPGroup(size=parallel.tensor_model_parallel_size)
    context = LayerContext(config, tp_group, DropoutRNG(config.training.seed))
    layers = pipeline_layers(context, vocab_size, eod=0)
    names, parameters = layer_names(layers), layer_parameter_counts(layers)
    is_v_schedule = parallel.pipeline_schedule == "dualpipev"
    partition = partition_layers(
        parse_partition_method(parallel.partition_method),
        layer_table(config, vocab_size, names, parameters, seconds),
        parallel.pipeline_model_parallel_size,
        in_flight_micro_batches(config),
        is_v_schedule,
    )
    whole = layer_parameter_counts(layers, whole=True)
    _, head = embedding_and_head(names)
    total = sum(whole) - whole[head]
    return StagePlan(parallel.partition_method, names, parameters, partition, is_v_schedule, total)


def layer_table(
    config: Config,
    vocab_size: int,
    names: list[str],
    parameters: list[int],
    seconds: dict[str, float] | None,
) -> LayerTable:
    """What each layer costs one rank, by the models of `planner.flops` and `planner.memory`."""
    padded = padded_vocab_size(vocab_size, config.model, config.parallel.tensor_model_parallel_size)
    first, head = embedding_and_head(names)
    work: dict[str, float] = {TRANSFORMER_LAYER: flops.transformer_layer_flops(config)}
    kept: dict[str, float] = {
        TRANSFORMER_LAYER: memory.transformer_layer_activation_bytes(config),
        norm_class(config).__name__: memory.norm_activation_bytes(config),
    }
    layer_flops = [work.get(name, 0.0) for name in names]
    activation_bytes = [kept.get(name, 0.0) for name in names]
    layer_flops[head] = flops.head_flops(config, padded)
    activation_bytes[first] = memory.embedding_activation_bytes(config)
    activation_bytes[head] = memory.head_activation_bytes(config, padded)
    per_parameter = dict.fromkeys(names, memory.state_bytes_per_parameter(config))
    # Its matrices; what stays in 32 bits with 8-bit Adam, norms and biases, is a thousandth of it.
    moment_bytes = memory.EIGHT_BIT if config.optimizer.use_bnb_optimizer else memory.FP32
    per_parameter[TRANSFORMER_LAYER] = memory.state_bytes_per_parameter(
        config, moment_bytes, in_transformer_layer=True
    )
    held = list(parameters)
    if config.parallel.num_stages == 1 or config.parallel.pipeline_schedule == "dualpipev":
        held[head] = 0  # the same rank has the embedding, which is the same matrix
    state_bytes = [count * per_parameter[name] for name, count in zip(names, held, strict=True)]
    return LayerTable(names, held, layer_flops, state_bytes, activation_bytes, _per_layer(names, seconds))


def _per_layer(names: list[str], seconds: dict[str, float] | None) -> list[float] | None:
    if seconds is None:
        return None
    missing = set(layer_kinds(names)) - seconds.keys()
    if missing:
        raise ConfigError(
            f"--partition-profile has no time of {', '.join(sorted(missing))}: delete the file, and the next "
            "run writes it anew"
        )
    times, of_functions = [], 0.0
    for kind in layer_kinds(names):
        # A function is no layer to share out: its time counts with the layer after it.
        if kind[0].isupper():
            times.append(seconds[kind] + of_functions)
            of_functions = 0.0
        else:
            times.append(0.0)
            of_functions += seconds[kind]
    times[-1] += of_functions
    return times


def layer_kinds(names: list[str]) -> list[str]:
    """Per layer what it is alike with: its name, with the embedding and the head apart."""
    first = names.index(EMBEDDING)
    return [
        f"{name}@{'first' if index == first else 'last'}" if name == EMBEDDING else name
        for index, name in enumerate(names)
    ]


def in_flight_micro_batches(config: Config) -> list[int]:
    """Per stage, how many micro-batches are between their forward and backward pass at most: as many as there
    are stages from it to the end, under 1F1B and under DualPipeV (`pipeline.schedule` shows both)."""
    micro_batches, stages = micro_batches_per_step(config), config.parallel.num_stages
    return [min(micro_batches, stages - stage) for stage in range(stages)]


def micro_batches_per_step(config: Config) -> int:
    """Of one replica, at the full batch size."""
    batch = config.batch
    return batch.global_batch_size // (batch.micro_batch_size * config.parallel.data_parallel_size)
