"""Operators that split a fused projection into queries, keys and values, and rotate queries and keys (RoPE).
With --qk-layernorm they first apply a norm to each query head and key head.

Each element is read once and written once, in the forward and in the backward pass. Tables, products and sums
are fp32, and only the result is rounded to the dtype of the projection. The reference implementation is
`model.position.RotaryEmbedding.rotate`, which rounds in the same way. With norms, the reference first applies
the norms of `model.norm`, whose results are also rounded.

With norms the projection is saved for the backward pass, which overwrites it with its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron.kernels.column_sums import rows_per_block, sum_blocks
from megatron.kernels.operators import Launch, first_order, operator

# Number of heads in a tile. The columns of a tile are the rotated pairs of a head.
BLOCK_HEADS = 16
# With norms each warp has one head, and therefore all sums of this head.
NORM_BLOCK_HEADS = 8


class Heads(NamedTuple):
    """Sizes of a fused projection [seq, batch, groups x (group + gates + 2) x head_dim].

    A group has `group` query heads, their `gates` (as many as query heads, or 0), its key head and its value
    head. rotary_dim: number of elements that are rotated, at the start of each head. interleaved: 1 if the
    elements 2i and 2i + 1 are a pair; 0 if i and i + rotary_dim / 2 are.
    """

    groups: int
    group: int
    head_dim: int
    rotary_dim: int
    interleaved: int
    gates: int = 0


class HeadNorms(NamedTuple):
    """The norms of query heads and key heads. Each tensor is [head_dim], in the dtype of the projection.
    Without betas they are RMS norms. zero_centered: the factor is 1 + weight."""

    query_weight: Tensor | None
    key_weight: Tensor | None
    query_beta: Tensor | None
    key_beta: Tensor | None
    epsilon: float
    zero_centered: bool


NO_NORMS = HeadNorms(None, None, None, None, 0.0, False)


def split_and_rotate(
    projected: Tensor, cosine: Tensor, sine: Tensor, heads: Heads, norms: HeadNorms = NO_NORMS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns query [seq, batch, groups x group, head_dim], key and value [seq, batch, groups, head_dim], and
    the gate [seq, batch, groups x gates, head_dim], all contiguous. cosine, sine: fp32
    [seq, 1 or batch, 1, rotary_dim]. norms: the norms of queries and keys before the rotation. With norms the
    backward pass overwrites `projected`: see `activation.fused_activation`."""
    return _SplitAndRotate.apply(projected, cosine, sine, heads, *norms)


@first_order
class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, cosine: Tensor, sine: Tensor, heads: Heads, *norms: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        projected, cosine, sine = projected.contiguous(), cosine.contiguous(), sine.contiguous()
        *vectors, epsilon, zero_centered = norms
        ctx.tables, ctx.heads, ctx.settings = (cosine, sine), heads, (epsilon, zero_centered)
        ctx.has_norms = vectors[0] is not None
        if ctx.has_norms:
            ctx.save_for_backward(projected, *vectors)
        return split_and_rotate_op(projected, cosine, sine, heads, *norms)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, gate = (grad.contiguous() for grad in grads)
        cosine, sine = ctx.tables
        if not ctx.has_norms:
            projected = rotate_back_and_join_op(query, key, value, gate, cosine, sine, ctx.heads)
            return projected, *[None] * 9
        projected, *vectors = ctx.saved_tensors
        projected = projected.detach()
        partial_sums = norm_and_rotate_backward_op(
            query, key, value, gate, projected, cosine, sine, ctx.heads, *vectors, *ctx.settings
        )
        increment_version(projected)
        of_norms = (*sum_blocks(partial_sums, projected.dtype), None, None)[:4]
        return projected, None, None, None, *of_norms, None, None


