"""Operator `megatron::dropout_add`: hash dropout, fused with bias and residual addition.

The mask is bitwise equal to the mask of `megatron.mpu.random`. It is not stored: the backward pass hashes
again. So an element costs only its reads and its write: in 16 bits 6 bytes with a residual, 4 without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from megatron.kernels.operators import Launch, first_order, operator

BLOCK_ROWS, BLOCK_COLUMNS = 4, 512
# Compile options. No fused multiply-add: the product is rounded before the residual is added, as in PyTorch.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


class ShardOffsets(NamedTuple):
    """Where this rank's shard lies in the mask of the full activation.

    The activation is read as [outer, batch, inner, columns]. Row (o, b, i) of the shard is row
    o * outer_stride + i + first_row of sample b in the full mask; column c is column c + first_column. The
    rows of a sample from row `split` of the shard on have `second_first_row` instead of `first_row`.
    """

    batch: int
    inner: int
    outer_stride: int
    first_row: int
    first_column: int
    split: int = 2**62
    second_first_row: int = 0


@lru_cache(maxsize=1024)
def shard_offsets(
    shape: torch.Size, batch_dim: int, shard_dim: int | None, rank: int, size: int
) -> ShardOffsets | None:
    """Returns the offsets of the shard of TP rank `rank` of `size`; None if the kernel does not support the
    shard: its dimension is not the last, and follows another one on its side of the batch."""
    outer, inner = math.prod(shape[:batch_dim]), math.prod(shape[batch_dim + 1 : -1])
    offsets = ShardOffsets(shape[batch_dim], inner, inner, 0, 0)
    if shard_dim is None or size == 1:
        return offsets
    if shard_dim == len(shape) - 1:
        return ShardOffsets(shape[batch_dim], inner, inner, 0, rank * shape[-1])
    if shard_dim == batch_dim + 1:
        return ShardOffsets(shape[batch_dim], inner, inner * size, rank * inner, 0)
    if shard_dim == 0 and batch_dim > 0:
        return ShardOffsets(shape[batch_dim], inner, inner, rank * outer * inner, 0)
    return None


@lru_cache(maxsize=1024)
def part_offsets(
    shape: torch.Size, batch_dim: int, dim: int, ranges: tuple[range, ...]
) -> ShardOffsets | None:
    """Returns the offsets of an activation that holds one or two ranges of dimension `dim`; None if the
    kernel does not support it: the activation has other dimensions than this one, the batch and the last."""
    if len(shape) != 3 or batch_dim + dim != 1 or not 1 <= len(ranges) <= 2:
        return None
    inner = shape[1] if dim == 1 else 1
    first, second, split = ranges[0], ranges[-1], len(ranges[0])
    return ShardOffsets(shape[batch_dim], inner, inner, first.start, 0, split, second.start - split)


def drop_threshold(p: float) -> int:
    """Returns the threshold of probability p: elements whose hash, as int32, is below it are dropped."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def fused_dropout_add(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    sample_keys: torch.Tensor,
    p: float,
    offsets: ShardOffsets,
) -> torch.Tensor:
    """Returns residual + dropout(x + bias), in one launch. A `bias` or `residual` of None is not added.

    x, residual: [outer..., batch, inner..., columns] of one shape; bias: [columns]. sample_keys: int64
    [batch], see `DropoutRNG.sample_keys`. Every addition and product is rounded as in PyTorch's operations.
    """
    return _DropoutAdd.apply(x, bias, residual, sample_keys, p, offsets)


@operator("dropout_add")
def dropout_add_op(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    sample_keys: torch.Tensor,
    p: float,
    offsets: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Launches the kernel. offsets: the fields of `ShardOffsets`. dtype: of the output. The product has x's
    dtype, or without a residual `dtype`."""
    out = torch.empty_like(x, dtype=dtype)
    launch = _launch(x.shape, ShardOffsets(*offsets), p, bias is not None, residual is not None)
    launch(x, bias, residual, out, sample_keys)
    return out


@lru_cache(maxsize=1024)
def _launch(shape: torch.Size, offsets: ShardOffsets, p: float, has_bias: bool, has_residual: bool) -> Launch:
    columns, rows = shape[-1], math.prod(shape[:-1])
    return Launch(
        "triton_kernels.dropout_add_kernel",
        (-(-rows // BLOCK_ROWS), -(-columns // BLOCK_COLUMNS)),
        OPTIONS,
        rows=rows,
        columns=columns,
        **offsets._asdict(),
        dropped_below=drop_threshold(p),
        scale=1.0 / (1.0 - p),
        HAS_BIAS=has_bias,
        HAS_RESIDUAL=has_residual,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
    )


@dropout_add_op.register_fake
def _(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    sample_keys: torch.Tensor,
    p: float,
    offsets: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@first_order
class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        sample_keys: torch.Tensor,
        p: float,
        offsets: ShardOffsets,
    ) -> torch.Tensor:
        # Not saved by autograd: activation recomputation ends when the last tensor is saved, and so before
        # the matrix product whose output this is.
        ctx.sample_keys, ctx.p, ctx.offsets, ctx.x_dtype = sample_keys, p, offsets, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        return dropout_add_op(
            x.contiguous(),
            bias,
            None if residual is None else residual.contiguous(),
            sample_keys,
            p,
            offsets,
            dtype,
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x = grad_bias = grad_residual = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            grad_x = dropout_add_op(
                grad.contiguous(), None, None, ctx.sample_keys, ctx.p, ctx.offsets, ctx.x_dtype
            )
        if ctx.needs_input_grad[1]:
            assert grad_x is not None
            grad_bias = grad_x.reshape(-1, grad_x.shape[-1]).sum(0).to(ctx.bias_dtype)
        if ctx.needs_input_grad[2]:
            grad_residual = grad.to(ctx.residual_dtype)
        return grad_x, grad_bias, grad_residual, None, None, None
