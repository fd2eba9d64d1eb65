"""Memory of single layers, from recorded passes and optimizer steps: for the search, and for
--partition-method memory."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import Config
from megatron.config.sections.parallel import ParallelConfig
from megatron.model.pipeline_module import layer_names, layer_parameter_counts
from megatron.pipeline.methods import TRANSFORMER_LAYER, MemoryCosts
from megatron.pipeline.stages import held_parameters, layer_list, plan_stages
from megatron.planner.in_flight import in_flight_by_stage
from megatron.planner.simulation.stage_costs import rank_update, whole_model_costs


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter without ZeRO: of weights, gradients and optimizer state."""

    layers: tuple[float, float, float]
    """Of transformer layers."""
    others: tuple[float, float, float]
    """Of embedding, norm and head."""

    def of_layers(self, parallel: ParallelConfig) -> float:
        """Of a transformer layer. ZeRO-1 shards the optimizer state, ZeRO-2 the gradients too, ZeRO-3 the
        weights too."""
        stages = zip(self.layers, (3, 2, 1), strict=True)
        return sum(
            size / (parallel.data_parallel_size if parallel.zero_stage >= stage else 1)
            for size, stage in stages
        )

    def of_others(self, parallel: ParallelConfig) -> float:
        """Of embedding, norm and head: every ZeRO stage shards their optimizer state only."""
        weights, gradients, optimizer = self.others
        return weights + gradients + optimizer / parallel.optimizer_partitions


def bytes_per_parameter(config: Config, vocab_size: int) -> StateBytes:
    """From the state of one process with a model of one layer, and of two."""
    sizes, counts = [], []
    for num_layers in (1, 2):
        alone = config.with_settings(
            {
                "model.num_layers": num_layers,
                "parallel.tensor_model_parallel_size": 1,
                "parallel.pipeline_model_parallel_size": 1,
                "parallel.pipeline_schedule": "1f1b",
                "parallel.virtual_pipeline_stages": 1,
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
    of_layer = tuple(two - one for one, two in zip(*sizes, strict=True))
    in_layer, outside = counts[1] - counts[0], 2 * counts[0] - counts[1]
    weights, gradients, optimizer = (size / in_layer for size in of_layer)
    others = [(one - layer) / outside for one, layer in zip(sizes[0], of_layer, strict=True)]
    return StateBytes((weights, gradients, optimizer), (others[0], others[1], others[2]))


def memory_costs(config: Config, vocab_size: int) -> MemoryCosts:
    """The memory of each layer on one rank, and the micro-batches in flight of each stage."""
    layers = layer_list(config, vocab_size)
    names = layer_names(layers)
    held = held_parameters(config, names, layer_parameter_counts(layers))
    state = bytes_per_parameter(config, vocab_size)
    of_layers, of_others = state.of_layers(config.parallel), state.of_others(config.parallel)
    costs = whole_model_costs(config, names, vocab_size)
    kept = [0.0] * len(names)
    for layer in costs.layers:
        share = layer.forward.change / (layer.end - layer.first)
        kept[layer.first : layer.end] = [share] * (layer.end - layer.first)
    of_one = kept[names.index(TRANSFORMER_LAYER) + 1]
    deferred = -costs.weight.change / names.count(TRANSFORMER_LAYER)
    return MemoryCosts(
        [
            count * (of_layers if name == TRANSFORMER_LAYER else of_others)
            for name, count in zip(names, held, strict=True)
        ],
        kept,
        _mean_in_flight(config, deferred / of_one if of_one else 1.0),
    )


def _mean_in_flight(config: Config, deferred: float) -> list[float]:
    """For each stage, the micro-batches in flight: the mean over the times when the stage's rank has most of
    them. With several stages per rank they do not reach their largest numbers together. deferred: bytes that
    a micro-batch keeps for its weight pass, relative to those for its backward pass."""
    sizes = [[n.waiting + deferred * n.deferred for n in numbers] for numbers in in_flight_by_stage(config)]
    if config.parallel.schedule.splits_backward:
        return [max(of_stage) for of_stage in sizes]
    return [sum(of_stage) / len(of_stage) for of_stage in sizes]
