"""Floating-point operations of a training step, counted as in Megatron-LM (arXiv 2104.04473).

Only matrix products count, 2 FLOPs per multiply-add, and their backward pass counts twice:

    FLOPs = 6 tokens (L (matrices + keys x widths) + hidden x padded vocabulary) + recomputation

`matrices` is the number of elements of a layer's weight matrices that a token is multiplied by. Gated MLPs,
grouped queries, any MLP width, latent attention and experts therefore need no factors of their own. `widths`
is the size of all query heads plus the size of the attention's output. `keys` is the number of keys with
which each query is multiplied: all tokens of the sequence (although the causal mask forbids half of them), or
--window-size. The products that the masks between documents (--reset-attention-mask) save are not subtracted.
The LM head is never recomputed. Each layer of --mtp-num-layers adds a transformer layer of the last layer's
kind, a matrix of 2 x hidden x hidden elements, and the head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron.config import Config, ModelConfig
from megatron.config.model import padded_vocab_size
from megatron.config.registries import LAYER_ARRANGEMENTS
from megatron.kernels.attention import scores_within
from megatron.model.attention.choice import Implementation, run_uses_kernels, training_attention
from megatron.model.layer_kinds import LayerDescription, LayerKind, Role, layer_kinds
from megatron.mpu.context_parallel import sequence_chunks
from megatron.mpu.mesh import Axis

_FORWARD_AND_BACKWARD = 3


def iteration_flops(
    config: Config,
    vocab_size: int,
    *,
    batch_size: int | None = None,
    seq_length: int | None = None,
    with_recomputation: bool = True,
    on_cpu: bool = False,
) -> float:
    """Returns the FLOPs of one step, summed over all devices.

    batch_size, seq_length: samples and tokens per sample of the step; by default --global-batch-size and
    --seq-length. with_recomputation: also counts the forward pass of recomputed layers, or the one product of
    recomputed scores (--recompute-modules core_attn). on_cpu: whether the run is on CPUs.
    """
    model = config.model
    seq_length = seq_length or model.seq_length
    tokens = (batch_size or config.batch.global_batch_size) * seq_length
    padded = padded_vocab_size(vocab_size, model, config.parallel.tensor_model_parallel_size)
    kinds, predicted = _kinds_in_training(model), model.mtp_num_layers or 0
    layers = 2 * tokens * sum(kind.active_elements for kind in kinds)
    layers += 4 * tokens * predicted * model.hidden_size**2
    layers += 2 * tokens * _scores(model, kinds, seq_length)
    head = 2 * tokens * model.hidden_size * padded * (1 + predicted)
    recomputed = 0
    if with_recomputation and config.training.recomputes_layers:
        recomputed = layers
    elif with_recomputation:
        recomputed = sum(
            2 * tokens * number * kind.keys(seq_length) * kind.of(model).query_width
            for kind, number in Counter(kinds).items()
            if recomputes_scores(config, kind.window, on_cpu)
        )
    return _FORWARD_AND_BACKWARD * (layers + head) + recomputed


def palm_flops(config: Config, vocab_size: int, num_parameters: int, batch_size: int | None = None) -> float:
    """Returns the FLOPs of one step, summed over all devices, by the formula of PaLM's model FLOPs
    utilization (arXiv 2204.02311, appendix B): 6 N + 12 L H Q T per token.

    N: the part of `num_parameters` (of the whole model) that a token uses, without tables that are only
    looked up (positions, an untied word embedding). L, H, Q: layers, heads, head size. T: tokens of a
    sequence, or of the attention window if it is shorter. batch_size: see `iteration_flops`.
    """
    model = config.model
    padded = padded_vocab_size(vocab_size, model, config.parallel.tensor_model_parallel_size)
    lookups = padded if model.untie_embeddings_and_output_weights else 0
    if model.position_embedding_type == "absolute":
        lookups += model.max_position_embeddings
    lookups -= padded * (model.mtp_num_layers or 0)  # these layers multiply with the head's matrix, too
    scores = _scores(model, _kinds_in_training(model), model.seq_length)
    per_token = 6 * (num_parameters - lookups * model.hidden_size) + 6 * scores
    return per_token * (batch_size or config.batch.global_batch_size) * model.seq_length


def layer_flops(config: Config, layer: LayerDescription, padded_vocab_size: int) -> float:
    """Returns the FLOPs of one entry of the layer list, on one rank for one micro-batch, including
    recomputation."""
    if layer.kind is not None:
        return _transformer_layer_flops(config, layer.kind)
    tokens, hidden = config.batch.micro_batch_size * config.seq_length_per_rank, config.model.hidden_size
    tp_size = config.parallel.tensor_model_parallel_size
    head = _FORWARD_AND_BACKWARD * 2 * tokens * hidden * padded_vocab_size / tp_size
    if layer.role is not Role.MULTI_TOKEN:
        return head if layer.role is Role.HEAD else 0.0
    # The recomputation runs up to the input of the final norm, so it skips no matrix product.
    passes = _FORWARD_AND_BACKWARD + config.training.recomputes_layers
    projection = passes * 2 * tokens * 2 * hidden**2 / tp_size
    inner = _transformer_layer_flops(config, layer_kinds(config.model)[-1], skips_product=False)
    return inner + projection + head


def _scores(model: ModelConfig, kinds: Sequence[LayerKind], seq_length: int) -> int:
    """Returns the multiply-adds per token of two products: queries with keys, and scores with values."""
    widths = {kind: kind.of(model).query_width + kind.of(model).output_width for kind in {*kinds}}
    return sum(kind.keys(seq_length) * widths[kind] for kind in kinds)


def _kinds_in_training(model: ModelConfig) -> list[LayerKind]:
    """Returns the kinds of all transformer layers, including the layers that multi-token
    prediction contains."""
    kinds = layer_kinds(model)
    return kinds + kinds[-1:] * (model.mtp_num_layers or 0)


def _transformer_layer_flops(config: Config, kind: LayerKind, skips_product: bool = True) -> float:
    """Returns the FLOPs of a transformer layer on one rank for one micro-batch, including recomputation. The
    Triton kernels compute no scores outside of the kind's window. All experts are assumed to have the same
    number of tokens.

    The launched matrix products are counted. Attention has 2 products in the forward pass. Its backward pass
    has 5 in a fused kernel, which recomputes the scores, 7 in the Triton kernels, and 4 without fusion.
    PyTorch's recomputation stops after the last saved tensor, so it often skips the last matrix product of a
    group of layers (`skips_last_product`).
    """
    model, training, batch = kind.of(config.model), config.training, config.batch.micro_batch_size
    attention = training_attention(config, kind.window)
    skips = attention in (Implementation.TRITON, Implementation.FLASH_WINDOW)
    window = kind.window if skips else None
    tokens = batch * config.seq_length_per_rank
    # With context parallelism, the queries of a chunk are multiplied only with the keys up to the chunk's
    # end.
    chunks = sequence_chunks(Axis("cp", size=config.parallel.context_parallel_size), model.seq_length)
    scores_of_head = sum(scores_within(window, len(queries), queries.stop) for queries in chunks)
    scores = 2 * batch * scores_of_head * model.num_attention_heads * model.attention_head_dim
    forward = 2 * tokens * (kind.active_elements + _repeated_elements(config, model)) + 2 * scores
    total: float = _FORWARD_AND_BACKWARD * forward
    if attention == Implementation.TRITON:
        total += 3 * scores
    elif attention != Implementation.UNFUSED or recomputes_scores(config, kind.window):
        total += scores
    if training.recomputes_layers:
        total += forward
        if skips_product and skips_last_product(config):
            last_product = 2 * tokens * _last_width(model, kind) * model.hidden_size
            total -= last_product / training.checkpoint_num_layers
    return total / config.parallel.tensor_model_parallel_size


def _repeated_elements(config: Config, model: ModelConfig) -> float:
    """Returns the number of redundant multiply-adds per token in latent attention, summed over the
    tensor-parallel ranks. They are redundant because several ranks multiply the token with the same matrix.
    model: the model with the settings of the layer's kind."""
    parallel = config.parallel
    if not model.multi_latent_attention:
        return 0
    sizes = {name: n_out * n_in for name, (n_out, n_in) in model.attention_matrices.items()}
    repeated = (parallel.context_parallel_size - 1) * sizes["kv_up_proj"]
    if not parallel.sequence_parallel:
        tensor = parallel.tensor_model_parallel_size
        repeated += (tensor - 1) * (sizes["kv_down_proj"] + sizes.get("q_down_proj", 0))
    return repeated


