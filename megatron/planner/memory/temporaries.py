"""Memory that exists for a part of an instruction only, in bytes, at the moments at which a step may peak.

The activations that are kept between a forward and its backward pass are in `layer_memory`. Each function
names the code that it describes; `tests/simulated` compares the sums with the simulated step.
"""

from __future__ import annotations

from megatron.config import Config
from megatron.model.attention_choice import Implementation
from megatron.mpu.logit_chunks import chunk_sizes
from megatron.planner.implementations import (
    adds_head_gradient,
    adds_row_gradients,
    attention_of,
    counts_kernels,
)
from megatron.planner.memory import layer_memory
from megatron.planner.memory.layer_memory import FP32
from megatron.planner.stages import micro_batches_per_step
from megatron.planner.timing.communication import overlap_chunks

# `mpu.random._element_bits`: a 32-bit hash of each element, and one shifted copy of it.
_HASH_BYTES = 8


def layer_peak_bytes(config: Config, layer_parameters: float) -> float:
    """The largest sum during the forward or the backward pass of a transformer layer, beyond the activations
    of the micro-batches in flight (`layer_memory.transformer_layer_activation_bytes`).

    layer_parameters: on one rank.
    """
    training = config.training
    saved = layer_memory.saved_within_layer_bytes(config)
    gradients, weights = _sharded_unit_bytes(config, layer_parameters)
    prefetched = _prefetched_weight_bytes(config, weights)
    size = layer_memory.parameter_bytes(config)
    # The first matrix of the backward pass has its gradient before the layer's full gradients are allocated.
    second = max(_mlp_matrix_elements(config), layer_memory.mlp_values(config)) * size + gradients
    if config.parallel.schedule.splits_backward:
        second = 0.0  # no gradient of a matrix
    later = max(_mlp_backward_bytes(config), second, _hidden_dropout_bytes(config))
    attention = _attention_forward_bytes(config)
    if training.recomputes_layers:
        # The backward pass recomputes a group of layers: all that they save exists at once.
        others = (training.checkpoint_num_layers - 1) * (saved + layer_memory.layer_input_bytes(config))
        return weights + prefetched + others + _recomputed_input_bytes(config) + max(saved + later, attention)
    # The attention of the last layer runs before the rest of what it saves, and its output, exist.
    return weights + max(prefetched + later, attention - saved - layer_memory.layer_input_bytes(config))


def _mlp_backward_bytes(config: Config) -> float:
    """`model.gpt_model.ParallelMLP`, backward: first the gradients of the second matrix and of its input;
    with dropout also that of its output (without, it is the gradient that the layer received); with
    --sequence-parallel this is all-gathered first."""
    model, size = config.model, layer_memory.parameter_bytes(config)
    tensor = config.parallel.tensor_model_parallel_size
    output = layer_memory.residual_values(config) if model.hidden_dropout > 0 else 0
    if config.parallel.sequence_parallel and tensor > 1:
        output += layer_memory.hidden_values(config)
    values = layer_memory.mlp_values(config)
    if config.parallel.schedule.splits_backward:
        # Those of the activation function's input and output are the largest, not that of the matrix.
        return ((3 if model.glu_activation else 2) * values + output) * size
    if overlap_chunks(config) > 1:  # `mpu.tp_overlap.in_chunks`: a copy of the second matrix's input
        tokens = config.batch.micro_batch_size * model.seq_length
        output += tokens * model.ffn_hidden_size // tensor
    return (values + _matrix_gradient_elements(config) + output) * size


def weight_pass_bytes(config: Config) -> float:
    """A weight pass, beyond what the backward pass before it began with: the gradient of the second matrix of
    the MLP, the gradient of the stage's input, which is being sent, and what a layer has kept more."""
    kept = layer_memory.deferred_layer_bytes(config) - layer_memory.transformer_layer_activation_bytes(config)
    gradient = _matrix_gradient_elements(config) * layer_memory.parameter_bytes(config)
    return gradient + layer_memory.sent_activation_bytes(config) + max(kept, 0.0)


