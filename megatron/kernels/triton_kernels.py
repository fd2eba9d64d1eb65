"""The Triton kernels of dropout, norms, cross entropy and the embedding's gradient.

Their operators are in other files, because importing triton takes 0.4 s and the package is optional.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    split,
    second_first_row,
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
    outer_row, inner_row = row // inner // batch, row % inner
    first_row = tl.where(outer_row * inner + inner_row < split, first_row, second_first_row)
    full_row = outer_row * outer_stride + inner_row + first_row
    sample_key = tl.load(sample_keys + row // inner % batch, mask=row < rows, other=0)
    keep = _keep(sample_key, full_row, column + first_column, dropped_below)

    inside = (row < rows)[:, None] & (column < columns)[None, :]
    element = row[:, None] * columns + column[None, :]
    dtype = x.dtype.element_ty if HAS_RESIDUAL else out.dtype.element_ty
    value = tl.load(x + element, mask=inside, other=0.0).to(dtype).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        value = value.to(dtype).to(tl.float32)
    # A product, not a selection: a dropped NaN stays NaN, as in the reference implementation.
    value = (value * keep.to(tl.float32) * scale).to(dtype)
    if HAS_RESIDUAL:
        value = tl.load(residual + element, mask=inside, other=0.0).to(tl.float32) + value.to(tl.float32)
    tl.store(out + element, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _keep(sample_key, row, column, dropped_below):
    """Returns the mask of `mpu.random.keep_mask` as booleans [rows, columns], from the keys of the rows'
    samples, and rows and columns of the full activation."""
    row_key = _mix64((sample_key + row * -0x61C8864680B583EB).to(tl.uint64))
    low, high = row_key.to(tl.uint32), (row_key >> 32).to(tl.uint32)
    bits = _mix32(column.to(tl.uint32))[None, :] ^ low[:, None]
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


@triton.jit
def chunk_squares_kernel(starts, lengths, squares, CHUNK: tl.constexpr):
    """Program i sets squares[i] to the sum of squares of lengths[i] fp32 elements at address starts[i]."""
    chunk = tl.program_id(0)
    values = tl.load(starts + chunk).to(tl.pointer_type(tl.float32))
    place = tl.arange(0, CHUNK)
    x = tl.load(values + place, mask=place < tl.load(lengths + chunk), other=0.0).to(tl.float64)
    tl.store(squares + chunk, tl.sum(x * x))


@triton.jit
def chunk_norms_kernel(squares, first_chunks, norms, BLOCK: tl.constexpr):
    """Program i sets norms[i] to the root of the sum of squares[first_chunks[i] : first_chunks[i + 1]]."""
    tensor = tl.program_id(0)
    end = tl.load(first_chunks + tensor + 1)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for first in range(tl.load(first_chunks + tensor), end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        total += tl.load(squares + place, mask=place < end, other=0.0)
    tl.store(norms + tensor, tl.sqrt(tl.sum(total)))


@triton.jit
def logit_statistics_kernel(
    logits,
    targets,
    found,
    rows,
    columns,
    num_valid_columns,
    gradient_scale,
    z_loss_weight,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """found[:, row] = largest logit, sum(exp(logit - largest)), logit of the target; then the gradient."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * columns
    # Each lane has its own largest value and sum, combined at the end. Finite, so that no lane gives NaN.
    largest = tl.full([BLOCK], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_valid_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < num_valid_columns, other=-float("inf")).to(tl.float32)
        new_largest = tl.maximum(largest, x)
        total = total * tl.exp(largest - new_largest) + tl.exp(x - new_largest)
        largest = new_largest
    row_largest = tl.max(largest, 0)
    exp_sum = tl.sum(total * tl.exp(largest - row_largest), 0)
    target = tl.load(targets + row)
    target_logit = tl.load(logits + target, mask=target >= 0, other=0.0).to(tl.float32)
    tl.store(found + row, row_largest)
    tl.store(found + rows + row, exp_sum)
    tl.store(found + 2 * rows + row, target_logit)
    if WITH_GRADIENT:
        _write_gradient(
            logits,
            target,
            row_largest,
            exp_sum,
            columns,
            num_valid_columns,
            gradient_scale,
            z_loss_weight,
            BLOCK,
        )


@triton.jit
def write_gradient_kernel(
    logits,
    targets,
    largest,
    exp_sums,
    columns,
    num_valid_columns,
    gradient_scale,
    z_loss_weight,
    BLOCK: tl.constexpr,
):
    """Writes the gradient of a row from the statistics over the full vocabulary."""
    row = tl.program_id(0)
    _write_gradient(
        logits + row.to(tl.int64) * columns,
        tl.load(targets + row),
        tl.load(largest + row),
        tl.load(exp_sums + row),
        columns,
        num_valid_columns,
        gradient_scale,
        z_loss_weight,
        BLOCK,
    )


@triton.jit
def _write_gradient(
    logits,
    target,
    largest,
    exp_sum,
    columns,
    num_valid_columns,
    gradient_scale,
    z_loss_weight,
    BLOCK: tl.constexpr,
):
    factor = gradient_scale / exp_sum * (1.0 + 2.0 * z_loss_weight * (largest + tl.log(exp_sum)))
    # No thread may overwrite the target's logit before all have read it.
    tl.debug_barrier()
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < num_valid_columns, other=-float("inf")).to(tl.float32)
        gradient = tl.exp(x - largest) * factor - tl.where(column == target, gradient_scale, 0.0)
        tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < columns)


@triton.jit
def add_rows_kernel(total, ids, order, rows, tokens, width, BLOCK: tl.constexpr):
    """Program (i, c): if ids[i] is the first id of its value, adds the sum of all rows of this id."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(ids + token)
    before = tl.load(ids + token - 1, mask=token > 0, other=-1)
    if row != before:
        added = tl.full([BLOCK], 0.0, tl.float32)
        following = row
        while following == row:
            source = tl.load(order + token) * width
            added += tl.load(rows + source + column, mask=inside, other=0.0).to(tl.float32)
            token += 1
            following = tl.load(ids + token, mask=token < tokens, other=-1)
        place = total + row * width + column
        tl.store(place, tl.load(place, mask=inside, other=0.0) + added, mask=inside)
