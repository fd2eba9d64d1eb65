"""The Triton kernels of `megatron.kernels.grouped_linear`, for bf16 and fp16.

`offsets` are the ends of the experts' rows. All rows of a row tile belong to one expert. Element offsets are
int64, except within a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply_groups_kernel(
    x,
    matrices,
    bias,
    out,
    offsets,
    experts,
    columns,
    inner,
    TRANSPOSED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):
    """Computes out_e = x_e @ matrices[e].T + bias[e], or with TRANSPOSED x_e @ matrices[e], one tile per
    program.

    The programs of a row tile are neighbors, so that they read its rows from the L2 cache. Rows and columns
    outside of the matrices read the last row or column, and are not stored. EVEN: whether BLOCK_INNER divides
    `inner`.
    """
    column_tiles = tl.cdiv(columns, BLOCK_COLUMNS)
    expert, first_row, end = find_tile(
        offsets, tl.program_id(0) // column_tiles, experts, BLOCK_EXPERTS, BLOCK_ROWS
    )
    row = first_row + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) % column_tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    place = tl.arange(0, BLOCK_INNER)
    in_columns = (column < columns)[None, :]
    x += tl.minimum(row, end - 1).to(tl.int64)[:, None] * inner + place[None, :]
    matrices += expert.to(tl.int64) * columns * inner
    if TRANSPOSED:
        matrices += place[:, None].to(tl.int64) * columns + column[None, :]
    else:
        matrices += column[None, :].to(tl.int64) * inner + place[:, None]

    acc = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, inner, BLOCK_INNER):
        if EVEN:
            a = tl.load(x)
            b = tl.load(matrices, mask=in_columns, other=0.0)
        else:
            inside = place < inner - start
            a = tl.load(x, mask=inside[None, :], other=0.0)
            b = tl.load(matrices, mask=inside[:, None] & in_columns, other=0.0)
        acc = tl.dot(a, b, acc)
        x += BLOCK_INNER
        matrices += BLOCK_INNER * columns if TRANSPOSED else BLOCK_INNER
    if bias is not None:
        acc += tl.load(bias + expert * columns + column, mask=column < columns, other=0.0)[None, :]
    out += row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, acc.to(out.dtype.element_ty), mask=(row < end)[:, None] & in_columns)


@triton.jit
def find_tile(offsets, tile, experts, BLOCK_EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Returns the expert of a row tile, the tile's first row, and the end of the expert's rows."""
    expert = tl.arange(0, BLOCK_EXPERTS)
    ends = tl.load(offsets + expert, mask=expert < experts, other=0)
    begins = tl.load(offsets + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    tiles = (ends - begins + BLOCK_ROWS - 1) // BLOCK_ROWS
    is_before = (tl.cumsum(tiles) <= tile) & (expert < experts)
    found = tl.sum(is_before.to(tl.int32))
    tile -= tl.sum(tl.where(is_before, tiles, 0))
    begin, end = _rows_of(offsets, found)
    return found, begin + tile * BLOCK_ROWS, end


@triton.jit
def _rows_of(offsets, expert):
    """Returns the first row of an expert, and the end of its rows."""
    return tl.load(offsets + expert - 1, mask=expert > 0, other=0), tl.load(offsets + expert)


@triton.jit
def multiply_within_groups_kernel(
    a,
    b,
    out,
    offsets,
    rows,
    columns,
    ADD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):
    """Computes out[e] = a_e.T @ b_e, [rows, columns], one tile per program. With ADD it adds the product to
    out[e]."""
    column_tiles = tl.cdiv(columns, BLOCK_COLUMNS)
    tiles = tl.cdiv(rows, BLOCK_ROWS) * column_tiles
    expert, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    begin, end = _rows_of(offsets, expert)
    row = tile // column_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tile % column_tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    place = begin + tl.arange(0, BLOCK_INNER)
    in_rows, in_columns = (row < rows)[:, None], (column < columns)[None, :]
    a += place.to(tl.int64)[None, :] * rows + row[:, None]
    b += place.to(tl.int64)[:, None] * columns + column[None, :]

    acc = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(begin, end, BLOCK_INNER):
        inside = start + tl.arange(0, BLOCK_INNER) < end
        acc = tl.dot(
            tl.load(a, mask=inside[None, :] & in_rows, other=0.0),
            tl.load(b, mask=inside[:, None] & in_columns, other=0.0),
            acc,
        )
        a += BLOCK_INNER * rows
        b += BLOCK_INNER * columns
    out += (expert.to(tl.int64) * rows + row)[:, None] * columns
    stored_rows = in_rows
    if ADD:  # an expert without rows adds nothing
        stored_rows = (row < tl.where(begin < end, rows, 0))[:, None]
    # Half a tile at a time needs fewer registers, so that two programs fit on a multiprocessor of an H100.
    half: tl.constexpr = BLOCK_COLUMNS // 2
    parts = tl.split(tl.permute(tl.reshape(acc, [BLOCK_ROWS, 2, half]), (0, 2, 1)))
    for part in tl.static_range(2):
        column = tile % column_tiles * BLOCK_COLUMNS + part * half + tl.arange(0, half)
        stored = stored_rows & (column < columns)[None, :]
        value = parts[part]
        if ADD:
            value += tl.load(out + column[None, :], mask=stored, other=0.0)
        tl.store(out + column[None, :], value.to(out.dtype.element_ty), mask=stored)


@triton.jit
def sum_groups_kernel(x, out, offsets, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Program (c, e) sums column block c over the rows of expert e, in a fixed order."""
    expert = tl.program_id(1)
    begin, end = _rows_of(offsets, expert)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(begin, end, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        inside = (row < end)[:, None] & (column < columns)[None, :]
        acc += tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    total = tl.sum(acc, 0).to(out.dtype.element_ty)
    tl.store(out + expert.to(tl.int64) * columns + column, total, mask=column < columns)
