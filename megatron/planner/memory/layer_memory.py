"""Memory of a pipeline layer on one rank, in bytes: parameters and optimizer state, and activations.

Activations follow "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198),
equation 1. For a micro-batch of b samples of s tokens, hidden size h and tensor-parallel degree t, a
transformer layer keeps for its backward pass

    2 sbh                   inputs of the two norms
    2 sbh                   inputs of the two column-parallel matrices; for other arrangements than
                            pre-norm see `LayerArrangement.saved_states`
    4 sbh / t               query, key, value and the attention output
    2 (ffn / h) sbh / t     input and output of the activation; 4 for a gated MLP

elements in the run's precision. Without Triton kernels --hidden-dropout adds 2 sbh bytes of masks. With
--sequence-parallel all terms are divided by t (equation 4 of the paper).

Attention: PyTorch's fused kernel and the Triton kernel store no scores. With --attention-dropout and
without Triton kernels (`planner.implementations`) attention is not fused. For a heads it then keeps
a s^2 b / t scores: each as softmax output in fp32, as dropout output in the run's precision, and one byte of
mask. --recompute-granularity selective recomputes them instead.

With --checkpoint-activations a layer keeps only its input: 1 / t of it with --partition-activations, nothing
on the device with --checkpoint-in-cpu. The temporary memory of the recomputation is in `temporaries`.
"""

from __future__ import annotations

from megatron.config import Config
from megatron.config.registries import LAYER_ARRANGEMENTS, POSITION_EMBEDDINGS, LayerArrangement
from megatron.model.attention_choice import Implementation
from megatron.model.position import PositionScheme
from megatron.planner.implementations import attention_of, counts_kernels

FP32 = 4
# Bytes per element of a moment with --use-bnb-optimizer: one byte, and an fp32 scale per 256 elements.
EIGHT_BIT = 1 + FP32 / 256


def state_bytes_per_parameter(
    config: Config, moment_bytes: float = FP32, in_transformer_layer: bool = False
) -> float:
    """Bytes per parameter on the device between steps: weight, fp32 gradient, fp32 master weight, moments.

    ZeRO-1 shards master weights and moments over the data-parallel ranks, ZeRO-2 also the gradients of
    transformer layers, ZeRO-3 also their weights. --cpu-offload keeps master weights and moments in host
    memory. Not counted: the full gradients (ZeRO-2) and weights (ZeRO-3) of the layer being computed.

    moment_bytes: bytes per element of each moment.
    """
    parallel = config.parallel
    weight = parameter_bytes(config)
    moments = {"sgd": 1}.get(config.optimizer.optimizer, 2) * moment_bytes
    master = 0 if weight == FP32 else FP32
    state = 0 if parallel.cpu_offload else master + moments

    def shards(from_stage: int) -> int:
        return parallel.data_parallel_size if parallel.zero_stage >= from_stage else 1

    if not in_transformer_layer:
        return weight + FP32 + state / shards(1)
    return weight / shards(3) + FP32 / shards(2) + state / shards(1)


def transformer_layer_activation_bytes(config: Config) -> float:
    """Activations of one transformer layer that are kept for the backward pass of a micro-batch."""
    training = config.training
    if not training.recomputes_layers:
        return layer_input_bytes(config) + saved_within_layer_bytes(config)
    if training.checkpoint_in_cpu:
        return 0.0
    shards = config.parallel.tensor_model_parallel_size if training.partition_activations else 1
    return layer_input_bytes(config) / shards / training.checkpoint_num_layers


def deferred_layer_bytes(config: Config) -> float:
    """What --pipeline-schedule zero-bubble keeps of one transformer layer between the backward and the weight
    pass of a micro-batch (`mpu.deferred_gradients`): the inputs of its four matrices and the gradients of
    their outputs. Without hidden dropout the gradients of the two outputs that are added to one hidden state
    are one tensor."""
    model, ranks = config.model, config.parallel.tensor_model_parallel_size
    tokens = config.batch.micro_batch_size * model.seq_length
    wide = (2 if model.glu_activation else 1) * model.ffn_hidden_size
    # The input of the second matrix, the gradient of the output of the first; in the MLP and in attention.
    inner = model.ffn_hidden_size + wide + 2 * model.query_width + 2 * model.key_width
    is_parallel = model.layer_arrangement.startswith("parallel")
    gathers = config.parallel.sequence_parallel and ranks > 1
    shares = is_parallel and model.hidden_dropout == 0 and not gathers
    inputs = (1 if len(arrangement_of(config).norms) == 1 else 2) * residual_values(config)
    gradients = (1 if shares else 2) * hidden_values(config)
    return (tokens * inner / ranks + inputs + gradients) * parameter_bytes(config)


