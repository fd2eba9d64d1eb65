"""Operators of the optimizer step: norms of gradients, a copy that finds non-finite elements, and AdamW.

Norms take two launches: the first sums the squares of chunks, the second adds these sums for each tensor.
Squares are computed and summed in fp64, in an order that depends only on the number of elements. So equal
tensors have norms that are equal to the last bit.

AdamW is one pass over memory, from the sum of the scaled gradients to the weights in the run's precision. An
element costs 30 bytes: 4 for its gradient, 8 for the fp32 weight, 16 for the moments and 2 for the rounded
weight. The formulas equal the formulas of `torch.optim.AdamW(fused=True)`. Every operation is rounded as IEEE
754 specifies, without fused multiply-add, so the result does not depend on an element's position.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from megatron.kernels.operators import Launch, operator

# Number of elements in a chunk, which one program of the first kernel sums.
CHUNK = 4096
# Number of squares that a program of the second kernel adds at a time.
BLOCK = 1024
CHUNK_SQUARES_OPTIONS = {"num_warps": 8}
CHUNK_NORMS_OPTIONS = {"num_warps": 4}
# Number of elements that a program copies.
COPY_BLOCK = 4096
COPY_OPTIONS = {"num_warps": 8}


def fused_norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the 2-norm of each contiguous fp32 tensor, fp64 [tensors]. A norm is not finite if an element
    is not."""
    counts = [-(-tensor.numel() // CHUNK) for tensor in tensors]
    return chunk_norms_op(chunk_squares_op(list(tensors)), counts)


@operator("chunk_squares")
def chunk_squares_op(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of squares of each chunk, fp64. The chunks are ordered by tensor."""
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
    """Returns, for each i, the square root of the sum of the next counts[i] squares, fp64."""
    norms = torch.empty(len(counts), dtype=torch.float64, device=squares.device)
    first_chunks = _first_chunks(tuple(counts), squares.device)
    _chunk_norms(len(norms))(squares, first_chunks, norms)
    return norms


@chunk_norms_op.register_fake
def _(squares: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return torch.empty(len(counts), dtype=torch.float64, device=squares.device)


@operator("copy_gradient", mutates_args=("total", "norm"))
def copy_gradient_op(gradient: torch.Tensor, total: torch.Tensor, norm: torch.Tensor) -> None:
    """Copies `gradient` to `total`, which is fp32; both are contiguous. If an element is not finite, sets
    `norm`, an fp64 scalar, to NaN. Otherwise `norm` is unchanged."""
    _copy_gradient(gradient.numel())(gradient, total, norm)


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


# The gradients are in the same buffers at every step, so the tables are copied to the device only once.
@lru_cache(maxsize=4096)
def _chunk_table(
    places: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the address (int64) and the length (int32) of each chunk. places: (address, number of elements)
    of each tensor."""
    offsets = [torch.arange(0, numel, CHUNK, dtype=torch.int64) for _, numel in places]
    starts = [address + 4 * offset for (address, _), offset in zip(places, offsets, strict=True)]
    lengths = [(numel - offset).clamp(max=CHUNK) for (_, numel), offset in zip(places, offsets, strict=True)]
    return torch.cat(starts).to(device), torch.cat(lengths).to(torch.int32).to(device)


@lru_cache(maxsize=4096)
def _first_chunks(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns int32 [len(counts) + 1]: the first chunk of each tensor, and the number of chunks."""
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


ADAMW_BLOCK = 2048
ADAMW_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


def fused_adamw(
    master: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rounded: torch.Tensor | None,
    *,
    factor: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Updates `master` and its moments from gradient * factor. If `rounded` is given, copies `master` to it.

    All tensors are flat and contiguous, and fp32 except `rounded`. step: number of this update, counted from
    1.
    """
    beta1, beta2 = betas
    decay, step_size = 1.0 - lr * weight_decay, lr / (1.0 - beta1**step)
    correction = (1.0 - beta2**step) ** 0.5
    numbers = (factor, decay, step_size, 1.0 - beta1, beta2, 1.0 - beta2, correction, eps)
    adamw_op(master, gradient, exp_avg, exp_avg_sq, rounded, tuple(map(float, numbers)))


@operator("adamw", mutates_args=("master", "exp_avg", "exp_avg_sq", "rounded"))
def adamw_op(
    master: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rounded: torch.Tensor | None,
    numbers: Sequence[float],
) -> None:
    """Launches the kernel. numbers: the kernel's parameters from `factor` to `eps`, which its docstring
    explains."""
    _adamw(master.numel())(master, gradient, exp_avg, exp_avg_sq, rounded, *numbers)


@lru_cache
def _adamw(length: int) -> Launch:
    grid = (-(-length // ADAMW_BLOCK), 1)
    return Launch("triton_kernels.adamw_kernel", grid, ADAMW_OPTIONS, length=length, BLOCK=ADAMW_BLOCK)
