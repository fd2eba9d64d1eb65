"""The kernel of `megatron::dropout_add`. The hash is that of `megatron.mpu.random`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.kernels.dropout import ShardOffsets

BLOCK_ROWS, BLOCK_COLUMNS = 4, 512
# Compile options. No fused multiply-add: the product is rounded before the residual is added, as in PyTorch.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def dropout_add_kernel(
    x,
    bias,
    residual,
    out,
    sample_keys,
    rows,
    columns,
    batch,
    inner,
    outer_stride,
    first_row,
    first_column,
    dropped_below,
    scale,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """out[r, c] = residual[r, c] + keep(r, c) * (x[r, c] + bias[c]) * scale, a tile per program."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    keep = _keep(
        row, column, sample_keys, rows, batch, inner, outer_stride, first_row, first_column, dropped_below
    )

    inside = (row < rows)[:, None] & (column < columns)[None, :]
    element = row[:, None] * columns + column[None, :]
    dtype = x.dtype.element_ty if HAS_RESIDUAL else out.dtype.element_ty
    value = tl.load(x + element, mask=inside, other=0.0).to(dtype).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        value = value.to(dtype).to(tl.float32)
    # A product, not a choice: a dropped NaN stays NaN, as in the twin.
    value = (value * keep.to(tl.float32) * scale).to(dtype)
    if HAS_RESIDUAL:
        value = tl.load(residual + element, mask=inside, other=0.0).to(tl.float32) + value.to(tl.float32)
    tl.store(out + element, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _keep(row, column, sample_keys, rows, batch, inner, outer_stride, first_row, first_column, dropped_below):
    """Booleans [rows, columns]: the mask of `mpu.random.keep_mask`."""
    sample_key = tl.load(sample_keys + row // inner % batch, mask=row < rows, other=0)
    full_row = row // inner // batch * outer_stride + row % inner + first_row
    row_key = _mix64((sample_key + full_row * -0x61C8864680B583EB).to(tl.uint64))
    low, high = row_key.to(tl.uint32), (row_key >> 32).to(tl.uint32)
    bits = _mix32((column + first_column).to(tl.uint32))[None, :] ^ low[:, None]
    bits *= (high | 1)[:, None]
    bits ^= bits >> 15
    bits *= 0x2C1B3C6D
    return bits.to(tl.int32, bitcast=True) >= dropped_below


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


def launch(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    sample_keys: torch.Tensor,
    out: torch.Tensor,
    offsets: ShardOffsets,
    dropped_below: int,
    scale: float,
) -> None:
    """Fills `out`. All tensors are contiguous; x, residual and out have one shape."""
    columns = x.shape[-1]
    rows = x.numel() // max(columns, 1)
    if not x.numel():
        return
    grid = (triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(columns, BLOCK_COLUMNS))
    dropout_add_kernel[grid](
        x,
        bias,
        residual,
        out,
        sample_keys,
        rows,
        columns,
        offsets.batch,
        offsets.inner,
        offsets.outer_stride,
        offsets.first_row,
        offsets.first_column,
        dropped_below,
        scale,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        **OPTIONS,
    )
