"""Floating-point operations of a training step, counted as in Megatron-LM (arXiv 2104.04473).

Only matrix products count, 2 FLOPs per multiply-add, and their backward pass counts twice:

    FLOPs = 6 tokens (L (matrices + keys x widths) + hidden x padded vocabulary) + recomputation

matrices are the elements of a layer's weight matrices that a token uses, so gated MLPs, grouped queries, any
MLP width, latent attention and experts need no factors of their own. widths are the sizes of all query heads
and of the attention's output. keys is the number of keys with which each query is
multiplied: all of the sequence, although the causal mask forbids half of them, or the window of
--window-size. The masks between documents (--reset-attention-mask) save work, which is not subtracted. The LM
head is never recomputed. Each of --mtp-num-layers adds a transformer layer of the last kind, a matrix of 2 x
hidden x hidden elements, and the head.
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

    batch_size, seq_length: of the step; by default --global-batch-size and --seq-length. with_recomputation:
    counts the forward pass of recomputed layers, or the one product of recomputed scores
    (--recompute-modules core_attn). on_cpu: whether the run is on CPUs.
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

    N: the `num_parameters` of the whole model that a token uses, without tables that are only looked up
    (positions, an untied word embedding). L, H, Q, T: layers, heads, head size, and tokens of a sequence, or
    of the window if it is shorter. batch_size: see `iteration_flops`.
    """
    model = config.model
    padded = padded_vocab_size(vocab_size, model, config.parallel.tensor_model_parallel_size)
    lookups = padded if model.untie_embeddings_and_output_weights else 0
    if model.position_embedding_type == "absolute":
        lookups += model.max_position_embeddings
    lookups -= padded * (model.mtp_num_layers or 0)  # layers that also multiply with the head's matrix
    scores = _scores(model, _kinds_in_training(model), model.seq_length)
    per_token = 6 * (num_parameters - lookups * model.hidden_size) + 6 * scores
    return per_token * (batch_size or config.batch.global_batch_size) * model.seq_length


def layer_flops(config: Config, layer: LayerDescription, padded_vocab_size: int) -> float:
    """Returns the FLOPs of an entry of the layer list on one rank for one micro-batch, recomputation
    included."""
    if layer.kind is not None:
        return _transformer_layer_flops(config, layer.kind)
    tokens, hidden = config.batch.micro_batch_size * config.seq_length_per_rank, config.model.hidden_size
    tp_size = config.parallel.tensor_model_parallel_size
    head = _FORWARD_AND_BACKWARD * 2 * tokens * hidden * padded_vocab_size / tp_size
    if layer.role is not Role.MULTI_TOKEN:
        return head if layer.role is Role.HEAD else 0.0
    # Recomputation goes to the input of its final norm: no product is skipped.
    passes = _FORWARD_AND_BACKWARD + config.training.recomputes_layers
    projection = passes * 2 * tokens * 2 * hidden**2 / tp_size
    inner = _transformer_layer_flops(config, layer_kinds(config.model)[-1], skips_product=False)
    return inner + projection + head


def _scores(model: ModelConfig, kinds: Sequence[LayerKind], seq_length: int) -> int:
    """Returns the multiply-adds per token between queries and keys, and between scores and values."""
    widths = {kind: kind.of(model).query_width + kind.of(model).output_width for kind in {*kinds}}
    return sum(kind.keys(seq_length) * widths[kind] for kind in kinds)


def _kinds_in_training(model: ModelConfig) -> list[LayerKind]:
    """Returns the kinds of all transformer layers, also of the layers in multi-token prediction."""
    kinds = layer_kinds(model)
    return kinds + kinds[-1:] * (model.mtp_num_layers or 0)


def _transformer_layer_flops(config: Config, kind: LayerKind, skips_product: bool = True) -> float:
    """Returns the FLOPs of a transformer layer on one rank for one micro-batch, recomputation included. The
    Triton kernels compute no scores outside of the kind's window. All experts have equal numbers of tokens.

    It counts the matrix products that are launched. The backward pass of a fused attention kernel recomputes
    the scores: it has 5 products where the forward pass has 2. Unfused attention has 4, the Triton kernels
    have 7. PyTorch's recomputation stops after the last saved tensor, so often the last matrix product of a
    group of layers is not recomputed (`skips_last_product`).
    """
    model, training, batch = kind.of(config.model), config.training, config.batch.micro_batch_size
    attention = training_attention(config, kind.window)
    skips = attention in (Implementation.TRITON, Implementation.FLASH_WINDOW)
    window = kind.window if skips else None
    tokens = batch * config.seq_length_per_rank
    # With context parallelism the queries of a chunk have products only with the keys up to its end.
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
    """Returns the elements of latent attention's matrices that a rank multiplies with more than its share of
    the tokens: the sum over the tensor-parallel ranks, without their fair share. model: of the layer's
    kind."""
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
    """Returns the inner dimension of a layer's last matrix product, 0 if its output is saved for the backward
    pass, as the outputs of experts and of a gated shared expert are."""
    if not kind.has_experts:
        return model.ffn_hidden_size
    return 0 if model.moe_shared_expert_gate else model.moe_shared_expert_intermediate_size or 0


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


def recomputes_scores(config: Config, window: int | None = None, on_cpu: bool = False) -> bool:
    """Returns whether a layer's attention scores are recomputed. Fused kernels never store them."""
    if not config.training.recomputes("core_attn"):
        return False
    return training_attention(config, window, on_cpu) == Implementation.UNFUSED


def tflops_per_device(flops: float, seconds: float, world_size: int) -> float:
    """Returns the TFLOP/s per device if `world_size` devices together compute `flops` in `seconds`."""
    return flops / (seconds * world_size * 1e12)
