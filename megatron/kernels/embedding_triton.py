"""The kernel of `megatron::add_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 512
OPTIONS = {"num_warps": 4}


@triton.jit
def add_rows_kernel(total, ids, order, rows, tokens, width, BLOCK: tl.constexpr):
    """Program (i, c): if ids[i] is the first of its value, sums all rows of this id, and adds the sum."""
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


def launch(total: torch.Tensor, ids: torch.Tensor, order: torch.Tensor, rows: torch.Tensor) -> None:
    """Adds to `total`, fp32 [embeddings, width]; see `megatron::add_rows`. All tensors are contiguous."""
    tokens, width = rows.shape
    if tokens:
        grid = (tokens, triton.cdiv(width, BLOCK))
        add_rows_kernel[grid](total, ids, order, rows, tokens, width, BLOCK=BLOCK, **OPTIONS)
