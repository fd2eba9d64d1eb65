"""The memory of single layers, from recordings. --partition-method memory uses it."""

from __future__ import annotations

from megatron.config import Config
from megatron.data.vocabulary import Vocabulary
from megatron.model.layer_kinds import Role, layer_kinds, settings_for_kinds, transformer_layers
from megatron.model.pipeline_module import describe, layer_parameter_counts
from megatron.pipeline.methods import MemoryCosts
from megatron.pipeline.stages import held_parameters, layer_list
from megatron.planner.in_flight import in_flight_by_stage
from megatron.planner.simulation.stage_costs import ONE_STAGE, rank_update, whole_model_costs
from megatron.run import Run


def bytes_per_parameter(config: Config, vocab_size: int) -> tuple[float, float, float]:
    """Returns the bytes of weight, gradient and optimizer state per parameter on this layout, as (in
    transformer layers, in their experts, elsewhere).

    The function computes them from the difference between models with two layers and with one layer, without
    ZeRO. These layers have the kind of the middle layer, because the first and the last layers may have no
    FP8 copies. ZeRO-1 shards optimizer states, ZeRO-2 also gradients, and ZeRO-3 also weights; gradients and
    weights are sharded only in transformer layers.
    """
    parallel = config.parallel
    sizes, counts = [], []
    kinds = layer_kinds(config.model)
    middle = kinds[len(kinds) // 2]
    for num_layers in (1, 2):
        alone = config.with_settings(
            {
                **settings_for_kinds([middle] * num_layers),
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
    layer_sizes = [two - one for one, two in zip(*sizes, strict=True)]
    by_stage = list(zip(layer_sizes, (3, 2, 1), strict=True))
    in_layer, outside = counts[1] - counts[0], 2 * counts[0] - counts[1]
    in_layers, in_experts = (
        sum(size / (replicas if parallel.zero_stage >= stage else 1) / in_layer for size, stage in by_stage)
        for replicas in (parallel.dp_cp_size, parallel.expert_replicas)
    )
    weights, gradients, optimizer = (
        (one - layer) / outside for one, layer in zip(sizes[0], layer_sizes, strict=True)
    )
    return in_layers, in_experts, weights + gradients + optimizer / parallel.optimizer_partitions


def planned_run(config: Config, vocab_size: int | None = None) -> Run:
    """Returns a run that is not started. vocab_size: the size of its vocabulary; None to take it from the
    flags. Raises ConfigError if its layers cannot be partitioned."""
    vocab = None if vocab_size is None else Vocabulary(vocab_size, None)
    return Run.from_config(config, vocab, memory_costs)


def memory_costs(config: Config, vocab_size: int) -> MemoryCosts:
    """Returns the memory of each layer on one rank, and the micro-batches in flight of each stage."""
    entries = layer_list(config, vocab_size)
    layers = list(map(describe, entries))
    held = held_parameters(config, layers, layer_parameter_counts(entries))
    of_experts = layer_parameter_counts(entries, counts_parameter=lambda spec: "ep" in spec.axis_names)
    in_layers, in_experts, in_others = bytes_per_parameter(config, vocab_size)
    costs = whole_model_costs(config, layers, vocab_size)
    kept = [0.0] * len(layers)
    for layer in costs.layers:
        share = layer.forward.change / (layer.end - layer.first)
        kept[layer.first : layer.end] = [share] * (layer.end - layer.first)
    inner = transformer_layers(layers)
    sharded = {*inner, *(i for i, layer in enumerate(layers) if layer.role is Role.MULTI_TOKEN)}
    kept_by_one = kept[inner.start + 1]
    deferred = -costs.weight.change / len(inner)
    return MemoryCosts(
        [
            (count - experts) * (in_layers if index in sharded else in_others) + experts * in_experts
            for index, (count, experts) in enumerate(zip(held, of_experts, strict=True))
        ],
        kept,
        _mean_in_flight(config, deferred / kept_by_one if kept_by_one else 1.0),
    )


def _mean_in_flight(config: Config, deferred: float) -> list[float]:
    """Returns for each stage the number of micro-batches in flight when the stage's rank has the most of
    them.

    The rank may have several such times, because its stages do not reach their largest numbers together. The
    result is the mean over these times; for schedules with a split backward pass it is the maximum. deferred:
    bytes that a micro-batch keeps for its weight-gradient pass, relative to the bytes that it keeps for its
    backward pass.
    """
    by_stage = [
        [n.waiting + deferred * n.deferred for n in numbers] for numbers in in_flight_by_stage(config)
    ]
    if config.parallel.schedule.splits_backward:
        return [max(sizes) for sizes in by_stage]
    return [sum(sizes) / len(sizes) for sizes in by_stage]
