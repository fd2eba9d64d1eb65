"""The Triton kernels of `megatron.kernels.fp8`. A block with one scale has 128 elements, or 128 x 128."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.kernels.grouped_triton import find_tile


# The number of rows of an expert changes in each step. The kernels are not compiled separately for each
# number.
@triton.jit(do_not_specialize=["rows", "scale_pitch"])
def quantize_kernel(
    x,
    codes,
    transposed,
    scales,
    transposed_scales,
    amax,
    rows,
    scale_pitch,
    columns,
    group_rows,
    transposed_pitch,
    EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantizes x [rows, columns]. Program (r, c) quantizes the tile in row tile r and column tile c.

    With `amax` all elements have one scale. Otherwise, with `transposed_scales`, each tile has one scale;
    without them each row of a tile has one, scales[column tile, row]. x consists of matrices of `group_rows`
    rows each. scale_pitch, transposed_pitch: elements in memory per row of the scales.
    """
    row_tile, column_tile = tl.program_id(0), tl.program_id(1)
    row = row_tile * BLOCK + tl.arange(0, BLOCK)
    column = column_tile * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    group_tiles = group_rows // BLOCK
    group, tile_in_group = row_tile // group_tiles, row_tile % group_tiles
    if amax is not None:
        scale, inverse = _scale_of(_magnitude(tl.load(amax)), EXPONENT)
        tl.store(scales, scale, mask=row_tile + column_tile == 0)
        values *= inverse
    elif transposed_scales is not None:
        scale, inverse = _scale_of(tl.max(tl.max(_magnitude(values), 1), 0), EXPONENT)
        tl.store(scales + row_tile.to(tl.int64) * scale_pitch + column_tile, scale)
        first = (group * tl.num_programs(1) + column_tile).to(tl.int64) * transposed_pitch
        tl.store(transposed_scales + first + tile_in_group, scale)
        values *= inverse
    else:
        scale, inverse = _scale_of(tl.max(_magnitude(values), 1), EXPONENT)
        tl.store(scales + column_tile.to(tl.int64) * scale_pitch + row, scale, mask=row < rows)
        values *= inverse[:, None]
    tl.store(codes + place, values.to(codes.dtype.element_ty), mask=inside)
    if transposed is not None:
        transposed += group.to(tl.int64) * group_rows * columns
        place = column.to(tl.int64)[:, None] * group_rows + tile_in_group * BLOCK + tl.arange(0, BLOCK)[None]
        tl.store(transposed + place, tl.trans(values).to(codes.dtype.element_ty))


@triton.jit
def _magnitude(values):
    """Returns the bits of the absolute values. As integers they are ordered like the values, and NaN is the
    largest. (A maximum of floats would ignore NaN.)"""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(bits, EXPONENT: tl.constexpr):
    """Returns the smallest power of two with amax / scale <= 1.75 * 2 ** EXPONENT, and its inverse. They are
    inf and 0 if amax is not finite. bits: the bits of amax."""
    exponent = tl.maximum((tl.minimum(bits, 0x7F800000) + 0x1FFFFF) // 0x800000 - EXPONENT, 1)
    is_finite = bits < 0x7F800000
    scale = tl.where(is_finite, exponent * 0x800000, 0x7F800000).to(tl.float32, bitcast=True)
    inverse = tl.where(is_finite, (254 - exponent) * 0x800000, 0).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit(do_not_specialize=["rows", "x_scale_block"])
def multiply_fp8_kernel(
    x,
    x_scales,
    matrices,
    scales,
    bias,
    out,
    offsets,
    rows,
    x_scale_block,
    columns,
    inner,
    experts,
    x_scale_row,
    scale_expert,
    scale_column,
    scale_block,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes out_e = x_e @ matrices[e].T + bias[e], one tile per program, in the order of
    `grouped_triton.multiply_groups_kernel`. Without `offsets` there is one matrix. Each block of the inner
    dimension is summed separately, and the blocks' sums are added in fp32. x_scale_block, x_scale_row,
    scale_expert, scale_column, scale_block: strides of the scales."""
    column_tiles = columns // BLOCK
    tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    if offsets is not None:
        expert, first_row, end = find_tile(offsets, tile, experts, BLOCK_EXPERTS, BLOCK)
    else:
        expert, first_row, end = 0 * tile, tile * BLOCK, rows
    row = first_row + tl.arange(0, BLOCK)
    column = column_tile * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, BLOCK)
    existing = tl.minimum(row, end - 1).to(tl.int64)
    x += existing[:, None] * inner + place[None, :]
    x_scales += existing * x_scale_row
    matrices += expert.to(tl.int64) * columns * inner + column[None, :].to(tl.int64) * inner + place[:, None]
    scales += expert * scale_expert + column_tile * scale_column

    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for _ in range(0, inner, BLOCK):
        product = tl.dot(tl.load(x), tl.load(matrices))
        acc += product * (tl.load(x_scales) * tl.load(scales))[:, None]
        x += BLOCK
        matrices += BLOCK
        x_scales += x_scale_block
        scales += scale_block
    if bias is not None:
        acc += tl.load(bias + expert * columns + column)[None, :]
    out += row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, acc.to(out.dtype.element_ty), mask=(row < end)[:, None])
