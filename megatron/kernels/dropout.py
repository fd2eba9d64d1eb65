"""Operators of hash dropout, fused with bias and residual addition.

The mask is bitwise equal to the mask of `megatron.mpu.random`. It is not stored: the backward pass computes
the hash a second time. So an element costs only its reads and its write: in 16 bits 6 bytes with a residual,
4 bytes without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from megatron.kernels.column_sums import TILE_ROWS, num_blocks, rows_per_block, sum_blocks
from megatron.kernels.operators import Launch, first_order, operator

BLOCK_ROWS, BLOCK_COLUMNS = 4, 512
SUM_COLUMNS = 256
# Options of Triton's compiler. Without fused multiply-add the product is rounded before the residual is
# added, as in PyTorch.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


class ShardOffsets(NamedTuple):
    """The position of this rank's shard in the mask of the full activation.

    The activation is read as [outer, batch, inner, columns]. Row (o, b, i) of the shard is row o *
    outer_stride + i + first_row of sample b in the full mask. Column c is column c + first_column. From row
    `split` of the shard on, the rows of a sample have `second_first_row` instead of `first_row`.
    """

    batch: int
    inner: int
    outer_stride: int
    first_row: int
    first_column: int
    split: int = 2**62
    second_first_row: int = 0


class KernelMask(NamedTuple):
    """The values from which a kernel computes a dropout mask."""

    sample_keys: torch.Tensor | None
    """The key of each sample, int64 [batch]: see `DropoutRNG.sample_keys`; None without dropout."""
    p: float
    """Probability that an element is dropped; 0 without dropout."""
    offsets: ShardOffsets


NO_DROPOUT = KernelMask(None, 0.0, ShardOffsets(1, 1, 1, 0, 0))


@lru_cache(maxsize=1024)
def shard_offsets(
    shape: torch.Size, batch_dim: int, shard_dim: int | None, rank: int, size: int
) -> ShardOffsets | None:
    """Returns the offsets of the shard of TP rank `rank` of `size`. Returns None if the kernel does not
    support the sharded dimension: it supports the last one, the first one before the batch, and the one after
    the batch."""
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
    """Returns the offsets of an activation that holds one or two ranges of dimension `dim`. Returns None if
    the kernel does not support it: the activation has dimensions other than `dim`, the batch and the last
    one."""
    if len(shape) != 3 or batch_dim + dim != 1 or not 1 <= len(ranges) <= 2:
        return None
    inner = shape[1] if dim == 1 else 1
    first, second, split = ranges[0], ranges[-1], len(ranges[0])
    return ShardOffsets(shape[batch_dim], inner, inner, first.start, 0, split, second.start - split)


def drop_threshold(p: float) -> int:
    """Returns the threshold for probability p: elements whose hash, as int32, is below it are dropped."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def fused_dropout_add(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    mask: KernelMask,
) -> torch.Tensor:
    """Returns residual + dropout(x + bias), in one launch. A `bias` or `residual` of None adds nothing.

    x, residual: [outer..., batch, inner..., columns], of equal shape. bias: [columns]. Every addition and
    product is rounded as in PyTorch's operations.
    """
    return _DropoutAdd.apply(x, bias, residual, mask)


@operator("dropout_add")
def dropout_add_op(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    sample_keys: torch.Tensor | None,
    p: float,
    offsets: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Launches the kernel of `fused_dropout_add`. offsets: the fields of `ShardOffsets`. dtype: the dtype of
    the output. dropout(x + bias) is rounded to x's dtype before the residual is added, or without a residual
    to `dtype`."""
    out = torch.empty_like(x, dtype=dtype)
    _launch(x.shape, ShardOffsets(*offsets), p)(x, bias, residual, out, sample_keys)
    return out


@lru_cache(maxsize=1024)
def _launch(shape: torch.Size, offsets: ShardOffsets, p: float, backward: bool = False) -> Launch:
    columns, rows = shape[-1], math.prod(shape[:-1])
    numbers: dict[str, Any] = {
        "rows": rows,
        "columns": columns,
        "offsets": offsets,
        "dropped_below": drop_threshold(p),
        "scale": 1.0 / (1.0 - p),
        "BLOCK_ROWS": rows_per_block(rows) if backward else BLOCK_ROWS,
        "BLOCK_COLUMNS": SUM_COLUMNS if backward else BLOCK_COLUMNS,
    }
    grid = (-(-rows // numbers["BLOCK_ROWS"]), -(-columns // numbers["BLOCK_COLUMNS"]))
    if backward:
        return Launch("triton_kernels.dropout_backward_kernel", grid, OPTIONS, TILE_ROWS=TILE_ROWS, **numbers)
    return Launch("triton_kernels.dropout_add_kernel", grid, OPTIONS, **numbers)


@operator("dropout_backward")
def dropout_backward_op(
    grad: torch.Tensor,
    sample_keys: torch.Tensor,
    p: float,
    offsets: Sequence[int],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns dropout(grad) in `dtype`, and its sums over blocks of rows (see `column_sums`)."""
    blocks, columns = num_blocks(grad.shape[:-1].numel()), grad.shape[-1]
    grad_x = torch.empty_like(grad, dtype=dtype)
    sums = grad.new_empty((blocks, columns), dtype=torch.float32)
    _launch(grad.shape, ShardOffsets(*offsets), p, backward=True)(grad, grad_x, sums, sample_keys)
    return grad_x, sums


@first_order
class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        mask: KernelMask,
    ) -> torch.Tensor:
        # Autograd does not save the mask: activation recomputation stops after the last saved tensor, so it
        # skips the matrix product whose output is `x`.
        ctx.mask, ctx.x_dtype = mask, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        return dropout_add_op(x, bias, residual, *mask, dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x = grad_bias = grad_residual = None
        keys, p, offsets = ctx.mask
        sums_rows = ctx.needs_input_grad[1]
        if keys is None:
            grad_x = grad.to(ctx.x_dtype)
            if sums_rows:
                grad_bias = grad_x.reshape(-1, grad_x.shape[-1]).sum(0).to(ctx.bias_dtype)
        elif sums_rows:
            grad_x, sums = dropout_backward_op(grad.contiguous(), keys, p, offsets, ctx.x_dtype)
            grad_bias = sum_blocks(sums, ctx.bias_dtype)
        elif ctx.needs_input_grad[0]:
            grad_x = dropout_add_op(grad.contiguous(), None, None, keys, p, offsets, ctx.x_dtype)
        if ctx.needs_input_grad[2]:
            grad_residual = grad.to(ctx.residual_dtype)
        return grad_x, grad_bias, grad_residual, None