def deferred_in_pass_bytes(config: Config, num_layers: int) -> float:
    """What a backward pass through a stage with `num_layers` transformer layers has kept for the weight pass
    when it arrives at the first one, beyond what it has freed. (Recomputation frees the layers' inputs at the
    end.)"""
    freed = layer_memory.transformer_layer_activation_bytes(config)
    kept = layer_memory.deferred_layer_bytes(config) - (0.0 if config.training.recomputes_layers else freed)
    return max(num_layers - 1, 0) * max(kept, 0.0)


def _matrix_gradient_elements(config: Config) -> float:
    """Of the gradient of the MLP's second matrix, unless the product adds it to the fp32 sum."""
    return 0.0 if adds_row_gradients(config) else _mlp_matrix_elements(config)


def _mlp_matrix_elements(config: Config) -> float:
    """One of the MLP's matrices on this rank."""
    return (
        config.model.hidden_size * config.model.ffn_hidden_size / config.parallel.tensor_model_parallel_size
    )


def _hidden_dropout_bytes(config: Config) -> float:
    """`mpu.random.keep_mask` of the MLP's output: this output, and hashes. The layer's output, which is
    counted as kept, does not exist yet."""
    if not layer_memory.keeps_dropout_masks(config):
        return 0.0
    values = layer_memory.residual_values(config)
    return values * (layer_memory.parameter_bytes(config) + _HASH_BYTES) - layer_memory.layer_input_bytes(
        config
    )


def _attention_forward_bytes(config: Config) -> float:
    """`model.core_attention._attend_with_dropout` when the dropout mask is computed: the norm's output,
    queries, keys and values; of each score softmax, mask, score, softmax in 16 bits, and hashes; the causal
    mask or the bias of the documents. 0 without dropout: the fused kernel has no temporaries."""
    model, size = config.model, layer_memory.parameter_bytes(config)
    if attention_of(config) != Implementation.UNFUSED:
        return 0.0
    per_score = FP32 + 1 + size + (size if size != FP32 else 0) + _HASH_BYTES
    heads = model.num_attention_heads / config.parallel.tensor_model_parallel_size
    rows = config.batch.micro_batch_size * model.seq_length
    copies = 5 if layer_memory.position_scheme(config).rotary else 3
    projected = copies * rows * heads * model.kv_channels
    mask = model.seq_length**2 * (
        config.batch.micro_batch_size * size if config.data.reset_attention_mask else 1
    )
    return (
        (layer_memory.residual_values(config) + projected) * size
        + layer_memory.scores(config) * per_score
        + mask
    )


def _recomputed_input_bytes(config: Config) -> float:
    """DeepSpeed's recomputation gathers a sharded input, or copies it back from the host."""
    training = config.training
    if not (training.checkpoint_in_cpu or training.partition_activations):
        return 0.0
    return layer_memory.layer_input_bytes(config)


def _sharded_unit_bytes(config: Config, layer_parameters: float) -> tuple[float, float]:
    """`optimizer.sharded_units`: full gradients of the layer in its backward pass (ZeRO-2), full weights in
    both passes (ZeRO-3)."""
    parallel = config.parallel
    if parallel.data_parallel_size == 1:
        return 0.0, 0.0
    return (
        layer_parameters * (FP32 if parallel.zero_stage >= 2 else 0),
        layer_parameters * (layer_memory.parameter_bytes(config) if parallel.zero_stage == 3 else 0),
    )


def _prefetched_weight_bytes(config: Config, weights: float) -> float:
    """`optimizer.sharded_units.UnitOverlap`, ZeRO-3: the weights of the next layer. None are prefetched
    when all weights of a recomputed group of several layers are gathered."""
    recomputes_groups = config.training.recomputes_layers and config.training.checkpoint_num_layers > 1
    has_next = config.model.num_layers > 1 and not recomputes_groups
    return weights if has_next and not config.parallel.no_overlap_param_gather else 0.0


