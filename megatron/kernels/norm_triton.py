"""The Triton kernels of layer norm and RMS norm: after a residual addition, and of queries and keys before
their rotation."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.kernels.triton_kernels import _keep, _load_head, _row_keys_of_mask, _store_head


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
    batch,
    inner,
    outer_stride,
    first_row,
    first_column,
    split,
    second_first_row,
    dropped_below,
    scale,
    epsilon,
    IS_RMS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program has a row: total = residual + dropout(x + bias), normed = norm(total). Without `x` the total
    is the residual."""
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
        if HAS_DROPOUT:
            key = _row_keys_of_mask(
                sample_keys, row, rows, batch, inner, outer_stride, first_row, split, second_first_row
            )
            keep = _keep(key, column + first_column, dropped_below)
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
    batch,
    inner,
    outer_stride,
    first_row,
    first_column,
    split,
    second_first_row,
    dropped_below,
    scale,
    IS_RMS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program has `BLOCK_ROWS` rows, one after the other. grad_residual = grad_total + the gradient of the
    norm's input. grad_x = dropout(grad_residual), if it differs. partial_sums[program]: the sums over the
    rows for weight, beta and bias."""
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
        # Loaded again for each row: the sums need the registers.
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
            if HAS_DROPOUT:
                key = _row_keys_of_mask(
                    sample_keys, row, rows, batch, inner, outer_stride, first_row, split, second_first_row
                )
                keep = _keep(key, column + first_column, dropped_below)
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
    """sums[c] = sum of rows_of_sums[r, c] over r, in an order that depends only on the number of rows."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    for first in range(0, rows, BLOCK_ROWS):
        row = first + tl.arange(0, BLOCK_ROWS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(rows_of_sums + place, mask=mask, other=0.0)
    tl.store(sums + column, tl.sum(total, 0).to(sums.dtype.element_ty), mask=column < columns)


@triton.jit
def norm_rotary_kernel(
    projected,
    query,
    key,
    value,
    query_weight,
    key_weight,
    query_beta,
    key_beta,
    cosine,
    sine,
    partial_sums,
    tokens,
    batch,
    groups,
    group,
    table_batch,
    epsilon,
    BACKWARD: tl.constexpr,
    IS_RMS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    SUMS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """`rotary_kernel` with a norm of each query and key head before its rotation. A program has some heads of
    `BLOCK_TOKENS` tokens, one after the other.

    Backward: query, key and value are gradients, and the gradient of `projected` overwrites it.
    partial_sums[program]: the sums of the gradients of the weights of queries and keys, and of their betas.
    """
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    index, place = head // (group + 2), head % (group + 2)
    inside = head < groups * (group + 2)
    is_query, is_key, is_value = inside & (place < group), inside & (place == group), inside & (place > group)
    pair, rest = tl.arange(0, BLOCK_PAIRS), ROTARY_DIM + tl.arange(0, BLOCK_REST)
    in_pairs, in_rest = pair < ROTARY_DIM // 2, rest < HEAD_DIM
    first, second = pair, pair + ROTARY_DIM // 2
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    weights = (query_weight, key_weight, is_query, is_key)
    x_factor = _head_factor(weights, first, in_pairs, ZERO_CENTERED)
    y_factor = _head_factor(weights, second, in_pairs, ZERO_CENTERED)
    z_factor = _head_factor(weights, rest, in_rest, ZERO_CENTERED)
    x_sums = tl.zeros([BLOCK_HEADS, BLOCK_PAIRS], tl.float32)
    y_sums = tl.zeros([BLOCK_HEADS, BLOCK_PAIRS], tl.float32)
    z_sums = tl.zeros([BLOCK_HEADS, BLOCK_REST], tl.float32)
    x_beta_sums, y_beta_sums, z_beta_sums = x_sums, y_sums, z_sums
    for step in range(BLOCK_TOKENS):
        token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + step
        present = inside & (token < tokens)
        of_query = (token * groups * group + index * group + place) * HEAD_DIM
        of_group = (token * groups + index) * HEAD_DIM
        own = is_query & present, is_key & present, is_value & present
        heads = projected + ((token * groups * (group + 2) + head) * HEAD_DIM)[:, None]
        x_mask, z_mask = present[:, None] & in_pairs, present[:, None] & in_rest
        raw_x = tl.load(heads + first, mask=x_mask, other=0.0)
        raw_y = tl.load(heads + second, mask=x_mask, other=0.0)
        raw_z = tl.load(heads + rest, mask=z_mask, other=0.0)
        x, y, z = raw_x.to(tl.float32), raw_y.to(tl.float32), raw_z.to(tl.float32)
        if not IS_RMS:
            mean = ((tl.sum(x, 1) + tl.sum(y, 1) + tl.sum(z, 1)) / HEAD_DIM)[:, None]
            x, y, z = (
                tl.where(x_mask, x - mean, 0.0),
                tl.where(x_mask, y - mean, 0.0),
                tl.where(z_mask, z - mean, 0.0),
            )
        squares = tl.sum(x * x, 1) + tl.sum(y * y, 1) + tl.sum(z * z, 1)
        rate = (1.0 / tl.sqrt_rn(squares / HEAD_DIM + epsilon))[:, None]
        x, y, z = x * rate, y * rate, z * rate
        table = (token // batch * table_batch + token % batch % table_batch) * ROTARY_DIM + first
        in_table = in_pairs & (token < tokens)
        cos = tl.load(cosine + table, mask=in_table, other=0.0)[None, :]
        sin = tl.load(sine + table, mask=in_table, other=0.0)[None, :]
        dtype = projected.dtype.element_ty
        if BACKWARD:
            dx = _load_head(query, key, value, of_query, of_group, own[0], own[1], own[2], first, in_pairs)
            dy = _load_head(query, key, value, of_query, of_group, own[0], own[1], own[2], second, in_pairs)
            dz = _load_head(query, key, value, of_query, of_group, own[0], own[1], own[2], rest, in_rest)
            turned_x = dx.to(tl.float32) * cos + dy.to(tl.float32) * sin
            turned_y = dy.to(tl.float32) * cos - dx.to(tl.float32) * sin
            kept_z = dz.to(tl.float32)
            x_sums += turned_x * x
            y_sums += turned_y * y
            z_sums += kept_z * z
            if query_beta is not None:
                x_beta_sums += turned_x
                y_beta_sums += turned_y
                z_beta_sums += kept_z
            turned_x, turned_y, kept_z = turned_x * x_factor, turned_y * y_factor, kept_z * z_factor
            inner = tl.sum(turned_x * x, 1) + tl.sum(turned_y * y, 1) + tl.sum(kept_z * z, 1)
            inner = (inner / HEAD_DIM)[:, None]
            x, y, z = turned_x - x * inner, turned_y - y * inner, kept_z - z * inner
            if not IS_RMS:
                shift = ((tl.sum(turned_x, 1) + tl.sum(turned_y, 1) + tl.sum(kept_z, 1)) / HEAD_DIM)[:, None]
                x, y, z = x - shift, y - shift, z - shift
            keeps = is_value[:, None]
            tl.store(heads + first, tl.where(keeps, dx, (x * rate).to(dtype)), mask=x_mask)
            tl.store(heads + second, tl.where(keeps, dy, (y * rate).to(dtype)), mask=x_mask)
            tl.store(heads + rest, tl.where(keeps, dz, (z * rate).to(dtype)), mask=z_mask)
        else:
            x, y, z = x * x_factor, y * y_factor, z * z_factor
            if query_beta is not None:
                betas = (query_beta, key_beta, is_query, is_key)
                x += _head_factor(betas, first, in_pairs, False)
                y += _head_factor(betas, second, in_pairs, False)
                z += _head_factor(betas, rest, in_rest, False)
            keeps = is_value[:, None]
            turned_x, turned_y = x * cos - y * sin, y * cos + x * sin
            x = tl.where(keeps, raw_x, turned_x.to(dtype))
            y = tl.where(keeps, raw_y, turned_y.to(dtype))
            z = tl.where(keeps, raw_z, z.to(dtype))
            _store_head(query, key, value, of_query, of_group, own[0], own[1], own[2], first, in_pairs, x)
            _store_head(query, key, value, of_query, of_group, own[0], own[1], own[2], second, in_pairs, y)
            _store_head(query, key, value, of_query, of_group, own[0], own[1], own[2], rest, in_rest, z)
    if BACKWARD:
        program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        sums = partial_sums + program * SUMS * HEAD_DIM
        _store_sums(sums, x_sums, is_query, is_key, first, in_pairs, HEAD_DIM)
        _store_sums(sums, y_sums, is_query, is_key, second, in_pairs, HEAD_DIM)
        _store_sums(sums, z_sums, is_query, is_key, rest, in_rest, HEAD_DIM)
        if query_beta is not None:
            _store_sums(sums + 2 * HEAD_DIM, x_beta_sums, is_query, is_key, first, in_pairs, HEAD_DIM)
            _store_sums(sums + 2 * HEAD_DIM, y_beta_sums, is_query, is_key, second, in_pairs, HEAD_DIM)
            _store_sums(sums + 2 * HEAD_DIM, z_beta_sums, is_query, is_key, rest, in_rest, HEAD_DIM)


@triton.jit
def _head_factor(vectors, column, in_columns, ZERO_CENTERED: tl.constexpr):
    """Returns [heads, columns]: the vector of queries for query heads, the vector of keys for the others."""
    of_query, of_key, is_query, is_key = vectors
    query = tl.load(of_query + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    key = tl.load(of_key + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    factor = tl.where(is_query[:, None], query, key)
    if ZERO_CENTERED:
        factor += 1.0
    return factor


@triton.jit
def _store_sums(sums, of_heads, is_query, is_key, column, in_columns, HEAD_DIM: tl.constexpr):
    """Sums [heads, columns] over the query heads, and over the key heads."""
    tl.store(sums + column, tl.sum(tl.where(is_query[:, None], of_heads, 0.0), 0), mask=in_columns)
    tl.store(sums + HEAD_DIM + column, tl.sum(tl.where(is_key[:, None], of_heads, 0.0), 0), mask=in_columns)
