"""Floating-point operations of a training step, counted with Megatron-LM's formula (arXiv 2104.04473).

FLOPs per step = 24 f B s L h^2 (1 + s / (6 h) + V / (16 L h)), for B samples of s tokens, L layers of hidden
size h, and a padded vocabulary of V tokens. f is the number of passes over the matrices: 3 (1 forward, 2
backward), or 4 with recomputation of the forward pass. A gated MLP has a third matrix: 32 replaces 24.

The head is never recomputed, so its term counts 3 passes if f is 4. If f is 3, the term counts only three
quarters of the head. The formula is kept, because published throughputs were computed with it.
"""

from __future__ import annotations

from megatron.config import Config, ModelConfig
from megatron.config.registries import LAYER_ARRANGEMENTS
from megatron.kernels.attention import scores_within
from megatron.model.attention_choice import Implementation, run_uses_kernels, training_attention
from megatron.mpu.layout import CPGroup

_FORWARD_AND_BACKWARD = 3
_RECOMPUTED_FORWARD = 1


def iteration_flops(
    *,
    num_layers: int,
    hidden_size: int,
    seq_length: int,
    padded_vocab_size: int,
    batch_size: int,
    recompute: bool,
    recompute_attention: bool = False,
    gated_mlp: bool = False,
) -> float:
    """Returns the hardware FLOPs of one step over `batch_size` samples, summed over all devices.

    recompute: the forward pass of every layer is recomputed (--checkpoint-activations).
    recompute_attention: the attention scores are recomputed (--recompute-granularity selective).
    """
    passes = _FORWARD_AND_BACKWARD + (_RECOMPUTED_FORWARD if recompute else 0)
    coefficient = 32 if gated_mlp else 24
    matrices = coefficient * passes * batch_size * seq_length * num_layers * hidden_size**2
    attention = seq_length / (6 * hidden_size)
    head = padded_vocab_size / (16 * num_layers * hidden_size)
    scores = 2 * batch_size * seq_length**2 * num_layers * hidden_size if recompute_attention else 0
    return matrices * (1 + attention + head) + scores


def model_iteration_flops(
    model: ModelConfig,
    *,
    seq_length: int,
    padded_vocab_size: int,
    batch_size: int,
    recompute: bool,
    recompute_attention: bool,
) -> float:
    """Returns the hardware FLOPs of one step, summed over all devices.

    With an MLP of 4 h and plain multi-head attention this is `iteration_flops`. For other layers the matrix
    products are counted one by one, with 3 passes over the head.
    """
    hidden, gated = model.hidden_size, model.glu_activation is not None
    if (model.ffn_hidden_size, model.query_width, model.key_width) == (4 * hidden, hidden, hidden):
        return iteration_flops(
            num_layers=model.num_layers,
            hidden_size=hidden,
            seq_length=seq_length,
            padded_vocab_size=padded_vocab_size,
            batch_size=batch_size,
            recompute=recompute,
            recompute_attention=recompute_attention,
            gated_mlp=gated,
        )
    tokens = batch_size * seq_length
    passes = _FORWARD_AND_BACKWARD + (_RECOMPUTED_FORWARD if recompute else 0)
    layer = 2 * layer_matrix_elements(model) + 4 * seq_length * model.query_width
    scores = 2 * tokens * seq_length * model.num_layers * model.query_width if recompute_attention else 0
    head = 2 * _FORWARD_AND_BACKWARD * tokens * hidden * padded_vocab_size
    return passes * tokens * model.num_layers * layer + head + scores


def layer_matrix_elements(model: ModelConfig) -> int:
    """Returns the number of elements in the weight matrices of a transformer layer."""
    attention = 2 * model.query_width + 2 * model.key_width
    mlp = (3 if model.glu_activation else 2) * model.ffn_hidden_size
    return (attention + mlp) * model.hidden_size


def transformer_layer_flops(config: Config, has_window: bool = False) -> float:
    """Returns the FLOPs of a transformer layer on one rank for one micro-batch, recomputation included.
    has_window: whether the layer has the window of --window-size, outside of which the Triton kernels compute
    no scores.

    Like --simulate, it counts the matrix products that are launched. The backward pass of a fused attention
    kernel recomputes the scores: it has 5 products where the forward pass has 2. Unfused attention has 4, the
    Triton kernels have 7. PyTorch's recomputation stops after the last saved tensor, so often
    the last matrix product of a group of layers is not recomputed (`skips_last_product`).
    """
    model, training, batch = config.model, config.training, config.batch.micro_batch_size
    attention = training_attention(config, has_window)
    window = model.window_size if has_window and attention == Implementation.TRITON else None
    tokens = batch * config.seq_length_per_rank
    # With context parallelism the queries of a chunk have products only with the keys up to its end.
    chunks = CPGroup(size=config.parallel.context_parallel_size).chunks(model.seq_length)
    scores_of_head = sum(scores_within(window, len(queries), queries.stop) for queries in chunks)
    scores = 2 * batch * scores_of_head * model.query_width
    forward = 2 * tokens * layer_matrix_elements(model) + 2 * scores
    total: float = _FORWARD_AND_BACKWARD * forward
    if attention == Implementation.TRITON:
        total += 3 * scores
    elif attention != Implementation.UNFUSED or recomputes_scores(config):
        total += scores
    if training.recomputes_layers:
        total += _RECOMPUTED_FORWARD * forward
        if skips_last_product(config):
            last_product = 2 * tokens * model.ffn_hidden_size * model.hidden_size
            total -= last_product / training.checkpoint_num_layers
    return total / config.parallel.tensor_model_parallel_size


def skips_last_product(config: Config) -> bool:
    """Returns whether recomputation ends before the last matrix product of a group of layers, because nothing
    after it is saved for the backward pass. DeepSpeed's recomputation goes to the end. With --tp-comm-overlap
    the product and its reduction are one function."""
    training, tp_size = config.training, config.parallel.tensor_model_parallel_size
    if config.parallel.tp_comm_overlap and tp_size > 1:
        return False
    if training.checkpoint_in_cpu or (training.partition_activations and tp_size > 1):
        return False
    arrangement = LAYER_ARRANGEMENTS[config.model.layer_arrangement]
    # The dropout kernel saves nothing, the reference implementation its mask.
    no_mask = config.model.hidden_dropout == 0 or run_uses_kernels(config)
    return no_mask and not arrangement.ends_with_norm


def recomputes_scores(config: Config) -> bool:
    """Returns whether the attention scores are recomputed. Fused kernels never store them."""
    return config.training.recomputes_attention and training_attention(config) == Implementation.UNFUSED


def head_flops(config: Config, padded_vocab_size: int) -> float:
    """Returns the FLOPs of the LM head on one rank for one micro-batch, forward and backward."""
    tokens = config.batch.micro_batch_size * config.seq_length_per_rank
    forward = 2 * tokens * config.model.hidden_size * padded_vocab_size
    return _FORWARD_AND_BACKWARD * forward / config.parallel.tensor_model_parallel_size


def tflops_per_device(flops: float, seconds: float, world_size: int) -> float:
    """Returns the TFLOP/s per device if `world_size` devices together compute `flops` in `seconds`."""
    return flops / (seconds * world_size * 1e12)
