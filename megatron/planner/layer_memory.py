"""Memory of single layers, from recordings. The search and --partition-method memory use it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import Config
from megatron.config.sections.parallel import ParallelConfig
from megatron.data.vocabulary import Vocabulary
from megatron.model.layer_kinds import transformer_layers
from megatron.model.pipeline_module import describe, layer_parameter_counts
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.pipeline.methods import MemoryCosts
from megatron.pipeline.stages import held_parameters, layer_list
from megatron.planner.in_flight import in_flight_by_stage
from megatron.planner.simulation.stage_costs import ONE_STAGE, rank_update, whole_model_costs
from megatron.run import Run


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter without ZeRO: (weights, gradients, optimizer state)."""

    layers: tuple[float, float, float]
    """Bytes per parameter of transformer layers."""
    others: tuple[float, float, float]
    """Bytes per parameter of embedding, norm and head."""

    def in_layers(self, parallel: ParallelConfig, of_experts: bool = False) -> float:
        """Returns the bytes per parameter of a transformer layer with ZeRO. ZeRO-1 shards optimizer states,
        ZeRO-2 adds gradients, ZeRO-3 adds weights. of_experts: of parameters of experts."""
        replicas = parallel.expert_replicas if of_experts else parallel.dp_cp_size
        stages = zip(self.layers, (3, 2, 1), strict=True)
        return sum(size / (replicas if parallel.zero_stage >= stage else 1) for size, stage in stages)

    def in_others(self, parallel: ParallelConfig) -> float:
        """Returns the bytes per parameter of embedding, norm and head with ZeRO, which shards only their
        optimizer states, at every ZeRO stage."""
        weights, gradients, optimizer = self.others
        return weights + gradients + optimizer / parallel.optimizer_partitions


def bytes_per_parameter(config: Config, vocab_size: int) -> StateBytes:
    """Returns the bytes per parameter, computed from the state of a model with one layer and one with two."""
    sizes, counts = [], []
    for num_layers in (1, 2):
        alone = config.with_settings(
            {
                "model.num_layers": num_layers,
                "parallel.tensor_model_parallel_size": 1,
                "parallel.context_parallel_size": 1,
                "parallel.expert_model_parallel_size": 1,
                **ONE_STAGE,
                "parallel.partition_method": "type:transformer",
                "parallel.sequence_parallel": False,
                "parallel.tp_comm_overlap": False,
                "parallel.zero_stage": 0,
                "parallel.world_size": 1,
            }
        )
        run = planned_run(alone, vocab_size)
        update = rank_update(run, 0)
        sizes.append((update.parameters, update.gradients, update.optimizer))
        counts.append(run.stages.stage_parameters(0))
    layer_sizes = tuple(two - one for one, two in zip(*sizes, strict=True))
    in_layer, outside = counts[1] - counts[0], 2 * counts[0] - counts[1]
    weights, gradients, optimizer = (size / in_layer for size in layer_sizes)
    others = [(one - layer) / outside for one, layer in zip(sizes[0], layer_sizes, strict=True)]
    return StateBytes((weights, gradients, optimizer), (others[0], others[1], others[2]))


def is_of_expert(spec: ParameterSpec) -> bool:
    """Returns whether a parameter belongs to experts."""
    return "ep" in spec.axis_names


def planned_run(config: Config, vocab_size: int | None = None) -> Run:
    """Returns a run that is not started, with this vocabulary or the one of the flags. Raises ConfigError if
    its layers cannot be partitioned."""
    vocab = None if vocab_size is None else Vocabulary(vocab_size, None)
    return Run.from_config(config, vocab, memory_costs)


def memory_costs(config: Config, vocab_size: int) -> MemoryCosts:
    """Returns the memory of each layer on one rank, and the micro-batches in flight of each stage."""
    entries = layer_list(config, vocab_size)
    layers = list(map(describe, entries))
    held = held_parameters(config, layers, layer_parameter_counts(entries))
    of_experts = layer_parameter_counts(entries, counts_parameter=is_of_expert)
    state = bytes_per_parameter(config, vocab_size)
    in_layers, in_others = state.in_layers(config.parallel), state.in_others(config.parallel)
    in_experts = state.in_layers(config.parallel, of_experts=True)
    costs = whole_model_costs(config, layers, vocab_size)
    kept = [0.0] * len(layers)
    for layer in costs.layers:
        share = layer.forward.change / (layer.end - layer.first)
        kept[layer.first : layer.end] = [share] * (layer.end - layer.first)
    inner = transformer_layers(layers)
    kept_by_one = kept[inner.start + 1]
    deferred = -costs.weight.change / len(inner)
    return MemoryCosts(
        [
            (count - experts) * (in_layers if index in inner else in_others) + experts * in_experts
            for index, (count, experts) in enumerate(zip(held, of_experts, strict=True))
        ],
        kept,
        _mean_in_flight(config, deferred / kept_by_one if kept_by_one else 1.0),
    )


def _mean_in_flight(config: Config, deferred: float) -> list[float]:
    """Returns the micro-batches in flight of each stage, at the times when the stage's rank has most of them.

    The result is the mean over these times, since several stages of a rank do not reach their largest numbers
    together; for schedules with a split backward pass it is the maximum. deferred: bytes that a micro-batch
    keeps for its weight-gradient pass, relative to the bytes that it keeps for its backward pass.
    """
    by_stage = [
        [n.waiting + deferred * n.deferred for n in numbers] for numbers in in_flight_by_stage(config)
    ]
    if config.parallel.schedule.splits_backward:
        return [max(sizes) for sizes in by_stage]
    return [sum(sizes) / len(sizes) for sizes in by_stage]
