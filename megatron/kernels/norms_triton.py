"""The kernels of `megatron::chunk_squares` and `megatron::chunk_norms`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.kernels.norms import CHUNK

BLOCK = 1024
CHUNK_SQUARES_OPTIONS = {"num_warps": 8}
CHUNK_NORMS_OPTIONS = {"num_warps": 4}


@triton.jit
def chunk_squares_kernel(starts, lengths, squares, CHUNK: tl.constexpr):
    """squares[i] = the sum of squares of lengths[i] fp32 elements at address starts[i], for program i."""
    chunk = tl.program_id(0)
    values = tl.load(starts + chunk).to(tl.pointer_type(tl.float32))
    place = tl.arange(0, CHUNK)
    x = tl.load(values + place, mask=place < tl.load(lengths + chunk), other=0.0).to(tl.float64)
    tl.store(squares + chunk, tl.sum(x * x))


@triton.jit
def chunk_norms_kernel(squares, first_chunks, norms, BLOCK: tl.constexpr):
    """norms[i] = the root of the sum of squares[first_chunks[i] : first_chunks[i + 1]], for program i."""
    tensor = tl.program_id(0)
    end = tl.load(first_chunks + tensor + 1)
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for first in range(tl.load(first_chunks + tensor), end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        total += tl.load(squares + place, mask=place < end, other=0.0)
    tl.store(norms + tensor, tl.sqrt(tl.sum(total)))


def launch_chunk_squares(starts: torch.Tensor, lengths: torch.Tensor, squares: torch.Tensor) -> None:
    """Fills `squares`, fp64 [chunks], from the table of addresses, int64, and lengths, int32."""
    if len(squares):
        chunk_squares_kernel[(len(squares),)](starts, lengths, squares, CHUNK=CHUNK, **CHUNK_SQUARES_OPTIONS)


def launch_chunk_norms(squares: torch.Tensor, first_chunks: torch.Tensor, norms: torch.Tensor) -> None:
    """Fills `norms`, fp64 [tensors]. first_chunks: int32 [tensors + 1]."""
    chunk_norms_kernel[(len(norms),)](squares, first_chunks, norms, BLOCK=BLOCK, **CHUNK_NORMS_OPTIONS)
