"""Operators of layer norm and RMS norm, fused with the residual addition before the norm.

In a transformer layer a sum has two uses: as the input of a norm, and as the residual of the next addition.
The forward pass reads the operands once, and writes the sum and its norm, including hash dropout and bias.
The backward pass adds the gradients of sum and norm, and writes the gradients of the addition's operands. Its
sums over rows for weight, beta and bias are partial: see `column_sums`. The reference implementation is in
`model.norm`.

A program has a whole row in registers; in the backward pass it also has the sums over its rows. `MAX_WIDTH`
is the largest width without register spills. Above `MAX_DROPOUT_WIDTH` a second kernel computes the backward
pass of the dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.column_sums import num_blocks, rows_per_block, sum_blocks
from megatron.kernels.dropout import (
    NO_DROPOUT,
    KernelMask,
    ShardOffsets,
    drop_threshold,
    dropout_backward_op,
)
from megatron.kernels.operators import Launch, first_order, operator

MAX_WIDTH, MAX_DROPOUT_WIDTH = 8192, 4096
# Without fused multiply-add the product of dropout is rounded before the residual is added, as in PyTorch.
OPTIONS = {"enable_fp_fusion": False}


def add_norm(
    x: Tensor | None,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    beta: Tensor | None,
    epsilon: float,
    zero_centered: bool,
    mask: KernelMask = NO_DROPOUT,
) -> tuple[Tensor, Tensor]:
    """Returns the sum residual + dropout(x + bias), and its norm in the dtype of `weight`.

    x, residual: [..., width]. x None: the sum is the residual. bias: [width] or None. weight, beta: [width],
    the norm's parameters; beta None: an RMS norm. zero_centered: the factor is 1 + weight. mask: the dropout
    mask. The sum has the dtype of x + residual.
    """
    return _AddNorm.apply(x, bias, residual, weight, beta, epsilon, zero_centered, mask)


@first_order
class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor | None,
        bias: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        beta: Tensor | None,
        epsilon: float,
        zero_centered: bool,
        mask: KernelMask,
    ) -> tuple[Tensor, Tensor]:
        residual, x = residual.contiguous(), None if x is None else x.contiguous()
        normed, statistics, *sums = add_norm_op(
            weight, beta, x, bias, residual, *mask, epsilon, zero_centered
        )
        total = residual if x is None else sums[0]
        ctx.save_for_backward(total, statistics, weight, beta)
        ctx.set_materialize_grads(False)
        # Autograd does not save the mask, for the reason given in `dropout`.
        ctx.mask, ctx.zero_centered = mask, zero_centered
        ctx.dtypes = tuple(None if tensor is None else tensor.dtype for tensor in (x, bias, residual))
        return total, normed

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad_normed: Tensor | None) -> tuple[Any, ...]:
        total, statistics, weight, beta = ctx.saved_tensors
        x_dtype, bias_dtype, residual_dtype = ctx.dtypes
        if grad_normed is None:
            grad_normed = torch.zeros_like(total, dtype=weight.dtype)
        if grad_total is not None:
            grad_total = grad_total.contiguous()
        keys, p, offsets = ctx.mask
        drops_later = p > 0.0 and total.shape[-1] > MAX_DROPOUT_WIDTH
        writes_x = not drops_later and (p > 0.0 or x_dtype != total.dtype)
        grad_residual, partial_sums, *others = add_norm_backward_op(
            weight,
            beta,
            total,
            statistics,
            grad_normed.contiguous(),
            grad_total,
            x_dtype if writes_x else None,
            bias_dtype is not None and not drops_later,
            None if drops_later else keys,
            0.0 if drops_later else p,
            offsets,
            ctx.zero_centered,
        )
        of_weight, *sums = sum_blocks(partial_sums, weight.dtype)
        grad_x = None if x_dtype is None else others[0] if others else grad_residual
        of_beta = None if beta is None else sums.pop(0)
        if drops_later:
            grad_x, of_bias = dropout_backward_op(grad_residual, keys, p, offsets, x_dtype)
            sums = [] if bias_dtype is None else [sum_blocks(of_bias, bias_dtype)]
        grad_bias = sums[0].to(bias_dtype) if sums else None
        return grad_x, grad_bias, grad_residual.to(residual_dtype), of_weight, of_beta, None, None, None


@operator("add_norm")
def add_norm_op(
    weight: Tensor,
    beta: Tensor | None,
    x: Tensor | None,
    bias: Tensor | None,
    residual: Tensor,
    sample_keys: Tensor | None,
    p: float,
    offsets: Sequence[int],
    epsilon: float,
    zero_centered: bool,
) -> list[Tensor]:
    """Returns the norm, its statistics, and with `x` the sum. statistics: fp32 [1 or 2, rows], the reciprocal
    deviation, and for a layer norm the mean. sample_keys: None without dropout. offsets: the fields of
    `ShardOffsets`."""
    normed, total = torch.empty_like(residual, dtype=weight.dtype), None
    rows = residual.numel() // residual.shape[-1]
    statistics = residual.new_empty((1 if beta is None else 2, rows), dtype=torch.float32)
    if x is not None:
        total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    launch = _launch(residual.shape, ShardOffsets(*offsets), p, beta is None, zero_centered, epsilon)
    launch(weight, beta, x, bias, residual, total, normed, statistics, sample_keys)
    return [normed, statistics] if total is None else [normed, statistics, total]


@operator("add_norm_backward")
def add_norm_backward_op(
    weight: Tensor,
    beta: Tensor | None,
    total: Tensor,
    statistics: Tensor,
    grad_normed: Tensor,
    grad_total: Tensor | None,
    x_dtype: torch.dtype | None,
    has_bias: bool,
    sample_keys: Tensor | None,
    p: float,
    offsets: Sequence[int],
    zero_centered: bool,
) -> list[Tensor]:
    """Returns the gradient of the residual, and the partial sums of the gradients of weight, beta and bias,
    fp32 [blocks, 1 to 3, width]. With `x_dtype` it also returns the gradient of `x`; without it, this
    gradient equals the residual's."""
    width = total.shape[-1]
    blocks, num_sums = num_blocks(total.numel() // width), 1 + (beta is not None) + has_bias
    grad_residual, grad_x = torch.empty_like(total), None
    sums = total.new_empty((blocks, num_sums, width), dtype=torch.float32)
    if x_dtype is not None:
        grad_x = torch.empty_like(total, dtype=x_dtype)
    launch = _launch(total.shape, ShardOffsets(*offsets), p, beta is None, zero_centered, None, has_bias)
    launch(weight, beta, total, statistics, grad_normed, grad_total, grad_residual, grad_x, sums, sample_keys)
    return [grad_residual, sums] if grad_x is None else [grad_residual, sums, grad_x]


@lru_cache(maxsize=1024)
def _launch(
    shape: torch.Size,
    offsets: ShardOffsets,
    p: float,
    is_rms: bool,
    zero_centered: bool,
    epsilon: float | None,
    has_bias: bool = False,
) -> Launch:
    """Returns the launch of a kernel. epsilon: None for the backward pass. has_bias: whether the backward
    pass also sums the gradient of a bias."""
    width, rows = shape[-1], shape[:-1].numel()
    block = max(1 << (width - 1).bit_length(), 32)
    numbers: dict[str, Any] = {
        "rows": rows,
        "width": width,
        "offsets": offsets,
        "dropped_below": drop_threshold(p),
        "scale": 1.0 / (1.0 - p),
        "IS_RMS": is_rms,
        "ZERO_CENTERED": zero_centered,
        "BLOCK": block,
    }
    options = {**OPTIONS, "num_warps": min(max(block // 256, 1), 16)}
    if epsilon is not None:
        kernel = "norm_triton.add_norm_kernel"
        return Launch(kernel, (rows, 1), options, epsilon=epsilon, **numbers)
    numbers |= {"HAS_BIAS": has_bias, "SUMS": 2 - is_rms + has_bias, "BLOCK_ROWS": rows_per_block(rows)}
    return Launch("norm_triton.add_norm_backward_kernel", (num_blocks(rows), 1), options, **numbers)
