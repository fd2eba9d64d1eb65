"""Operators of causal flash attention with hash dropout, ALiBi and document boundaries.

The algorithm is FlashAttention (arXiv 2205.14135, 2307.08691): scores exist as tiles in registers only. The
backward pass computes them again from query, key and the logarithm of each row's sum, and hashes the dropout
mask again. So what is kept is O(seq). The gradient of the queries is computed by blocks of queries, those of
keys and values by blocks of keys: each element is summed by one program in a fixed order, without atomics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

# Larger heads do not fit in a GPU's registers and shared memory.
MAX_HEAD_DIM = 128


@dataclass(frozen=True)
class AttentionMask:
    """What changes the scores besides the causal mask, for this rank's heads. All tensors are contiguous.

    slopes: fp32 [heads], ALiBi's: slope * (key - query) is added to a score. None: nothing is added.
    first_keys, end_queries: int32 [batch, seq]. Query i attends to the keys first_keys[i] to i; key j is
        attended to by the queries j to end_queries[j] - 1. Both ascend. None: from the first to the last.
    sample_keys: int64 [batch], see `mpu.random.DropoutRNG.sample_keys`. None: no dropout.
    dropout: probability that a weight is dropped.
    first_head: number of this rank's first query head in the model, on which the dropout mask depends.
    """

    slopes: Tensor | None = None
    first_keys: Tensor | None = None
    end_queries: Tensor | None = None
    sample_keys: Tensor | None = None
    dropout: float = 0.0
    first_head: int = 0


def flash_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: AttentionMask) -> Tensor:
    """dropout(softmax(query @ key.T * scale + bias)) @ value for each sample and head.

    query: [seq, batch, heads, head_dim]; key, value: [seq, batch, groups, head_dim], where `groups` divides
    `heads`, and query head i uses head i // (heads / groups) of them. Any strides, but the last dimension is
    contiguous. head_dim is at most MAX_HEAD_DIM. Returns [seq, batch, heads, head_dim], contiguous.
    """
    return _FlashAttention.apply(query, key, value, scale, mask)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: AttentionMask
    ) -> Tensor:
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        out, log_sums = attention_forward_op(
            query,
            key,
            value,
            mask.slopes,
            mask.first_keys,
            mask.sample_keys,
            scale,
            mask.dropout,
            mask.first_head,
        )
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.scale, ctx.mask = scale, mask
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sums = ctx.saved_tensors
        mask, grad = ctx.mask, grad.contiguous()
        numbers = (ctx.scale, mask.dropout, mask.first_head)
        grad_query, row_sums, row_keys = attention_backward_query_op(
            query,
            key,
            value,
            out,
            grad,
            log_sums,
            mask.slopes,
            mask.first_keys,
            mask.sample_keys,
            *numbers,
        )
        grad_key, grad_value = attention_backward_key_op(
            query,
            key,
            value,
            grad,
            log_sums,
            row_sums,
            mask.slopes,
            mask.first_keys,
            mask.end_queries,
            row_keys,
            ctx.scale,
            mask.dropout,
        )
        return grad_query, grad_key, grad_value, None, None


@torch.library.custom_op("megatron::attention_forward", mutates_args=())
def attention_forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor | None,
    first_keys: Tensor | None,
    sample_keys: Tensor | None,
    scale: float,
    p: float,
    first_head: int,
) -> tuple[Tensor, Tensor]:
    """(output, logarithm of base 2 of each row's sum of exponentials, fp32 [batch, heads, seq])."""
    from megatron.kernels.attention_launch import launch_forward  # triton is optional

    out, log_sums = _like(query), _per_row(query, torch.float32)
    launch_forward(query, key, value, out, log_sums, slopes, first_keys, sample_keys, scale, p, first_head)
    return out, log_sums


@attention_forward_op.register_fake
def _(query: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return _like(query), _per_row(query, torch.float32)


@torch.library.custom_op("megatron::attention_backward_query", mutates_args=())
def attention_backward_query_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad: Tensor,
    log_sums: Tensor,
    slopes: Tensor | None,
    first_keys: Tensor | None,
    sample_keys: Tensor | None,
    scale: float,
    p: float,
    first_head: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the queries, sum(out * grad) of each row in fp32, the hash of each row in int64)."""
    from megatron.kernels.attention_launch import launch_backward_query  # triton is optional

    grad_query, row_sums, row_keys = _like(query), _per_row(query, torch.float32), _row_keys(query, p)
    launch_backward_query(
        query,
        key,
        value,
        out,
        grad,
        log_sums,
        grad_query,
        row_sums,
        row_keys,
        slopes,
        first_keys,
        sample_keys,
        scale,
        p,
        first_head,
    )
    return grad_query, row_sums, row_keys


@attention_backward_query_op.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, p, _first_head = others
    return _like(query), _per_row(query, torch.float32), _row_keys(query, p)


@torch.library.custom_op("megatron::attention_backward_key", mutates_args=())
def attention_backward_key_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    log_sums: Tensor,
    row_sums: Tensor,
    slopes: Tensor | None,
    first_keys: Tensor | None,
    end_queries: Tensor | None,
    row_keys: Tensor,
    scale: float,
    p: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values."""
    from megatron.kernels.attention_launch import launch_backward_key  # triton is optional

    grad_key, grad_value = _like(key), _like(value)
    launch_backward_key(
        query,
        key,
        value,
        grad,
        log_sums,
        row_sums,
        grad_key,
        grad_value,
        slopes,
        first_keys,
        end_queries,
        row_keys,
        scale,
        p,
    )
    return grad_key, grad_value


@attention_backward_key_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return _like(key), _like(value)


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _per_row(query: Tensor, dtype: torch.dtype) -> Tensor:
    """[batch, heads, seq]."""
    seq, batch, heads, _ = query.shape
    return torch.empty(batch, heads, seq, dtype=dtype, device=query.device)


def _row_keys(query: Tensor, p: float) -> Tensor:
    return _per_row(query if p else query[:0], torch.int64)


# Of products of [seq, seq, head_dim]. As for PyTorch's attention, the causal half is not taken off.


@register_flop_formula(torch.ops.megatron.attention_forward)
def _forward_flops(query_shape: torch.Size, *_: Any, **__: Any) -> int:
    """Scores, and weights times values."""
    return 2 * _product_flops(query_shape)


@register_flop_formula(torch.ops.megatron.attention_backward_query)
def _backward_query_flops(query_shape: torch.Size, *_: Any, **__: Any) -> int:
    """Scores, the gradient of the weights, and that of the queries."""
    return 3 * _product_flops(query_shape)


@register_flop_formula(torch.ops.megatron.attention_backward_key)
def _backward_key_flops(query_shape: torch.Size, *_: Any, **__: Any) -> int:
    """Scores, the gradient of the weights, and those of keys and values."""
    return 4 * _product_flops(query_shape)


def _product_flops(query_shape: torch.Size) -> int:
    seq, batch, heads, head_dim = query_shape
    return 2 * batch * heads * seq * seq * head_dim
