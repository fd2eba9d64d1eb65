"""The planned memory of each pipeline rank, for comparison with what a run measures."""

from megatron.config import Config
from megatron.planner.stages import StagePlan, in_flight_micro_batches, layer_table


def planned_bytes(config: Config, vocab_size: int, plan: StagePlan) -> list[float]:
    """Planned bytes per device, by pipeline rank: weights, gradients, optimizer state, and the activations of
    the micro-batches in flight (`megatron.planner.memory`). Without the temporary tensors of single
    operations."""
    table = layer_table(config, vocab_size, plan.names, plan.parameters, None)
    found = [0.0] * config.parallel.pipeline_model_parallel_size
    for stage, micro_batches in enumerate(in_flight_micro_batches(config)):
        layers = slice(plan.bounds[stage], plan.bounds[stage + 1])
        activations = micro_batches * sum(table.activation_bytes[layers])
        found[plan.rank_of(stage)] += sum(table.state_bytes[layers]) + activations
    return found
