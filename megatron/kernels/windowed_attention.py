"""Operators of attention with a window and a sink, computed by PyTorch's flash kernels.

scaled_dot_product_attention supports a window only as a bias [seq, seq]. The kernels that it calls support a
window as two numbers, and heads of up to 256 elements. They are the kernels of FlashAttention 2 (arXiv
2307.08691), or of FlashAttention 3 if `torch.nn.attention.activate_flash_attention_impl` replaced them. They
do not support sinks. Therefore a sink is applied afterwards: it changes the output and the logarithm of each
row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.attention import count_products, sink_gradient
from megatron.kernels.operators import first_order, operator

MAX_HEAD_DIM = 256


def windowed_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, sinks: Tensor | None = None
) -> Tensor:
    """Returns softmax(query @ key.T * scale) @ value for each sample and head. A query attends to its own
    token and to the window - 1 tokens before it.

    For shapes, positions and sinks see `attention.flash_attention`. The dtype is bf16 or fp16. head_dim is a
    multiple of 8, and at most MAX_HEAD_DIM.
    """
    return _WindowedAttention.apply(query, key, value, sinks, scale, window)


@first_order
class _WindowedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scale: float,
        window: int,
    ) -> Tensor:
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        out, log_sums, *others = windowed_flash_attention_op(query, key, value, scale, window)
        if sinks is not None:
            sink = sinks.float()[None, :, None]
            out = (out * _as_heads(torch.sigmoid(log_sums - sink))).to(out.dtype)
            log_sums = torch.logaddexp(log_sums, sink)
        ctx.save_for_backward(query, key, value, out, log_sums, sinks, *others)
        ctx.numbers = scale, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sums, sinks, seed, offset = ctx.saved_tensors
        scale, window = ctx.numbers
        gradients = windowed_flash_attention_backward_op(
            query, key, value, out, log_sums, seed, offset, grad, scale, window
        )
        grad_sinks = None
        if sinks is not None:
            row_sums = (out.float() * grad).sum(-1).permute(1, 2, 0)
            grad_sinks = sink_gradient(sinks, log_sums, row_sums)
        return *gradients, grad_sinks, None, None


def _as_heads(of_rows: Tensor) -> Tensor:
    """Returns a view [queries, batch, heads, 1] of [batch, heads, queries]."""
    return of_rows.permute(2, 0, 1).unsqueeze(-1)


@operator("windowed_flash_attention")
def windowed_flash_attention_op(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the output, the logarithm of each row's sum of exponentials [batch, heads, queries], and the
    RNG state of the kernel's own dropout, which is not used."""
    tensors = (x.transpose(0, 1) for x in (query, key, value))  # [batch, seq, heads, head_dim]
    out, log_sums, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        *tensors, None, None, len(query), len(key), 0.0, True, False, **_options(scale, window)
    )
    return out.transpose(0, 1), log_sums, seed, offset


@windowed_flash_attention_op.register_fake
def _(query: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    queries, batch, heads, _ = query.shape
    log_sums = query.new_empty((batch, heads, queries), dtype=torch.float32)
    seed, offset = query.new_empty(2, dtype=torch.int64).unbind()
    return query.new_empty(query.shape), log_sums, seed.clone(), offset.clone()


@operator("windowed_flash_attention_backward")
def windowed_flash_attention_backward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    seed: Tensor,
    offset: Tensor,
    grad: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value."""
    tensors = (x.transpose(0, 1) for x in (grad, query, key, value, out))
    lengths = (None, None, len(query), len(key))
    gradients = torch.ops.aten._flash_attention_backward(
        *tensors, log_sums, *lengths, 0.0, True, seed, offset, **_options(scale, window)
    )
    grad_query, grad_key, grad_value = (x.transpose(0, 1) for x in gradients)
    return grad_query, grad_key, grad_value


@windowed_flash_attention_backward_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _options(scale: float, window: int) -> dict[str, Any]:
    """Returns the kernels' arguments. The last queries are aligned with the last keys. A query attends to the
    `window_size_left` keys before its own key, and to no later key."""
    return {"scale": scale, "window_size_left": window - 1, "window_size_right": 0}


# The forward pass has two products: the scores, and weights times values. The backward pass has five: the
# scores, and the gradients of weights, values, queries and keys.
count_products({"windowed_flash_attention": 2, "windowed_flash_attention_backward": 5})