def layer_input_bytes(config: Config) -> float:
    """The residual stream, the input and the output of a layer: sbh elements, sbh / t with
    --sequence-parallel."""
    return residual_values(config) * _residual_bytes(config)


def saved_within_layer_bytes(config: Config) -> float:
    """What autograd saves of a layer besides its input: norms, attention, scores and MLP."""
    parts = (_norm_bytes, _attention_bytes, _score_bytes, _mlp_bytes)
    return sum(part(config) for part in parts)


def _norm_bytes(config: Config) -> float:
    """Inputs of the column-parallel matrices and of norms, except the layer's input (with pre-norm the
    outputs of two norms, and the input of the second one, which is the residual stream); mean and reciprocal
    deviation of each row in fp32. Dropout masks of the two residual additions."""
    values, arrangement = residual_values(config), arrangement_of(config)
    per_value = arrangement.saved_states * parameter_bytes(config)
    if config.model.layer_arrangement == "pre-norm":
        per_value += _residual_bytes(config) - parameter_bytes(config)
    per_value += 2 if keeps_dropout_masks(config) else 0
    return values * per_value + len(arrangement.norms) * norm_statistics_bytes(config, values)


def arrangement_of(config: Config) -> LayerArrangement:
    """What --layer-arrangement says."""
    return LAYER_ARRANGEMENTS[config.model.layer_arrangement]


def keeps_dropout_masks(config: Config) -> bool:
    """Whether hidden dropout keeps a byte per element; the kernel hashes the mask again."""
    return config.model.hidden_dropout > 0 and not counts_kernels(config)


def norm_statistics_bytes(config: Config, values: float) -> float:
    """Mean and reciprocal deviation of each row of `values` elements; of an RMS norm the latter."""
    statistics = 1 if config.model.normalization == "RMSNorm" else 2
    return statistics * FP32 * values / config.model.hidden_size


def _attention_bytes(config: Config) -> float:
    """Query, key, value (`_head_copies`), and the attention output as the input of the next matrix.

    Fused kernels (FlashAttention, arXiv 2205.14135) save the logarithm of each row's sum in fp32. PyTorch's
    memory-efficient kernel, which serves biases and fp32, has its output batch first: a second copy, unless
    the micro-batch is one sample."""
    model, batch = config.model, config.batch.micro_batch_size
    heads = model.num_attention_heads / config.parallel.tensor_model_parallel_size
    rows = batch * model.seq_length * heads
    copies = _head_copies(config) + 1
    statistics, attention = 0.0, attention_of(config)
    if attention != Implementation.UNFUSED:
        is_efficient = attention == Implementation.BIASED_SDPA or parameter_bytes(config) == FP32
        copies += 1 if batch > 1 and is_efficient and attention != Implementation.TRITON else 0
        statistics = rows * FP32
    angles = 0
    if position_scheme(config).rotary and config.data.reset_position_ids:
        angles = 2 * batch * model.seq_length  # cosines and sines of this micro-batch
    elements = copies * rows * model.kv_channels + angles * model.rotary_dim
    return elements * parameter_bytes(config) + statistics + _qk_norm_bytes(config)


