"""Memory of single layers, from recordings. The search and --partition-method memory use it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import Config
from megatron.config.sections.parallel import ParallelConfig
from megatron.model.pipeline_module import layer_names, layer_parameter_counts
from megatron.pipeline.methods import TRANSFORMER_LAYER, MemoryCosts
from megatron.pipeline.stages import held_parameters, layer_list, plan_stages
from megatron.planner.in_flight import in_flight_by_stage
from megatron.planner.simulation.stage_costs import ONE_STAGE, rank_update, whole_model_costs


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter without ZeRO: (weights, gradients, optimizer state)."""

    layers: tuple[float, float, float]
    """Bytes per parameter of transformer layers."""
    others: tuple[float, float, float]
    """Bytes per parameter of embedding, norm and head."""

    def in_layers(self, parallel: ParallelConfig) -> float:
        """Returns the bytes per parameter of a transformer layer with ZeRO. ZeRO-1 shards optimizer states,
        ZeRO-2 adds gradients, ZeRO-3 adds weights."""
        stages = zip(self.layers, (3, 2, 1), strict=True)
        return sum(
            size / (parallel.dp_cp_size if parallel.zero_stage >= stage else 1) for size, stage in stages
        )

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
                **ONE_STAGE,
                "parallel.partition_method": "type:transformer",
                "parallel.sequence_parallel": False,
                "parallel.tp_comm_overlap": False,
                "parallel.zero_stage": 0,
                "parallel.world_size": 1,
            }
        )
        plan = plan_stages(alone, vocab_size)
        update = rank_update(alone, plan, vocab_size, 0)
        sizes.append((update.parameters, update.gradients, update.optimizer))
        counts.append(plan.stage_parameters(0))
    layer_sizes = tuple(two - one for one, two in zip(*sizes, strict=True))
    in_layer, outside = counts[1] - counts[0], 2 * counts[0] - counts[1]
    weights, gradients, optimizer = (size / in_layer for size in layer_sizes)
    others = [(one - layer) / outside for one, layer in zip(sizes[0], layer_sizes, strict=True)]
    return StateBytes((weights, gradients, optimizer), (others[0], others[1], others[2]))


def memory_costs(config: Config, vocab_size: int) -> MemoryCosts:
    """Returns the memory of each layer on one rank, and the micro-batches in flight of each stage."""
    layers = layer_list(config, vocab_size)
    names = layer_names(layers)
    held = held_parameters(config, names, layer_parameter_counts(layers))
    state = bytes_per_parameter(config, vocab_size)
    in_layers, in_others = state.in_layers(config.parallel), state.in_others(config.parallel)
    costs = whole_model_costs(config, names, vocab_size)
    kept = [0.0] * len(names)
    for layer in costs.layers:
        share = layer.forward.change / (layer.end - layer.first)
        kept[layer.first : layer.end] = [share] * (layer.end - layer.first)
    kept_by_one = kept[names.index(TRANSFORMER_LAYER) + 1]
    deferred = -costs.weight.change / names.count(TRANSFORMER_LAYER)
    return MemoryCosts(
        [
            count * (in_layers if name == TRANSFORMER_LAYER else in_others)
            for name, count in zip(names, held, strict=True)
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
