"""How a run computes attention and dropout in training, as the plan and the simulation count it."""

from __future__ import annotations

import os

from megatron.config import Config
from megatron.config.registries import POSITION_EMBEDDINGS
from megatron.model.attention_choice import AttentionNeeds, Implementation, choose_attention


def counts_kernels(config: Config) -> bool:
    """Whether the plan and the simulation count the Triton kernels: not with MEGATRON_KERNELS=pytorch, and
    not for --gpu v100-... (compute capability 7.0), which the kernels do not support."""
    is_old = (config.training.gpu or "").startswith("v100")
    return not is_old and os.environ.get("MEGATRON_KERNELS") != "pytorch"


def attention_of(config: Config) -> Implementation:
    """The implementation that `model.attention_choice` selects in training on a GPU."""
    model = config.model
    needs = AttentionNeeds(
        dropout=model.attention_dropout,
        alibi=POSITION_EMBEDDINGS.load(model.position_embedding_type).slopes is not None,
        documents=config.data.reset_attention_mask,
        seq_length=model.seq_length,
        head_dim=model.kv_channels,
        on_cpu=False,
        kernels=None if counts_kernels(config) else "no kernels",
        window=model.attention_window,
    )
    return choose_attention(needs)[0]


def adds_weight_gradients(config: Config) -> bool:
    """Whether matrix products add the weights' gradients to their sums (`megatron.mpu.weight_gradient`).
    Compiled ones do not: with --compile those of row-parallel layers, and with one TP rank all."""
    parallel = config.parallel
    compiled = config.training.compile and not parallel.schedule.splits_backward
    has_sums = config.precision.name != "fp32" and not parallel.shards_gradients
    return counts_kernels(config) and has_sums and not compiled


def adds_head_gradient(config: Config) -> bool:
    """Whether products add the gradient of the LM head's weight to the fp32 sum of the fused loss
    (`megatron.mpu.logit_chunks`): also with --compile and ZeRO-2 or 3, which leave the loss as it is."""
    fused = config.training.loss_implementation == "fused"
    return fused and counts_kernels(config) and config.precision.name != "fp32"
