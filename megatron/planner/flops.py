"""Floating-point operations of a training step, counted as the Megatron family counts them.

Per step: 24 f B s L h^2 (1 + s / (6 h) + V / (16 L h)), with B samples of s tokens, L layers of hidden size h
and V (padded) vocabulary entries. f counts passes over the matrices: 1 forward and 2 backward, and 1 more if
the forward pass is computed again. A gated MLP, with its third matrix, has 32 in place of 24.

The head is never computed again, which the formula allows for with f = 4; with f = 3 it counts a quarter of
the head too little. It stays as it is, since published numbers are made with it.
"""

from __future__ import annotations

from megatron.config import Config

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
    """Hardware FLOPs of one step over `batch_size` samples, summed over all devices.

    recompute: every layer's activations are computed twice (--checkpoint-activations).
    recompute_attention: the product of query and key is (--recompute-granularity selective).
    """
    passes = _FORWARD_AND_BACKWARD + (_RECOMPUTED_FORWARD if recompute else 0)
    coefficient = 32 if gated_mlp else 24
    matrices = coefficient * passes * batch_size * seq_length * num_layers * hidden_size**2
    attention = seq_length / (6 * hidden_size)
    head = padded_vocab_size / (16 * num_layers * hidden_size)
    scores = 2 * batch_size * seq_length**2 * num_layers * hidden_size if recompute_attention else 0
    return matrices * (1 + attention + head) + scores


def transformer_layer_flops(config: Config) -> float:
    """FLOPs of one transformer layer on one rank for a micro-batch, forward, backward and recomputation."""
    model = config.model
    tokens = config.batch.micro_batch_size * model.seq_length
    width = model.num_attention_heads * model.kv_channels
    matrices = 4 * width + (3 if model.glu_activation else 2) * model.ffn_hidden_size
    forward = 2 * tokens * (matrices * model.hidden_size + 2 * model.seq_length * width)
    passes = _FORWARD_AND_BACKWARD + (_RECOMPUTED_FORWARD if config.training.recomputes_layers else 0)
    scores = 2 * tokens * model.seq_length * width if recomputes_scores(config) else 0
    return (passes * forward + scores) / config.parallel.tensor_model_parallel_size


def recomputes_scores(config: Config) -> bool:
    """Attention's scores are made twice: there are none to keep where attention has no dropout."""
    return config.training.recomputes_attention and config.model.attention_dropout > 0


def head_flops(config: Config, padded_vocab_size: int) -> float:
    """FLOPs of the LM head on one rank for a micro-batch, forward and backward."""
    tokens = config.batch.micro_batch_size * config.model.seq_length
    forward = 2 * tokens * config.model.hidden_size * padded_vocab_size
    return _FORWARD_AND_BACKWARD * forward / config.parallel.tensor_model_parallel_size


def tflops_per_device(flops: float, seconds: float, world_size: int) -> float:
    """TFLOP/s of each of `world_size` devices that together do `flops` in `seconds`."""
    return flops / (seconds * world_size * 1e12)


def pipeline_efficiency(num_micro_batches: int, num_stages: int) -> float:
    """Share of a step in which a pipeline of equal stages is busy: m / (m + p - 1)."""
    return num_micro_batches / (num_micro_batches + num_stages - 1)
