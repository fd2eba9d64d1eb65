"""The planned memory of each pipeline rank: the largest sum of `layer_memory` and `temporaries` in a step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config import Config
from megatron.config.vocab import padded_vocab_size
from megatron.pipeline.methods import TRANSFORMER_LAYER, embedding_and_head
from megatron.planner.memory import layer_memory, temporaries
from megatron.planner.stages import StagePlan, in_flight_on_rank, layer_table


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one pipeline rank when most is allocated, as PyTorch's allocator counts them."""

    state: float
    """Weights, gradients, master weights, moments."""
    activations: float
    """Of all micro-batches in flight, and messages."""
    head: float
    """LM head and loss: their largest part, or what exists of them while a layer has more."""
    temporaries: float
    """Of the layer that is running, and with ZeRO-2 and 3 of the layers before and after it."""
    tables: float
    """Attention bias, rotary angles, receive buffer."""
    host: float
    """In host memory: with --cpu-offload master weights, moments and gradients; with --checkpoint-in-cpu the
    inputs of layers."""

    @property
    def total(self) -> float:
        """On the device."""
        return self.state + self.activations + self.head + self.temporaries + self.tables


def plan_memory(config: Config, vocab_size: int, plan: StagePlan) -> list[StageMemory]:
    """By pipeline rank. The device also needs `fit.reserve_bytes`."""
    return [
        _plan_rank(config, vocab_size, plan, rank)
        for rank in range(config.parallel.pipeline_model_parallel_size)
    ]


def planned_bytes(config: Config, vocab_size: int, plan: StagePlan) -> list[float]:
    """Planned bytes per device, by pipeline rank."""
    return [part.total for part in plan_memory(config, vocab_size, plan)]


def _plan_rank(config: Config, vocab_size: int, plan: StagePlan, rank: int) -> StageMemory:
    stages = [stage for stage in range(len(plan.bounds) - 1) if plan.rank_of(stage) == rank]
    layers = [layer for stage in stages for layer in range(plan.bounds[stage], plan.bounds[stage + 1])]
    padded = padded_vocab_size(vocab_size, config.model, config.parallel.tensor_model_parallel_size)
    table = layer_table(config, vocab_size, plan.names, plan.parameters, None)
    transformer = [layer for layer in layers if plan.names[layer] == TRANSFORMER_LAYER]
    of_layer = plan.parameters[transformer[0]] if transformer else 0
    has_head = embedding_and_head(plan.names)[1] in layers
    state = sum(table.state_bytes[layer] for layer in layers)
    is_v_schedule = config.parallel.schedule.is_v_schedule
    in_flight = in_flight_on_rank(config, rank)
    kept_by_stage = {s: _kept_bytes(config, plan, table.activation_bytes, s) for s in stages}
    deferred_by_stage = {s: _deferred_bytes(config, plan, s) for s in stages}
    kept = max(
        sum(kept_by_stage[s] * n.waiting + deferred_by_stage[s] * n.deferred for s, n in moment.items())
        for moment in in_flight
    )
    head = after_head = 0.0
    if has_head:
        head = temporaries.head_loss_bytes(config, padded)
        after_head = temporaries.head_gradient_bytes(config)
        if is_v_schedule:  # other stages run between the head's forward and its backward pass
            after_head = layer_memory.head_activation_bytes(config, padded) + layer_memory.layer_input_bytes(
                config
            )
        if is_v_schedule or not config.parallel.runs_order_of_work:
            receives = config.parallel.num_stages > 1 and not is_v_schedule
            kept += temporaries.stale_buffer_bytes(config, padded, receives=receives)
    elif not is_v_schedule and config.parallel.runs_order_of_work:
        kept += layer_memory.sent_activation_bytes(config)  # the gradient of the output, which was received
    running = temporaries.layer_peak_bytes(config, of_layer) if transformer else 0.0
    if config.parallel.schedule.splits_backward and transformer:
        running = max(running, temporaries.weight_pass_bytes(config))
        running += temporaries.deferred_in_pass_bytes(config, len(transformer))
    has_buffer = plan.num_ranks > 1 and not config.parallel.runs_order_of_work
    tables = temporaries.table_bytes(config, has_buffer=has_buffer)
    host = _host_bytes(config, sum(plan.stage_parameters(stage) for stage in stages))
    of_parts = (after_head, running) if after_head + running > head else (head, 0.0)
    at_head, in_layer = of_parts
    in_layer += temporaries.reducing_gradient_bytes(config, of_layer)
    return StageMemory(state, kept, at_head, in_layer, tables, host)


def _kept_bytes(config: Config, plan: StagePlan, activation_bytes: list[float], stage: int) -> float:
    """What a micro-batch in flight keeps on a stage: activations of its layers, its received input, its sent
    output, tokens or labels."""
    first, last = plan.bounds[stage], plan.bounds[stage + 1]
    embedding, head = embedding_and_head(plan.names)
    kept = sum(activation_bytes[layer] for layer in range(first, last) if layer != head)
    tokens = config.batch.micro_batch_size * config.model.seq_length
    if stage > 0:
        is_partitioned = layer_memory.sent_activation_bytes(config) < layer_memory.layer_input_bytes(config)
        starts_with_layer = TRANSFORMER_LAYER in plan.names[first:last] and embedding < first
        # DeepSpeed clones what it has received; a partitioned message is replaced by the gathered input.
        copies = (0 if is_partitioned else 1) + (0 if starts_with_layer else 1)
        kept += copies * layer_memory.layer_input_bytes(config)
    if stage < len(plan.bounds) - 2:
        kept += layer_memory.sent_activation_bytes(config)
    if stage == len(plan.bounds) - 2:
        kept += tokens * (8 + 4)
    return kept


def _deferred_bytes(config: Config, plan: StagePlan, stage: int) -> float:
    """What a micro-batch keeps on a stage between its backward and its weight pass."""
    layers = plan.names[plan.bounds[stage] : plan.bounds[stage + 1]].count(TRANSFORMER_LAYER)
    return layers * layer_memory.deferred_layer_bytes(config)


def _host_bytes(config: Config, parameters: int) -> float:
    """With --cpu-offload: master weights, moments and gradients, fp32, and the weights in 16 bits that are
    sent to the device (`optimizer.flat_group`)."""
    if not config.parallel.cpu_offload:
        return 0.0
    moments = 1 if config.optimizer.optimizer == "sgd" else 2
    size = layer_memory.parameter_bytes(config)
    per_parameter = layer_memory.FP32 * (2 + moments) + (size if size != layer_memory.FP32 else 0)
    return parameters * per_parameter / config.parallel.optimizer_partitions
