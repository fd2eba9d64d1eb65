"""How a run computes attention, dropout, biases and weight gradients, as plan and simulation count it."""

from __future__ import annotations

import os

from megatron.config import Config
from megatron.config.registries import LAYER_ARRANGEMENTS, POSITION_EMBEDDINGS
from megatron.model.attention_choice import AttentionRequirements, Implementation, choose_attention


def counts_kernels(config: Config) -> bool:
    """Whether the plan and the simulation count the Triton kernels: not with MEGATRON_KERNELS=pytorch, and
    not for --gpu v100-... (compute capability 7.0), which the kernels do not support."""
    is_old = (config.training.gpu or "").startswith("v100")
    return not is_old and os.environ.get("MEGATRON_KERNELS") != "pytorch"


def attention_of(config: Config) -> Implementation:
    """The implementation that `model.attention_choice` selects in training on a GPU."""
    model = config.model
    required = AttentionRequirements(
        dropout=model.attention_dropout,
        alibi=POSITION_EMBEDDINGS.load(model.position_embedding_type).slopes is not None,
        documents=config.data.reset_attention_mask,
        seq_length=model.seq_length,
        head_dim=model.kv_channels,
        on_cpu=False,
        kernels_unsupported_reason=None if counts_kernels(config) else "no kernels",
        window=model.attention_window,
    )
    return choose_attention(required)[0]


def skips_bias_add(config: Config) -> bool:
    """Whether row-parallel layers leave their biases to what follows (`mpu.layers.RowParallelLinear`): over
    several ranks, except before a norm."""
    ends_with_norm = LAYER_ARRANGEMENTS[config.model.layer_arrangement].ends_with_norm
    has_biases = not config.model.disable_bias_linear
    return config.parallel.tensor_model_parallel_size > 1 and has_biases and not ends_with_norm


def adds_column_gradients(config: Config) -> bool:
    """Whether matrix products add the gradients of column-parallel weights to their sums
    (`megatron.mpu.weight_gradient`). With --compile those over several TP ranks, which are not compiled."""
    is_compiled = _compiles_products(config) and config.parallel.tensor_model_parallel_size == 1
    return _sums_are_added_to(config) and not is_compiled


def adds_row_gradients(config: Config) -> bool:
    """The same of row-parallel weights. With --compile only those of --tp-comm-overlap are not compiled."""
    parallel = config.parallel
    overlapped = parallel.tensor_model_parallel_size > 1 and parallel.overlap_chunks > 1
    return _sums_are_added_to(config) and (overlapped or not _compiles_products(config))


def _compiles_products(config: Config) -> bool:
    return config.training.compile and not config.parallel.schedule.splits_backward


def _sums_are_added_to(config: Config) -> bool:
    """16-bit weights whose fp32 sums exist at all times, on a device with kernels."""
    return counts_kernels(config) and config.precision.name != "fp32" and not config.parallel.shards_gradients


def adds_head_gradient(config: Config) -> bool:
    """Whether products add the gradient of the LM head's weight to the fp32 sum of the fused loss
    (`megatron.mpu.logit_chunks`): also with --compile and ZeRO-2 or 3, which leave the loss as it is."""
    fused = config.training.loss_implementation == "fused"
    return fused and counts_kernels(config) and config.precision.name != "fp32"
