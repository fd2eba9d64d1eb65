"""Products of FP8 matrices. Blocks of their elements have scales.

A tensor is stored as 8-bit codes and fp32 scales: value = code * scale. Along the inner dimension of a
product, 128 elements share a scale: 128 elements of one row (activations and gradients, 1 x 128), or of 128
rows (matrices, 128 x 128), as in DeepSeek-V3 (arXiv 2412.19437, section 3.3). So the code of an element
depends on at most 128 x 128 elements, and not on how a tensor is divided into shards whose sizes are
multiples of 128. With `amax` a whole tensor has one scale.

A scale is the smallest power of two for which the largest code does not overflow, as in Transformer Engine's
Float8BlockScaling. Multiplication by a power of two is exact, so a scale adds no rounding, and a last-bit
difference of the largest element almost never changes the scale.

Implementations of a product:

    F.scaled_mm   one matrix, on devices where its results agree with the reference: with scales of blocks on
                  Hopper with CUDA 12.9 or newer, with scales of whole tensors on all GPUs with FP8
    Triton        everything else on GPUs: quantization, and products with the matrices of experts
    PyTorch       the reference: dequantizes, and multiplies in fp32

No GPU multiplies FP8 matrices whose inner dimension is not contiguous. Therefore matrices are stored a second
time, transposed, for the gradient of the input. One kernel writes both copies.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from megatron.config.sections.fp8_layers import BLOCK
from megatron.kernels.grouped_linear import Groups
from megatron.kernels.operators import Launch, operator
from megatron.kernels.selection import uses_kernels

_LOG = logging.getLogger(__name__)
_LARGEST_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""Format -> n, where the largest value of the format is 1.75 * 2 ** n (448 and 57,344)."""
_OPTIONS = {"num_warps": 8, "num_stages": 3}
_INFINITY = 0x7F800000
"""The bits of inf in fp32."""


class Quantized(NamedTuple):
    """An FP8 tensor: codes [..., rows, k] and scales.

    scales: activations have [k / 128, rows], and matrices [..., rows / 128, k / 128, padded to a multiple of
    4], which are cuBLAS's layouts. A tensor with one scale has [1]."""

    codes: Tensor
    scales: Tensor


class Matrices(NamedTuple):
    """FP8 matrices [..., rows, k], and the transposed matrices [..., k, rows] with equal values."""

    rows: Quantized
    transposed: Quantized