def _head_copies(config: Config) -> float:
    """What attention keeps of queries, keys and values, in units of this rank's queries: each of them, or the
    projection if one of them is still a part of it (`model.gpt_model.ParallelSelfAttention`).

    Norms and rotary embeddings make new queries and keys. Queries of several groups that share keys are
    copied out of the projection. Only the Triton kernel takes fewer key heads than query heads; other
    implementations get copies of keys and values. A norm keeps its input.
    """
    model, ranks = config.model, config.parallel.tensor_model_parallel_size
    groups, heads = max(model.query_groups // ranks, 1), model.num_attention_heads // ranks
    keys, shares = groups / heads, groups < heads
    repeats = shares and attention_of(config) != Implementation.TRITON
    copies_queries = shares and groups > 1
    joins = model.qk_layernorm_scope == "projection"
    is_new = bool(position_scheme(config).rotary) or model.qk_layernorm
    # Elements in units of the queries; 0 of what is a part of the projection.
    query = 1 if is_new or copies_queries else 0
    key = 1 if repeats else keys if is_new else 0
    kept = [query, key, 1 if repeats else 0]
    if model.qk_layernorm:
        kept += [1 if copies_queries or (joins and not shares) else 0, keys if joins and groups > 1 else 0]
    return sum(kept) + (0 if all(kept) else 1 + 2 * keys)


def _qk_norm_bytes(config: Config) -> float:
    """The statistics of --qk-layernorm, fp32: of each head, or of all heads together."""
    model = config.model
    if not model.qk_layernorm:
        return 0.0
    tokens = config.batch.micro_batch_size * model.seq_length
    if model.qk_layernorm_scope == "projection":
        return 2 * FP32 * tokens
    ranks = config.parallel.tensor_model_parallel_size
    heads = model.num_attention_heads // ranks + max(model.query_groups // ranks, 1)
    return (1 if model.normalization == "RMSNorm" else 2) * FP32 * tokens * heads


def _score_bytes(config: Config) -> float:
    """With attention dropout and without its recomputation: softmax, dropout mask and dropped softmax of each
    score; the causal mask if there is no bias."""
    model = config.model
    if attention_of(config) != Implementation.UNFUSED or config.training.recomputes_attention:
        return 0.0
    per_score = FP32 + 1 + parameter_bytes(config)
    return scores(config) * per_score + (0 if _has_bias(config) else model.seq_length**2)


def scores(config: Config) -> float:
    """Attention scores of one layer: a s^2 b / t."""
    model = config.model
    heads = model.num_attention_heads / config.parallel.tensor_model_parallel_size
    return config.batch.micro_batch_size * heads * model.seq_length**2


def _has_bias(config: Config) -> bool:
    scheme = position_scheme(config)
    window = config.model.attention_window
    return scheme.slopes is not None or config.data.reset_attention_mask or window is not None


def _mlp_bytes(config: Config) -> float:
    """Input and output of the activation; of a gated MLP value, gate, activation and product."""
    return (4 if config.model.glu_activation else 2) * mlp_values(config) * parameter_bytes(config)


def mlp_values(config: Config) -> float:
    """Elements of the intermediate activation of the MLP on one rank."""
    tokens = config.batch.micro_batch_size * config.model.seq_length
    return tokens * config.model.ffn_hidden_size / config.parallel.tensor_model_parallel_size


def embedding_activation_bytes(config: Config) -> float:
    """Activations of the embedding: token ids as sent and as looked up (shifted to this rank's rows with
    t > 1, and a mask of those of other ranks), the dropout mask, with --embed-layernorm the input and the
    statistics of its norm."""
    tokens, values = config.batch.micro_batch_size * config.model.seq_length, residual_values(config)
    kept: float = tokens * (2 * 8 + (1 + 8 if config.parallel.tensor_model_parallel_size > 1 else 0))
    if config.model.embed_layernorm:
        kept += values * parameter_bytes(config) + norm_statistics_bytes(config, values)
    return kept + (values if keeps_dropout_masks(config) else 0)


def norm_activation_bytes(config: Config) -> float:
    """Activations of the final norm: its input, batch first, and its statistics."""
    values = hidden_values(config)
    return values * _residual_bytes(config) + norm_statistics_bytes(config, values)


def sent_activation_bytes(config: Config) -> float:
    """One message between stages: the residual stream, or a part of it per tensor-parallel rank."""
    parallel = config.parallel
    return layer_input_bytes(config) / (parallel.tensor_model_parallel_size if parallel.sends_parts else 1)


def head_activation_bytes(config: Config, padded_vocab: int) -> float:
    """Activations of the LM head and the loss on one rank.

    The head's input; with --loss-implementation plain also the fp32 logits. The fused loss computes gradients
    in the forward pass and keeps them instead: that of the input, and in fp32 that of the weight.
    """
    model, rows = config.model, padded_vocab / config.parallel.tensor_model_parallel_size
    hidden = hidden_values(config) * parameter_bytes(config)
    if config.training.loss_implementation == "fused":
        return 2 * hidden + rows * model.hidden_size * FP32
    return hidden + config.batch.micro_batch_size * model.seq_length * rows * FP32


def position_scheme(config: Config) -> PositionScheme:
    """The components of --position-embedding-type."""
    return POSITION_EMBEDDINGS.load(config.model.position_embedding_type)


def residual_values(config: Config) -> float:
    """Elements of the residual stream of a micro-batch on one rank."""
    sharded = config.parallel.sequence_parallel
    return hidden_values(config) / (config.parallel.tensor_model_parallel_size if sharded else 1)


def hidden_values(config: Config) -> int:
    """sbh."""
    return config.batch.micro_batch_size * config.model.seq_length * config.model.hidden_size


def parameter_bytes(config: Config) -> int:
    """Bytes per weight and per element of most activations."""
    return FP32 if config.precision.name == "fp32" else 2


def _residual_bytes(config: Config) -> int:
    """Bytes per element of the residual stream. With --apply-residual-connection-post-layernorm it is the
    output of a norm, in the run's precision, after the first layer."""
    wide = config.precision.fp32_residual_connection
    if wide and not config.model.apply_residual_connection_post_layernorm:
        return FP32
    return parameter_bytes(config)
