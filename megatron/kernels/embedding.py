"""Operator `megatron::add_rows`: adds the gradient of an embedding to its rows in a fixed order.

The rows of equal ids are summed in fp32 in the order of their positions, and the sum is added once. So the
result does not depend on the order of threads. Only the rows of the given ids are read and written.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from megatron.kernels.operators import Launch, operator

BLOCK = 512
OPTIONS = {"num_warps": 4}


def fused_add_rows(total: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Computes total[ids[i]] += rows[i] for all i, with a sort of the ids and one launch.

    total: fp32 [embeddings, hidden], contiguous. ids: int64 [tokens]. rows: [tokens, hidden].
    """
    ids, order = ids.sort(stable=True)
    add_rows_op(total, ids, order, rows.contiguous())


@operator("add_rows", mutates_args=("total",))
def add_rows_op(total: torch.Tensor, ids: torch.Tensor, order: torch.Tensor, rows: torch.Tensor) -> None:
    """Computes total[ids[i]] += rows[order[i]] for all i. The ids must be in ascending order."""
    _launch(*rows.shape)(total, ids, order, rows)


@lru_cache(maxsize=1024)
def _launch(tokens: int, width: int) -> Launch:
    grid = (tokens, -(-width // BLOCK))
    return Launch("triton_kernels.add_rows_kernel", grid, OPTIONS, tokens=tokens, width=width, BLOCK=BLOCK)
