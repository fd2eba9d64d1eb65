"""Norms of many tensors in two launches: squares of chunks, then their sums for each tensor. And a copy that
finds non-finite elements.

Squares are computed and summed in fp64, in an order that depends only on the number of elements. So equal
tensors have equal norms, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from megatron.kernels.operators import Launch, operator

# Elements of a chunk, which one program of the first kernel sums.
CHUNK = 4096
# Squares that a program of the second kernel adds at once.
BLOCK = 1024
CHUNK_SQUARES_OPTIONS = {"num_warps": 8}
CHUNK_NORMS_OPTIONS = {"num_warps": 4}
# Elements that a program copies.
COPY_BLOCK = 4096
COPY_OPTIONS = {"num_warps": 8}


def fused_norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the 2-norm of each contiguous fp32 tensor, fp64 [tensors]; not finite if an element is not."""
    counts = [-(-tensor.numel() // CHUNK) for tensor in tensors]
    return chunk_norms_op(chunk_squares_op(list(tensors)), counts)


@operator("chunk_squares")
def chunk_squares_op(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of squares of each chunk of the tensors, one tensor after the other, fp64."""
    places = tuple((tensor.data_ptr(), tensor.numel()) for tensor in tensors)
    starts, lengths = _chunk_table(places, tensors[0].device)
    squares = torch.empty(len(starts), dtype=torch.float64, device=starts.device)
    _chunk_squares(len(squares))(starts, lengths, squares)
    return squares


@chunk_squares_op.register_fake
def _(tensors: list[torch.Tensor]) -> torch.Tensor:
    chunks = sum(-(-tensor.numel() // CHUNK) for tensor in tensors)
    return torch.empty(chunks, dtype=torch.float64, device=tensors[0].device)


@operator("chunk_norms")
def chunk_norms_op(squares: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Returns the square root of the sum of the next counts[i] squares, for each i, fp64."""
    norms = torch.empty(len(counts), dtype=torch.float64, device=squares.device)
    first_chunks = _first_chunks(tuple(counts), squares.device)
    _chunk_norms(len(norms))(squares, first_chunks, norms)
    return norms


@chunk_norms_op.register_fake
def _(squares: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return torch.empty(len(counts), dtype=torch.float64, device=squares.device)


@operator("copy_gradient", mutates_args=("total", "norm"))
def copy_gradient_op(gradient: torch.Tensor, total: torch.Tensor, norm: torch.Tensor) -> None:
    """Copies `gradient` to `total`, fp32; both are contiguous. Sets `norm`, an fp64 scalar, to NaN if an
    element is not finite, and does not change it otherwise."""
    _copy_gradient(gradient.numel())(gradient, total, norm)


@copy_gradient_op.register_fake
def _(gradient: torch.Tensor, total: torch.Tensor, norm: torch.Tensor) -> None:
    return None


@lru_cache
def _chunk_squares(chunks: int) -> Launch:
    return Launch("triton_kernels.chunk_squares_kernel", (chunks, 1), CHUNK_SQUARES_OPTIONS, CHUNK=CHUNK)


@lru_cache
def _chunk_norms(tensors: int) -> Launch:
    return Launch("triton_kernels.chunk_norms_kernel", (tensors, 1), CHUNK_NORMS_OPTIONS, BLOCK=BLOCK)


@lru_cache
def _copy_gradient(length: int) -> Launch:
    grid = (-(-length // COPY_BLOCK), 1)
    kernel = "triton_kernels.copy_gradient_kernel"
    return Launch(kernel, grid, COPY_OPTIONS, length=length, BLOCK=COPY_BLOCK)


# The gradients lie in the same buffers at every step, so the tables are copied to the device once.
@lru_cache(maxsize=4096)
def _chunk_table(
    places: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns address (int64) and length (int32) of each chunk. places: (address, elements) of each
    tensor."""
    offsets = [torch.arange(0, numel, CHUNK, dtype=torch.int64) for _, numel in places]
    starts = [address + 4 * offset for (address, _), offset in zip(places, offsets, strict=True)]
    lengths = [(numel - offset).clamp(max=CHUNK) for (_, numel), offset in zip(places, offsets, strict=True)]
    return torch.cat(starts).to(device), torch.cat(lengths).to(torch.int32).to(device)


@lru_cache(maxsize=4096)
def _first_chunks(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns int32 [len(counts) + 1]: the first chunk of each tensor, and the number of chunks."""
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