def empty_matrices(shape: torch.Size, dtype: torch.dtype, whole: bool, **options: Any) -> Matrices:
    """Returns memory for matrices [..., rows, k], on torch's default device. whole: whether they have one
    scale."""

    *leading, rows, inner = shape
    scale = torch.empty(1, dtype=torch.float32, **options)

    def empty(rows: int, inner: int) -> Quantized:
        size = (*leading, rows // BLOCK, -(-inner // BLOCK // 4) * 4)
        scales = scale if whole else torch.zeros(size, dtype=torch.float32, **options)
        return Quantized(torch.empty(*leading, rows, inner, dtype=dtype, **options), scales)

    return Matrices(empty(rows, inner), empty(inner, rows))


def quantize_rows(x: Tensor, dtype: torch.dtype, amax: Tensor | None = None) -> Quantized:
    """Quantizes a contiguous x [rows, k] with one scale per 128 elements of a row, or with one scale for the
    whole tensor if `amax` is given. amax: the largest absolute value of the tensor, fp32 [1]."""
    codes = torch.empty_like(x, dtype=dtype)
    size = (1,) if amax is not None else (x.shape[1] // BLOCK, len(x))
    quantized = Quantized(codes, x.new_empty(size, dtype=torch.float32))
    _quantize(x, quantized, None, amax)
    return quantized


def quantize_matrices(matrices: Tensor, into: Matrices, amax: Tensor | None = None) -> None:
    """Quantizes contiguous matrices [..., rows, k] into the memory of `empty_matrices`. amax: see
    `quantize_rows`."""
    _quantize(matrices, *into, amax)


def _quantize(x: Tensor, rows: Quantized, transposed: Quantized | None, amax: Tensor | None) -> None:
    if uses_kernels(x):
        codes, scales = (None, None) if transposed is None else transposed
        quantize_fp8_op(x, rows.codes, rows.scales, codes, scales, amax)
    else:
        _quantize_reference(x, rows, transposed, amax)


def multiply(
    x: Quantized, matrices: Quantized, bias: Tensor | None, groups: Groups | None, dtype: torch.dtype
) -> Tensor:
    """Returns x @ matrices.T + bias, [rows, n] in `dtype`, summed in fp32. x: [rows, k]. matrices: [n, k].

    groups: if given, matrices is [experts, n, k], and the rows of each expert e are multiplied by
    matrices[e], with bias[e].
    """
    if not uses_kernels(x.scales):
        return _multiply_reference(x, matrices, bias, groups, dtype)
    if groups is None:
        return multiply_fp8_op(*x, *matrices, bias, None, -(-len(x.codes) // BLOCK), dtype)
    offsets = groups.offsets(x.codes.device)
    return multiply_fp8_op(*x, *matrices, bias, offsets, groups.row_tiles(), dtype)


# --- reference ---


def _quantize_reference(
    x: Tensor, rows: Quantized, transposed: Quantized | None, amax: Tensor | None
) -> None:
    codes, scales = rows
    blocks = x.float().unflatten(-1, (-1, BLOCK))  # [..., rows, k / 128, 128]
    if amax is not None:
        scale, inverse = _scale_of(amax, codes.dtype)
        scales.copy_(scale)
        values = blocks * inverse
    elif transposed is None:
        scale, inverse = _scale_of(blocks.abs().amax(-1), codes.dtype)
        scales.copy_(scale.t())
        values = blocks * inverse.unsqueeze(-1)
    else:
        tiles = blocks.unflatten(-3, (-1, BLOCK))  # [..., rows / 128, 128, k / 128, 128]
        scale, inverse = _scale_of(tiles.abs().amax((-1, -3)), codes.dtype)
        for target, source in ((scales, scale), (transposed.scales, scale.transpose(-1, -2))):
            target[..., : source.shape[-1]] = source
        values = tiles * inverse[..., :, None, :, None]
    codes.copy_(values.reshape(x.shape))
    if transposed is not None:
        transposed.codes.copy_(codes.transpose(-1, -2))


def _scale_of(amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the scales of blocks with the largest absolute values `amax`, and the inverse scales. They are
    inf and 0 if `amax` is not finite."""
    bits = amax.contiguous().view(torch.int32) & 0x7FFFFFFF  # NaN may have a sign
    exponent = ((bits.clamp(max=_INFINITY) + 0x1FFFFF) // 0x800000 - _LARGEST_EXPONENT[dtype]).clamp_(min=1)
    is_finite = bits < _INFINITY
    scale = torch.where(is_finite, exponent * 0x800000, _INFINITY)
    inverse = torch.where(is_finite, (254 - exponent) * 0x800000, 0)
    return scale.int().view(torch.float32), inverse.int().view(torch.float32)


def dequantized(x: Quantized, is_matrix: bool) -> Tensor:
    """Returns the values of activations or (`is_matrix`) of matrices, in fp32."""
    values = x.codes.float()
    if x.scales.numel() == 1:
        return values * x.scales
    blocks = values.unflatten(-1, (-1, BLOCK))
    if not is_matrix:
        return (blocks * x.scales.t().unsqueeze(-1)).flatten(-2)
    scales = x.scales[..., : blocks.shape[-2]].repeat_interleave(BLOCK, dim=-2)
    return (blocks * scales.unsqueeze(-1)).flatten(-2)


def _multiply_reference(
    x: Quantized, matrices: Quantized, bias: Tensor | None, groups: Groups | None, dtype: torch.dtype
) -> Tensor:
    left, right = dequantized(x, is_matrix=False), dequantized(matrices, is_matrix=True)
    bias = None if bias is None else bias.float()
    if groups is None:
        return F.linear(left, right, bias).to(dtype)
    out = left.new_empty(len(left), right.shape[1])
    for expert, rows in groups.rows():
        out[rows] = F.linear(left[rows], right[expert], None if bias is None else bias[expert])
    return out.to(dtype)


# --- operators ---


@operator("quantize_fp8", mutates_args=("codes", "scales", "transposed", "transposed_scales"))
def quantize_fp8_op(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    transposed: Tensor | None,
    transposed_scales: Tensor | None,
    amax: Tensor | None,
) -> None:
    """Quantizes `x` into `codes`, `scales` and the transposed tensors: see `Quantized`."""
    columns = x.shape[-1]
    group_rows = x.shape[-2] if transposed is not None else BLOCK
    transposed_pitch = 1 if transposed_scales is None else transposed_scales.shape[-1]
    launch = _quantize_launch(columns, group_rows, transposed_pitch, codes.dtype)
    by_tile = None if amax is not None else transposed_scales
    rows = x.numel() // columns
    grid = -(-rows // BLOCK), columns // BLOCK
    launch(x, codes, transposed, scales, by_tile, amax, rows, scales.shape[-1], grid=grid)


@quantize_fp8_op.register_fake
def _(x: Tensor, *others: Any) -> None:
    return None


@lru_cache(maxsize=1024)
def _quantize_launch(columns: int, group_rows: int, transposed_pitch: int, dtype: torch.dtype) -> Launch:
    return Launch(
        "fp8_triton.quantize_kernel",
        None,
        {"num_warps": 8},
        columns=columns,
        group_rows=group_rows,
        transposed_pitch=transposed_pitch,
        EXPONENT=_LARGEST_EXPONENT[dtype],
        BLOCK=BLOCK,
    )


@operator("multiply_fp8")
def multiply_fp8_op(
    x: Tensor,
    x_scales: Tensor,
    matrices: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    row_tiles: int,
    dtype: torch.dtype,
) -> Tensor:
    """Runs `multiply` in a Triton kernel. offsets, row_tiles: see `Groups`."""
    rows, (columns, inner), whole = len(x), matrices.shape[-2:], scales.numel() == 1
    fits = offsets is None and dtype == torch.bfloat16 and rows > 0 and rows % 4 == 0
    if fits and _has_scaled_mm(x.device, x.dtype, whole, bias is not None):
        return _scaled_mm(Quantized(x, x_scales), Quantized(matrices, scales), bias)
    out = _product(x, matrices, dtype)
    launch = _multiply_launch(inner, columns, 1 if offsets is None else len(offsets), whole)
    block = 0 if whole else rows
    grid = row_tiles * (columns // BLOCK), 1
    launch(x, x_scales, matrices, scales, bias, out, offsets, rows, block, grid=grid)
    return out


@multiply_fp8_op.register_fake
def _(x: Tensor, x_scales: Tensor, matrices: Tensor, *others: Any) -> Tensor:
    return _product(x, matrices, others[-1])


def _product(x: Tensor, matrices: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(len(x), matrices.shape[-2], dtype=dtype)


@register_flop_formula(torch.ops.megatron.multiply_fp8)
def _flops(
    x_shape: torch.Size, _scales: torch.Size, matrices_shape: torch.Size, *_others: Any, **_: Any
) -> int:
    return 2 * x_shape[0] * matrices_shape[-2] * matrices_shape[-1]


@lru_cache(maxsize=1024)
def _multiply_launch(inner: int, columns: int, experts: int, whole: bool) -> Launch:
    pitch = -(-inner // BLOCK // 4) * 4
    return Launch(
        "fp8_triton.multiply_fp8_kernel",
        None,
        _OPTIONS,
        columns=columns,
        inner=inner,
        experts=experts,
        x_scale_row=0 if whole else 1,
        scale_expert=0 if whole else columns // BLOCK * pitch,
        scale_column=0 if whole else pitch,
        scale_block=0 if whole else 1,
        BLOCK_EXPERTS=max(1 << (experts - 1).bit_length(), 16),
        BLOCK=BLOCK,
    )


# --- torch's product ---


def _scaled_mm(x: Quantized, matrix: Quantized, bias: Tensor | None) -> Tensor:
    """Runs `multiply` for one matrix with F.scaled_mm, in bf16. F.scaled_mm adds the bias to the fp32 sum."""
    kinds, scales = (F.ScalingType.TensorWise, F.ScalingType.TensorWise), (x.scales, matrix.scales)
    if matrix.scales.numel() > 1:
        kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        scales = x.scales.t(), matrix.scales.t()
    out: Tensor = F.scaled_mm(x.codes, matrix.codes.t(), scales[0], kinds[0], scales[1], kinds[1], bias=bias)
    return out


@lru_cache
def _has_scaled_mm(device: torch.device, dtype: torch.dtype, whole: bool, has_bias: bool) -> bool:
    """Returns whether F.scaled_mm runs on the device and agrees with the reference. If the layout of the
    scales differed, it would multiply by wrong scales."""
    generator = torch.Generator().manual_seed(0)
    x, matrix = (
        torch.randn(shape, generator=generator).mul_(torch.linspace(0.01, 9, shape[1]).cumsum(0)).to(device)
        for shape in ((132, 640), (256, 640))
    )
    amaxes = [each.abs().amax().reshape(1) if whole else None for each in (x, matrix)]
    rows = quantize_rows(x, dtype, amaxes[0])
    into = empty_matrices(matrix.shape, torch.float8_e4m3fn, whole, device=device)
    quantize_matrices(matrix, into, amaxes[1])
    expected, bias = _multiply_reference(rows, into.rows, None, None, torch.float32), None
    if has_bias:
        bias = expected.amax(0).bfloat16()
        expected += bias
    try:
        error = (_scaled_mm(rows, into.rows, bias).float() - expected).abs().max() / expected.abs().max()
        problem = None if float(error) < 0.01 else f"a relative error of {float(error):.2g}"
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, RuntimeError, ValueError, NotImplementedError) as failure:
        problem = str(failure).partition("\n")[0]
    what = "FP8 products with a bias" if has_bias else "FP8 products"
    _LOG.info("%s: %s", what, "torch's scaled_mm" if problem is None else f"Triton ({problem})")
    return problem is None
