"""Operators that split a fused projection into queries, keys and values, and rotate queries and keys (RoPE),
with --qk-layernorm after a norm of each head.

Each element is read once and written once, forward and backward. Tables, products and sums are fp32, and only
the result is rounded to the dtype of the projection. The reference implementation is
`model.position.RotaryEmbedding.rotate`, whose operations are rounded equally; with norms, after those of
`model.norm`, whose results are also rounded.

With norms the projection is kept for the backward pass, which overwrites it with its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron.kernels.column_sums import num_blocks, rows_per_block, sum_blocks
from megatron.kernels.operators import Launch, first_order, operator

# Heads of a tile; its columns are the pairs of a head.
BLOCK_HEADS = 16
# With norms a warp has one head, and so its sums.
NORM_BLOCK_HEADS = 8
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


class HeadNorms(NamedTuple):
    """The norms of query heads and key heads: each tensor is [head_dim], in the dtype of the projection.
    Without betas they are RMS norms. zero_centered: their factor is 1 + weight."""

    query_weight: Tensor
    key_weight: Tensor
    query_beta: Tensor | None
    key_beta: Tensor | None
    epsilon: float
    zero_centered: bool


def split_and_rotate(
    projected: Tensor, cosine: Tensor, sine: Tensor, heads: Heads, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns query [seq, batch, groups x group, head_dim], key and value [seq, batch, groups, head_dim], all
    contiguous. cosine, sine: fp32 [seq, 1 or batch, 1, rotary_dim]. norms: of queries and keys before their
    rotation. With norms the backward pass overwrites `projected`: see `gated.gated_activation`."""
    if norms is None:
        return _SplitAndRotate.apply(projected, cosine, sine, heads)
    return _NormAndRotate.apply(projected, cosine, sine, heads, *norms)


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


@first_order
class _NormAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        cosine: Tensor,
        sine: Tensor,
        heads: Heads,
        query_weight: Tensor,
        key_weight: Tensor,
        query_beta: Tensor | None,
        key_beta: Tensor | None,
        epsilon: float,
        zero_centered: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        projected, cosine, sine = projected.contiguous(), cosine.contiguous(), sine.contiguous()
        norms = HeadNorms(query_weight, key_weight, query_beta, key_beta, epsilon, zero_centered)
        ctx.tables, ctx.heads, ctx.settings = (cosine, sine), heads, norms[4:]
        ctx.save_for_backward(projected, *norms[:4])
        return norm_and_rotate_op(projected, cosine, sine, heads, *norms)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value = (grad.contiguous() for grad in grads)
        projected, *vectors = ctx.saved_tensors
        projected, (cosine, sine) = projected.detach(), ctx.tables
        norms = HeadNorms(*vectors, *ctx.settings)
        partial_sums = norm_and_rotate_backward_op(
            query, key, value, projected, cosine, sine, ctx.heads, *norms
        )
        increment_version(projected)
        of_norms = (*sum_blocks(partial_sums, projected.dtype), None, None)[:4]
        return projected, None, None, None, *of_norms, None, None


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


@operator("norm_and_rotate")
def norm_and_rotate_op(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """`split_and_rotate_op` with norms: see `HeadNorms`."""
    parts = _parts(projected, heads)
    vectors = (query_weight, key_weight, query_beta, key_beta)
    is_rms, table_batch = query_beta is None, cosine.shape[1]
    launch = _norm_launch(
        projected.shape, table_batch, Heads(*heads), epsilon, zero_centered, is_rms, backward=False
    )
    launch(projected, *parts, *vectors, cosine, sine, None)
    return parts


@norm_and_rotate_op.register_fake
def _(
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
) -> tuple[Tensor, Tensor, Tensor]:
    return _parts(projected, heads)


@operator("norm_and_rotate_backward", mutates_args=("projected",))
def norm_and_rotate_backward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    """Overwrites `projected` with its gradient, from the contiguous gradients of query, key and value.
    Returns the partial sums of the gradients of query_weight, key_weight, query_beta and key_beta, fp32
    [programs, 2 or 4, head_dim]."""
    is_rms, table_batch = query_beta is None, cosine.shape[1]
    partial_sums = _norm_sums(projected, heads, is_rms)
    vectors = (query_weight, key_weight, query_beta, key_beta)
    launch = _norm_launch(
        projected.shape, table_batch, Heads(*heads), epsilon, zero_centered, is_rms, backward=True
    )
    launch(projected, query, key, value, *vectors, cosine, sine, partial_sums)
    return partial_sums


@norm_and_rotate_backward_op.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    return _norm_sums(projected, heads, query_beta is None)


def _norm_sums(projected: Tensor, heads: Sequence[int], is_rms: bool) -> Tensor:
    groups, group, head_dim, *_ = heads
    programs = num_blocks(projected.shape[:2].numel()) * -(-groups * (group + 2) // NORM_BLOCK_HEADS)
    return projected.new_empty((programs, 2 if is_rms else 4, head_dim), dtype=torch.float32)


@lru_cache(maxsize=1024)
def _norm_launch(
    shape: torch.Size,
    table_batch: int,
    heads: Heads,
    epsilon: float,
    zero_centered: bool,
    is_rms: bool,
    backward: bool,
) -> Launch:
    tokens = shape[0] * shape[1]
    grid = (
        num_blocks(tokens) if backward else tokens,
        -(-heads.groups * (heads.group + 2) // NORM_BLOCK_HEADS),
    )
    numbers = {
        **_launch(shape, table_batch, heads, backward).numbers,
        "BLOCK_HEADS": NORM_BLOCK_HEADS,
        "tokens": tokens,
        "epsilon": epsilon,
        "IS_RMS": is_rms,
        "ZERO_CENTERED": zero_centered,
        "SUMS": 2 if is_rms else 4,
        "BLOCK_TOKENS": rows_per_block(tokens) if backward else 1,
    }
    options = {**OPTIONS, "num_warps": NORM_BLOCK_HEADS}
    return Launch("norm_triton.norm_rotary_kernel", grid, options, **numbers)


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
