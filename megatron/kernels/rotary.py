"""Operators that split a fused projection into queries, keys and values, and rotate queries and keys (RoPE).

Each element is read once and written once, forward and backward. Tables, products and sums are fp32, and only
the result is rounded to the dtype of the projection. The reference implementation is
`model.position.RotaryEmbedding.rotate`, whose operations are rounded equally.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.kernels.operators import Launch, first_order, operator

# Heads of a tile; its columns are the pairs of a head.
BLOCK_HEADS = 16
# No fused multiply-add: products are rounded before they are added, as in PyTorch.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


class Heads(NamedTuple):
    """Sizes of a fused projection [seq, batch, groups x (group + 2) x head_dim].

    A group has `group` query heads, then its key head and its value head. rotary_dim: elements of a head that
    are rotated, the first ones. interleaved: 1 if the elements 2i and 2i + 1 are a pair, otherwise i and
    i + rotary_dim / 2.
    """

    groups: int
    group: int
    head_dim: int
    rotary_dim: int
    interleaved: int


def split_and_rotate(
    projected: Tensor, cosine: Tensor, sine: Tensor, heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns query [seq, batch, groups x group, head_dim], key and value [seq, batch, groups, head_dim], all
    contiguous. cosine, sine: fp32 [seq, 1 or batch, 1, rotary_dim]."""
    return _SplitAndRotate.apply(projected, cosine, sine, heads)


@first_order
class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, cosine: Tensor, sine: Tensor, heads: Heads
    ) -> tuple[Tensor, Tensor, Tensor]:
        cosine, sine = cosine.contiguous(), sine.contiguous()
        ctx.tables, ctx.heads = (cosine, sine), heads
        return split_and_rotate_op(projected.contiguous(), cosine, sine, heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        query, key, value = (grad.contiguous() for grad in grads)
        cosine, sine = ctx.tables
        return rotate_back_and_join_op(query, key, value, cosine, sine, ctx.heads), None, None, None


@operator("split_and_rotate")
def split_and_rotate_op(
    projected: Tensor, cosine: Tensor, sine: Tensor, heads: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the kernel of the forward pass. heads: the fields of `Heads`."""
    parts = _parts(projected, heads)
    launch = _launch(projected.shape, cosine.shape[1], Heads(*heads), backward=False)
    launch(projected, *parts, cosine, sine)
    return parts


@split_and_rotate_op.register_fake
def _(projected: Tensor, cosine: Tensor, sine: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    return _parts(projected, heads)


@operator("rotate_back_and_join")
def rotate_back_and_join_op(
    query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor, heads: Sequence[int]
) -> Tensor:
    """Returns the gradient of `projected` from the contiguous gradients of query, key and value."""
    projected = _joined(query, heads)
    launch = _launch(projected.shape, cosine.shape[1], Heads(*heads), backward=True)
    launch(projected, query, key, value, cosine, sine)
    return projected


@rotate_back_and_join_op.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor, heads: Sequence[int]
) -> Tensor:
    return _joined(query, heads)


@lru_cache(maxsize=1024)
def _launch(shape: torch.Size, table_batch: int, heads: Heads, backward: bool) -> Launch:
    """shape: of the projection. table_batch: samples of the tables of cosines and sines."""
    seq, batch, _ = shape
    half, rest = heads.rotary_dim // 2, heads.head_dim - heads.rotary_dim
    return Launch(
        "triton_kernels.rotary_kernel",
        (seq * batch, -(-heads.groups * (heads.group + 2) // BLOCK_HEADS)),
        OPTIONS,
        batch=batch,
        groups=heads.groups,
        group=heads.group,
        table_batch=table_batch,
        BACKWARD=backward,
        HEAD_DIM=heads.head_dim,
        ROTARY_DIM=heads.rotary_dim,
        INTERLEAVED=heads.interleaved,
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_PAIRS=1 << (half - 1).bit_length(),
        BLOCK_REST=1 << max(rest - 1, 0).bit_length(),
    )


def _parts(projected: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    seq, batch, _ = projected.shape
    groups, group, head_dim, *_ = heads
    counts = (groups * group, groups, groups)
    query, key, value = (projected.new_empty((seq, batch, count, head_dim)) for count in counts)
    return query, key, value


def _joined(query: Tensor, heads: Sequence[int]) -> Tensor:
    groups, group, head_dim, *_ = heads
    return query.new_empty((*query.shape[:2], groups * (group + 2) * head_dim))