@operator("split_and_rotate")
def split_and_rotate_op(
    projected: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: Sequence[int],
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    query_beta: Tensor | None,
    key_beta: Tensor | None,
    epsilon: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches the kernel of the forward pass. heads: the fields of `Heads`. The arguments after `heads` are
    the fields of `HeadNorms`."""
    seq, batch, _ = projected.shape
    groups, group, head_dim, *_, gates = heads
    query, key, value, gate = (
        projected.new_empty((seq, batch, groups * per_group, head_dim)) for per_group in (group, 1, 1, gates)
    )
    vectors = (query_weight, key_weight, query_beta, key_beta)
    norms = None if query_weight is None else (epsilon, zero_centered)
    launch = _launch(projected.shape, cosine.shape[1], Heads(*heads), norms, False)
    launch(projected, query, key, value, gate if gates else None, *vectors, cosine, sine)
    return query, key, value, gate


@operator("rotate_back_and_join")
def rotate_back_and_join_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: Sequence[int],
) -> Tensor:
    """Returns the gradient of `projected` from the contiguous gradients of query, key, value and gate."""
    groups, group, head_dim, *_, gates = heads
    projected = query.new_empty((*query.shape[:2], groups * (group + gates + 2) * head_dim))
    launch = _launch(projected.shape, cosine.shape[1], Heads(*heads), None, True)
    tensors = (projected, query, key, value, gate if gates else None)
    launch(*tensors, None, None, None, cosine, sine, None)
    return projected


@operator("norm_and_rotate_backward", mutates_args=("projected",))
def norm_and_rotate_backward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    projected: Tensor,
    cosine: Tensor,
    sine: Tensor,
    heads: Sequence[int],
    query_weight: Tensor,
    key_weight: Tensor,
    query_beta: Tensor | None,
    key_beta: Tensor | None,
    epsilon: float,
    zero_centered: bool,
) -> Tensor:
    """Overwrites `projected` with its gradient, from the contiguous gradients of query, key, value and
    gate. Returns the partial sums of the gradients of query_weight, key_weight, query_beta and key_beta, fp32
    [programs, 2 or 4, head_dim]."""
    launch = _launch(projected.shape, cosine.shape[1], Heads(*heads), (epsilon, zero_centered), True)
    assert launch.grid is not None
    shape = (math.prod(launch.grid), 2 if query_beta is None else 4, heads[2])
    partial_sums = projected.new_empty(shape, dtype=torch.float32)
    tables = (cosine, sine, partial_sums)
    tensors = (projected, query, key, value, gate if heads[-1] else None)
    launch(*tensors, query_weight, key_weight, query_beta, *tables)
    return partial_sums


@lru_cache(maxsize=1024)
def _launch(
    shape: torch.Size, table_batch: int, heads: Heads, norms: tuple[float, bool] | None, backward: bool
) -> Launch:
    """Returns the launch of a kernel. shape: the shape of the projection. table_batch: number of samples in
    the tables of cosines and sines. norms: their epsilon, and whether their factor is 1 + weight. With norms
    each program of the backward pass has a block of tokens."""
    blocks, numbers = shape[:2].numel(), dict[str, int]()
    if backward:
        block = 1 if norms is None else rows_per_block(blocks)
        numbers = {"tokens": blocks, "BLOCK_TOKENS": block}
        blocks = -(-blocks // block)
    block_heads = BLOCK_HEADS if norms is None else NORM_BLOCK_HEADS
    epsilon, zero_centered = norms or (0.0, False)
    half, rest = heads.rotary_dim // 2, heads.head_dim - heads.rotary_dim
    return Launch(
        f"rotary_triton.rotary_{'backward_' * backward}kernel",
        (blocks, -(-heads.groups * (heads.group + heads.gates + 2) // block_heads)),
        # Without fused multiply-add, products are rounded before they are added, as in PyTorch.
        {"num_warps": 4 if norms is None else NORM_BLOCK_HEADS, "enable_fp_fusion": False},
        batch=shape[1],
        groups=heads.groups,
        group=heads.group,
        table_batch=table_batch,
        epsilon=epsilon,
        ZERO_CENTERED=zero_centered,
        HEAD_DIM=heads.head_dim,
        ROTARY_DIM=heads.rotary_dim,
        INTERLEAVED=heads.interleaved,
        BLOCK_HEADS=block_heads,
        BLOCK_PAIRS=1 << (half - 1).bit_length(),
        BLOCK_REST=1 << max(rest - 1, 0).bit_length(),
        **numbers,
    )
