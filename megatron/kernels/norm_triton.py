"""The Triton kernels of layer norm and RMS norm after a residual addition, and of sums over rows."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.kernels.triton_kernels import _keep, _row_keys_of_mask


@triton.jit
def add_norm_kernel(
    weight,
    beta,
    x,
    bias,
    residual,
    total,
    normed,
    statistics,
    sample_keys,
    rows,
    width,
    offsets,
    dropped_below,
    scale,
    epsilon,
    IS_RMS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes total = residual + dropout(x + bias) and normed = norm(total), one row per program. Without
    `x` the total is the residual."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    value = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if x is not None:
        dtype = x.dtype.element_ty
        added = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            added += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
            added = added.to(dtype).to(tl.float32)
        if sample_keys is not None:
            key = _row_keys_of_mask(sample_keys, row, rows, offsets)
            keep = _keep(key, column + offsets.first_column, dropped_below)
            added = (added * keep.to(tl.float32) * scale).to(dtype).to(tl.float32)
        rounded = (value + added).to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if not IS_RMS:
        mean = tl.sum(value, 0) / width
        tl.store(statistics + rows + row, mean)
        value = tl.where(inside, value - mean, 0.0)
    rate = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / width + epsilon)
    tl.store(statistics + row, rate)
    result = value * rate * _factor(weight, column, inside, ZERO_CENTERED)
    if beta is not None:
        result += tl.load(beta + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + place, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _factor(weight, column, inside, ZERO_CENTERED: tl.constexpr):
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        factor += 1.0
    return factor


@triton.jit
def add_norm_backward_kernel(
    weight,
    beta,
    total,
    statistics,
    grad_normed,
    grad_total,
    grad_residual,
    grad_x,
    partial_sums,
    sample_keys,
    rows,
    width,
    offsets,
    dropped_below,
    scale,
    IS_RMS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the gradients. A program computes `BLOCK_ROWS` rows, one after the other. grad_residual:
    grad_total plus the gradient of the norm's input. grad_x: dropout(grad_residual), written only if it
    differs from grad_residual. partial_sums[program]: the sums over the program's rows for weight, beta and
    bias."""
    block = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    of_weight = tl.zeros([BLOCK], tl.float32)
    of_beta = tl.zeros([BLOCK], tl.float32)
    of_bias = tl.zeros([BLOCK], tl.float32)
    for index in range(BLOCK_ROWS):
        row = block.to(tl.int64) * BLOCK_ROWS + index
        mask = inside & (row < rows)
        place = row * width + column
        rate = tl.load(statistics + row, mask=row < rows, other=0.0)
        value = tl.load(total + place, mask=mask, other=0.0).to(tl.float32)
        if not IS_RMS:
            mean = tl.load(statistics + rows + row, mask=row < rows, other=0.0)
            value = tl.where(mask, value - mean, 0.0)
        value = value * rate
        grad = tl.load(grad_normed + place, mask=mask, other=0.0).to(tl.float32)
        of_weight += grad * value
        if beta is not None:
            of_beta += grad
        # The weight is loaded again for each row, because the sums need the registers.
        grad = grad * _factor(weight, column, inside, ZERO_CENTERED)
        result = grad - value * (tl.sum(grad * value, 0) / width)
        if not IS_RMS:
            result -= tl.sum(grad, 0) / width
        result = result * rate
        if grad_total is not None:
            result += tl.load(grad_total + place, mask=mask, other=0.0).to(tl.float32)
        rounded = result.to(grad_residual.dtype.element_ty)
        tl.store(grad_residual + place, rounded, mask=mask)
        added = rounded.to(tl.float32)
        if grad_x is not None:
            if sample_keys is not None:
                key = _row_keys_of_mask(sample_keys, row, rows, offsets)
                keep = _keep(key, column + offsets.first_column, dropped_below)
                added = added * keep.to(tl.float32) * scale
            of_x = added.to(grad_x.dtype.element_ty)
            tl.store(grad_x + place, of_x, mask=mask)
            added = of_x.to(tl.float32)
        if HAS_BIAS:
            of_bias += tl.where(mask, added, 0.0)
    partial_sums += block.to(tl.int64) * SUMS * width
    tl.store(partial_sums + column, of_weight, mask=inside)
    if beta is not None:
        tl.store(partial_sums + width + column, of_beta, mask=inside)
    if HAS_BIAS:
        tl.store(partial_sums + (SUMS - 1) * width + column, of_bias, mask=inside)


@triton.jit
def sum_rows_kernel(rows_of_sums, sums, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sets sums[c] to the sum of rows_of_sums[r, c] over r, in an order that depends only on the number of
    rows."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    for first in range(0, rows, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(rows_of_sums + place, mask=mask, other=0.0)
    tl.store(sums + column, tl.sum(total, 0).to(sums.dtype.element_ty), mask=column < columns)