def reducing_gradient_bytes(config: Config, layer_parameters: float) -> float:
    """`optimizer.sharded_units.UnitOverlap`, ZeRO-2 and ZeRO-3: the full gradients of the layer before,
    during the whole of every micro-batch but the first."""
    overlaps = config.model.num_layers > 1 and not config.parallel.no_overlap_grad_reduce
    if not overlaps or micro_batches_per_step(config) == 1:
        return 0.0
    gradients, _ = _sharded_unit_bytes(config, layer_parameters)
    return gradients


def head_loss_bytes(config: Config, padded_vocab: int) -> float:
    """The head and the loss at the end of the forward pass, with --loss-implementation fused
    (`mpu.logit_chunks.LogitChunks`): the head's input and its gradient, the fp32 gradient of the weight;
    of one chunk of tokens the logits, the scaled input, and without kernels their softmax in fp32 and a part
    of the weight's gradient.

    plain: 16-bit and fp32 logits, and the fp32 logits of the micro-batches before (`stale_buffer_bytes`).
    """
    model, size = config.model, layer_memory.parameter_bytes(config)
    rows = padded_vocab // config.parallel.tensor_model_parallel_size
    tokens = config.batch.micro_batch_size * model.seq_length
    hidden = layer_memory.hidden_values(config) * size
    if config.training.loss_implementation == "plain":
        return hidden + tokens * rows * (FP32 + (size if size != FP32 else 0))
    sizes = chunk_sizes(tokens, rows, model.hidden_size, size, on_cpu=False)
    chunk = sizes.tokens * rows * size
    scaled = sizes.tokens * model.hidden_size
    if size == FP32:
        return 2 * hidden + rows * model.hidden_size * FP32 + chunk + scaled * FP32
    chunk += 0 if counts_kernels(config) else sizes.softmax_rows * rows * FP32
    product = 0 if adds_head_gradient(config) else sizes.product_rows * model.hidden_size * size
    # The scaled input is computed in fp32, twice its size; the buffer of the product stays after one chunk.
    has_more = sizes.tokens < tokens
    chunk += max(scaled * size + product, scaled * 2 * FP32 + (product if has_more else 0))
    return 2 * hidden + rows * model.hidden_size * FP32 + chunk


def head_gradient_bytes(config: Config) -> float:
    """What the head leaves for the backward pass of the last transformer layer: the gradient of its input."""
    return layer_memory.hidden_values(config) * layer_memory.parameter_bytes(config)


def stale_buffer_bytes(config: Config, padded_vocab: int, *, receives: bool) -> float:
    """DeepSpeed's pipeline has at least two buffers. The last stage has one micro-batch in flight, so one
    buffer still holds the last micro-batch's output, and if the stage `receives`, input and its gradient."""
    rows = padded_vocab // config.parallel.tensor_model_parallel_size
    tokens = config.batch.micro_batch_size * config.model.seq_length
    output: float = layer_memory.hidden_values(config) * layer_memory.parameter_bytes(config)
    if config.training.loss_implementation == "plain":
        output = 2 * tokens * rows * FP32
    return output + (2 * layer_memory.layer_input_bytes(config) if receives else 0)


def table_bytes(config: Config, *, has_buffer: bool) -> float:
    """Tensors that live longer than a step: the attention bias (`model.position.AttentionMasks`), rotary
    angles, and the buffer into which a stage receives, if its rank has no others."""
    model, size = config.model, layer_memory.parameter_bytes(config)
    scheme = layer_memory.position_scheme(config)
    bias: float = 0
    if attention_of(config) in (Implementation.BIASED_SDPA, Implementation.UNFUSED):
        if scheme.slopes is not None:
            bias = model.num_attention_heads / config.parallel.tensor_model_parallel_size
        elif config.data.reset_attention_mask or model.attention_window:
            bias = 1
    rotary = 2 * model.seq_length * model.rotary_dim if scheme.rotary else 0
    buffer = layer_memory.sent_activation_bytes(config) if has_buffer else 0
    return (bias * model.seq_length**2 + rotary) * size + buffer
