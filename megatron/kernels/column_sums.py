"""Sums over rows in a fixed order, for the gradients of biases and of the parameters of norms.

A kernel of a backward pass divides its rows into blocks, and writes the fp32 sum of each block. A second
kernel adds the blocks' sums. The order of all additions depends only on the number of rows.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from megatron.kernels.operators import Launch, operator

# Number of row blocks that keep a GPU busy: an H100 has 132 multiprocessors, and each runs two blocks.
_BLOCKS = 256
TILE_ROWS = 8
"""The number of rows of a block is this number times a power of two."""
_SUM_ROWS, _SUM_COLUMNS = 32, 32


def rows_per_block(rows: int) -> int:
    """Returns the number of rows of a block."""
    size = TILE_ROWS
    while size * _BLOCKS < rows:
        size *= 2
    return size


def num_blocks(rows: int) -> int:
    """Returns the number of blocks into which `rows` rows are divided."""
    return -(-rows // rows_per_block(rows))


@operator("sum_blocks")
def sum_blocks(partial_sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sum of `partial_sums`, fp32 [blocks, ...], over the blocks, in `dtype`."""
    sums = torch.empty_like(partial_sums[0], dtype=dtype)
    _launch(len(partial_sums), sums.numel())(partial_sums, sums)
    return sums


@lru_cache(maxsize=1024)
def _launch(rows: int, columns: int) -> Launch:
    return Launch(
        "norm_triton.sum_rows_kernel",
        (-(-columns // _SUM_COLUMNS), 1),
        {"num_warps": 4},
        rows=rows,
        columns=columns,
        BLOCK_ROWS=_SUM_ROWS,
        BLOCK=_SUM_COLUMNS,
    )
