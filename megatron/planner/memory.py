"""Memory of a pipeline layer on one rank, in bytes: parameters and optimizer state, and activations.

Activations follow "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198),
equation 1. For a micro-batch of b samples of s tokens, hidden size h and tensor-parallel degree t, a
transformer layer keeps for its backward pass

    2 sbh                   inputs of the two norms
    2 sbh                   inputs of the two column-parallel matrices
    4 sbh / t               query, key, value and the attention output
    2 (ffn / h) sbh / t     input and output of the activation; 4 for a gated MLP

elements in the run's precision, and with --hidden-dropout 2 sbh bytes of dropout masks. With
--sequence-parallel all terms are divided by t (equation 4 of the paper).

Attention: PyTorch's fused kernel stores no scores. With --attention-dropout attention is not fused. For a
heads it then keeps a s^2 b / t scores: each as softmax output in fp32, as dropout output in the run's
precision, and one byte of mask. --recompute-granularity selective recomputes them instead.

With --checkpoint-activations a layer keeps only its input: 1 / t of it with --partition-activations, nothing
on the device with --checkpoint-in-cpu. The temporary memory of the recomputation is not counted.
"""

from __future__ import annotations

from megatron.config import Config

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
    weight = _parameter_bytes(config)
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
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    values = _hidden_values(config)
    if config.parallel.sequence_parallel:
        values /= tensor
    training = config.training
    if training.recomputes_layers:
        if training.checkpoint_in_cpu:
            return 0.0
        shards = tensor if training.partition_activations else 1
        return values * _residual_bytes(config) / shards / training.checkpoint_num_layers
    matrices = (4 if model.glu_activation else 2) * model.ffn_hidden_size / model.hidden_size
    # With --sequence-parallel `values` is divided by the tensor-parallel size already.
    shards = 1 if config.parallel.sequence_parallel else tensor
    kept = 2 * _residual_bytes(config) + (2 + (4 + matrices) / shards) * _parameter_bytes(config)
    kept += 2 if model.hidden_dropout > 0 else 0
    scores = config.batch.micro_batch_size * model.num_attention_heads / tensor * model.seq_length**2
    keeps_scores = model.attention_dropout > 0 and not training.recomputes_attention
    per_score = FP32 + _parameter_bytes(config) + 1 if keeps_scores else 0
    return values * kept + scores * per_score


def embedding_activation_bytes(config: Config) -> float:
    """Activations of the embedding: token ids, and with --embed-layernorm the input of its norm."""
    norm = _parameter_bytes(config) if config.model.embed_layernorm else 0
    return _hidden_values(config) * norm + config.batch.micro_batch_size * config.model.seq_length * 8


def norm_activation_bytes(config: Config) -> float:
    """Activations of the final norm: its input."""
    return _hidden_values(config) * _residual_bytes(config)


def head_activation_bytes(config: Config, padded_vocab: int) -> float:
    """Activations of the LM head and the loss on one rank.

    The head's input; with --loss-implementation plain also the fp32 logits. The fused loss computes gradients
    in the forward pass and keeps them instead: that of the input, and in fp32 that of the weight.
    """
    model, rows = config.model, padded_vocab / config.parallel.tensor_model_parallel_size
    hidden = _hidden_values(config) * _parameter_bytes(config)
    if config.training.loss_implementation == "fused":
        return 2 * hidden + rows * model.hidden_size * FP32
    return hidden + config.batch.micro_batch_size * model.seq_length * rows * FP32


def _hidden_values(config: Config) -> int:
    return config.batch.micro_batch_size * config.model.seq_length * config.model.hidden_size


def _parameter_bytes(config: Config) -> int:
    return FP32 if config.precision.name == "fp32" else 2


def _residual_bytes(config: Config) -> int:
    return FP32 if config.precision.fp32_residual_connection else _parameter_bytes(config)
