"""Bytes that a pipeline layer takes on one rank: its state, and what it keeps of a micro-batch.

Activations follow Korthikanti et al. (2022), "Reducing Activation Recomputation in Large Transformer Models",
equation 1: of s x b tokens of h values, t-fold tensor parallel, a layer keeps

    2 sbh                   the inputs of the two norms
    2 sbh                   the inputs of the two column-parallel matrices
    4 sbh / t               q, k, v and the context
    2 (ffn / h) sbh / t     before and after the activation; 4 with a gate

values of the run's precision, and a byte per value of the two masks of --hidden-dropout. With
--sequence-parallel all of it is cut over the t tensor ranks (equation 4 there). PyTorch's fused
attention stores no scores; with --attention-dropout attention is spelt out, and keeps for each of the
a s^2 b / t scores of a heads its softmax in fp32, what dropout leaves of it in the run's precision, and a
byte of mask, unless these are recomputed (--recompute-granularity selective). Recomputed as a whole
(--checkpoint-activations), a layer keeps its input, with --partition-activations a part of it, and with
--checkpoint-in-cpu nothing on the device; what is made again is not counted.
"""

from __future__ import annotations

from megatron.config import Config

FP32 = 4
# Of a moment with --use-bnb-optimizer: a byte, and an fp32 scale per 256 of them.
EIGHT_BIT = 1 + FP32 / 256


def state_bytes_per_parameter(
    config: Config, moment_bytes: float = FP32, in_transformer_layer: bool = False
) -> float:
    """On the device, between steps: weight, gradient (fp32 always), fp32 master copy and moments.

    ZeRO-1 shares the last two over the replicas, ZeRO-2 a transformer layer's gradients, ZeRO-3 its weights;
    --cpu-offload has the last two elsewhere. While ZeRO-2 and 3 work on a layer, its whole comes on top.
    moment_bytes: of each moment, per element."""
    parallel = config.parallel
    weight = _parameter_bytes(config)
    moments = {"sgd": 1}.get(config.optimizer.optimizer, 2) * moment_bytes
    master = 0 if weight == FP32 else FP32
    state = 0 if parallel.cpu_offload else master + moments

    def shared_by(from_stage: int) -> int:
        return parallel.data_parallel_size if parallel.zero_stage >= from_stage else 1

    if not in_transformer_layer:
        return weight + FP32 + state / shared_by(1)
    return weight / shared_by(3) + FP32 / shared_by(2) + state / shared_by(1)


def transformer_layer_activation_bytes(config: Config) -> float:
    """What one transformer layer keeps of a micro-batch."""
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    values = _hidden_values(config)
    if config.parallel.sequence_parallel:
        values /= tensor
    training = config.training
    if training.recomputes_layers:
        if training.checkpoint_in_cpu:
            return 0.0
        shared_by = tensor if training.partition_activations else 1
        return values * _residual_bytes(config) / shared_by / training.checkpoint_num_layers
    matrices = (4 if model.glu_activation else 2) * model.ffn_hidden_size / model.hidden_size
    # Of a cut sequence, `values` is the part of it that a rank holds; the matrices' outputs are whole.
    shared_by = 1 if config.parallel.sequence_parallel else tensor
    kept = 2 * _residual_bytes(config) + (2 + (4 + matrices) / shared_by) * _parameter_bytes(config)
    kept += 2 if model.hidden_dropout > 0 else 0
    scores = config.batch.micro_batch_size * model.num_attention_heads / tensor * model.seq_length**2
    keeps_scores = model.attention_dropout > 0 and not training.recomputes_attention
    per_score = FP32 + _parameter_bytes(config) + 1 if keeps_scores else 0
    return values * kept + scores * per_score


def embedding_activation_bytes(config: Config) -> float:
    """Token ids, and the input of the embedding's norm if it has one."""
    norm = _parameter_bytes(config) if config.model.embed_layernorm else 0
    return _hidden_values(config) * norm + config.batch.micro_batch_size * config.model.seq_length * 8


def norm_activation_bytes(config: Config) -> float:
    """The input of the final norm."""
    return _hidden_values(config) * _residual_bytes(config)


def head_activation_bytes(config: Config, padded_vocab: int) -> float:
    """The head's input, and: of the fused loss that input's gradient and, in fp32, the weight's, both made in
    the forward pass; of the plain loss the logits in fp32."""
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