def _last_width(model: ModelConfig, kind: LayerKind) -> int:
    """Returns the inner dimension of a layer's last matrix product. Returns 0 if the product's output is
    saved for the backward pass, as with experts and with a gated shared expert."""
    if not kind.has_experts:
        return model.ffn_hidden_size
    return 0 if model.moe_shared_expert_gate else model.moe_shared_expert_intermediate_size or 0


def skips_last_product(config: Config) -> bool:
    """Returns whether recomputation skips the last matrix product of a group of layers, because the backward
    pass needs no tensor after it. DeepSpeed's recomputation runs to the end of the group. With
    --tp-comm-overlap the last product and its reduction are one function, which is recomputed."""
    training, tp_size = config.training, config.parallel.tensor_model_parallel_size
    if config.parallel.tp_comm_overlap and tp_size > 1:
        return False
    if training.checkpoint_in_cpu or (training.partition_activations and tp_size > 1):
        return False
    arrangement = LAYER_ARRANGEMENTS[config.model.layer_arrangement]
    # The dropout kernel saves no mask; PyTorch's dropout saves one.
    no_mask = config.model.hidden_dropout == 0 or run_uses_kernels(config)
    return no_mask and not arrangement.ends_with_norm


def recomputes_scores(config: Config, window: int | None = None, on_cpu: bool = False) -> bool:
    """Returns whether a layer's attention scores are recomputed. Fused kernels never store scores."""
    if not config.training.recomputes("core_attn"):
        return False
    return training_attention(config, window, on_cpu) == Implementation.UNFUSED


def tflops_per_device(flops: float, seconds: float, world_size: int) -> float:
    """Returns the TFLOP/s per device if `world_size` devices together compute `flops` FLOPs in `seconds`."""
    return flops / (seconds * world_size * 1e12)
