"""Operators of causal flash attention with hash dropout, ALiBi, document boundaries, sinks and capped scores.

The algorithm is FlashAttention (arXiv 2205.14135, 2307.08691): scores exist only as tiles in registers. The
backward pass recomputes the scores from query, key and the logarithm of each row's sum of exponentials, and
it recomputes the dropout mask from its hash. So the saved state is O(seq). One kernel computes the gradient
of the queries by blocks of queries. A second kernel computes the gradients of keys and values by blocks of
keys. One program sums each element in a fixed order, without atomics.

A sink is one additional score of each row, without a value. It changes the row's logarithm and therefore the
output. Given these two, the gradients of queries, keys and values have no additional terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from megatron.kernels.dropout import drop_threshold
from megatron.kernels.operators import Launch, first_order, operator

# Larger heads do not fit in the registers and the shared memory of a GPU.
MAX_HEAD_DIM = 128


class AttentionMask(NamedTuple):
    """What changes the scores of this rank's heads, besides the causal mask. All tensors are contiguous.

    slopes: ALiBi's slopes, fp32 [heads]; slope * (key - query) is added to a score. None: no ALiBi.
    first_keys, end_queries: int32 [batch, seq], both ascending. Query i attends to the keys first_keys[i] to
        i; the queries j to end_queries[j] - 1 attend to key j. None: only the causal mask applies.
    sample_keys: int64 [batch], see `mpu.random.DropoutRNG.sample_keys`. None: no dropout.
    dropout: probability that an attention weight is dropped.
    first_head: the model's index of this rank's first query head. The dropout mask depends on it.
    seq: number of tokens of the sequence, if the keys are only its first tokens. None: all keys are given.
    window: largest number of keys that a query attends to, if `first_keys` contains a window. It affects only
        the counted FLOPs.
    softcapping: scores are softcapping * tanh(score / softcapping), without ALiBi. None: they are not capped.
    """

    slopes: Tensor | None = None
    first_keys: Tensor | None = None
    end_queries: Tensor | None = None
    sample_keys: Tensor | None = None
    dropout: float = 0.0
    first_head: int = 0
    seq: int | None = None
    window: int | None = None
    softcapping: float | None = None


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: AttentionMask,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns dropout(softmax(query @ key.T * scale + bias)) @ value for each sample and head.

    query: [queries, batch, heads, head_dim]. key, value: [keys, batch, groups, head_dim]. The keys are the
    first tokens of the sequence, and the queries are the last of these tokens (with context parallelism a
    chunk of the sequence, otherwise all tokens). `groups` divides `heads`, and query head i uses group i //
    (heads / groups). All strides are supported; a tensor whose last dimension is not contiguous is copied.
    head_dim is at most MAX_HEAD_DIM. sinks: [heads], or None. Returns [queries, batch, heads, head_dim],
    contiguous.
    """
    return _FlashAttention.apply(query, key, value, sinks, scale, mask)


def sink_gradient(sinks: Tensor, log_sums: Tensor, row_sums: Tensor) -> Tensor:
    """Returns the gradient of the sinks, [heads]. log_sums: natural logarithms of the rows' sums of
    exponentials, including the sink's. row_sums: sum(out * gradient) of each row. Both are fp32
    [batch, heads, queries]."""
    weights = torch.exp(sinks.float()[None, :, None] - log_sums)
    return -(weights * row_sums).sum((0, 2)).to(sinks.dtype)


@first_order
class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scale: float,
        mask: AttentionMask,
    ) -> Tensor:
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        seq = mask.seq or len(key)
        numbers = (scale, mask.softcapping, mask.dropout, mask.first_head, seq, mask.window)
        out, log_sums = attention_forward_op(
            query, key, value, mask.slopes, mask.first_keys, mask.sample_keys, sinks, *numbers
        )
        ctx.save_for_backward(query, key, value, out, log_sums, sinks)
        ctx.mask, ctx.numbers = mask, numbers
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sums, sinks = ctx.saved_tensors
        mask, grad = ctx.mask, grad.contiguous()
        scale, softcapping, dropout, _, *others = ctx.numbers
        masks = (mask.slopes, mask.first_keys, mask.sample_keys)
        grad_query, row_sums, row_keys = attention_backward_query_op(
            query, key, value, out, grad, log_sums, *masks, *ctx.numbers
        )
        grad_key, grad_value = attention_backward_key_op(
            query,
            key,
            value,
            grad,
            log_sums,
            row_sums,
            mask.slopes,
            mask.end_queries,
            row_keys,
            scale,
            softcapping,
            dropout,
            *others,
        )
        grad_sinks = None if sinks is None else sink_gradient(sinks, log_sums * math.log(2), row_sums)
        return grad_query, grad_key, grad_value, grad_sinks, None, None


class Sizes(NamedTuple):
    """Sizes of the sequence and of the heads. group: number of query heads that share a key head."""

    queries: int
    keys: int
    seq: int
    batch: int
    heads: int
    group: int
    first_head: int


class Strides(NamedTuple):
    """The strides of a tensor [seq, batch, heads, head_dim], in elements, except the last one (which is
    1)."""

    seq: int
    batch: int
    head: int


@dataclass(frozen=True)
class Tiles:
    """Sizes of the tiles of queries and of keys, and options of Triton's compiler."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_QUERIES": self.queries, "BLOCK_KEYS": self.keys}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# Architecture -> kernel -> tiles, for heads of up to 64 and of up to 128 elements. The machine code of these
# tiles spills no register and repeats no product. (The compiler assigns 16 rows of a product to a warp, and
# on sm_90 64 rows to a group of 4 warps. Additional warps would repeat products.) The tiles were not timed on
# a GPU.
_TILES = {
    # A block needs at most 99 KiB of shared memory, which consumer GPUs have, too.
    "sm_80": {
        "forward": (Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2)),
        "query": (Tiles(128, 32, 8, 2), Tiles(64, 64, 8, 2)),
        "key": (Tiles(32, 64, 4, 2), Tiles(16, 128, 8, 2)),
    },
    # These tiles also serve sm_100. A block has up to 227 KiB. A product of fewer than 64 columns takes
    # longer to read than to compute.
    "sm_90": {
        "forward": (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3)),
        "query": (Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 2)),
        "key": (Tiles(64, 128, 8, 2), Tiles(64, 128, 8, 2)),
    },
}
_FP32_TILES = {
    "forward": (Tiles(32, 32, 8, 1), Tiles(16, 64, 8, 1)),
    "query": (Tiles(32, 32, 8, 1), Tiles(16, 32, 8, 1)),
    "key": (Tiles(32, 32, 8, 1), Tiles(16, 16, 8, 1)),
}


def tiles(kernel: str, dtype: torch.dtype, head_dim: int, capability: int) -> Tiles:
    """Returns the tiles of a kernel. kernel: 'forward', 'query' or 'key'. capability: see
    `compute_capability`."""
    if dtype == torch.float32:
        return _FP32_TILES[kernel][head_dim > 64]
    return _TILES["sm_90" if 90 <= capability < 120 else "sm_80"][kernel][head_dim > 64]


@lru_cache
def compute_capability(device: torch.device) -> int:
    """Returns the compute capability of a GPU as an integer (90 for sm_90), and 80 for any other device."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@operator("attention_forward")
def attention_forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor | None,
    first_keys: Tensor | None,
    sample_keys: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcapping: float | None,
    p: float,
    first_head: int,
    seq: int,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Returns the output, and for each query the base-2 logarithm of its sum of exponentials, fp32."""
    out, log_sums = query.new_empty(query.shape), _per_row(query, torch.float32)
    launch = _launch("forward", *_layout(query, key, value), scale, softcapping, p, seq, first_head)
    launch(query, key, value, out, log_sums, slopes, first_keys, sample_keys, sinks)
    return out, log_sums


@operator("attention_backward_query")
def attention_backward_query_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad: Tensor,
    log_sums: Tensor,
    slopes: Tensor | None,
    first_keys: Tensor | None,
    sample_keys: Tensor | None,
    scale: float,
    softcapping: float | None,
    p: float,
    first_head: int,
    seq: int,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradient of the queries, and for each row sum(out * grad) (fp32) and its hash (int64)."""
    grad_query, row_sums = query.new_empty(query.shape), _per_row(query, torch.float32)
    row_keys = _per_row(query[:0] if sample_keys is None else query, torch.int64)
    launch = _launch("query", *_layout(query, key, value), scale, softcapping, p, seq, first_head)
    tensors = (query, key, value, out, grad, log_sums, grad_query, row_sums, row_keys)
    launch(*tensors, slopes, first_keys, sample_keys)
    return grad_query, row_sums, row_keys


@operator("attention_backward_key")
def attention_backward_key_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    log_sums: Tensor,
    row_sums: Tensor,
    slopes: Tensor | None,
    end_queries: Tensor | None,
    row_keys: Tensor,
    scale: float,
    softcapping: float | None,
    p: float,
    seq: int,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of keys and values."""
    grad_key, grad_value = key.new_empty(key.shape), value.new_empty(value.shape)
    launch = _launch("key", *_layout(query, key, value), scale, softcapping, p, seq)
    tensors = (query, key, value, grad, log_sums, row_sums, grad_key, grad_value)
    launch(*tensors, slopes, end_queries, row_keys if row_keys.numel() else None)
    return grad_key, grad_value


def _layout(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """Returns the arguments of `_launch` that describe the shapes and strides of the tensors."""
    strides = (Strides(*x.stride()[:3]) for x in (query, key, value))
    return compute_capability(query.device), query.dtype, query.shape, key.shape, *strides


@lru_cache(maxsize=1024)
def _launch(
    kernel: str,
    capability: int,
    dtype: torch.dtype,
    query_shape: torch.Size,
    key_shape: torch.Size,
    query_strides: Strides,
    key_strides: Strides,
    value_strides: Strides,
    scale: float,
    softcapping: float | None,
    p: float,
    seq: int,
    first_head: int = 0,
) -> Launch:
    """Returns the launch of a kernel. kernel: 'forward', 'query' or 'key'. The kernel 'key' uses the hashes
    of rows instead of `first_head`."""
    queries, batch, heads, head_dim = query_shape
    keys, _, groups, _ = key_shape
    tile = tiles(kernel, dtype, head_dim, capability)
    blocks = -(-keys // tile.keys) if kernel == "key" else -(-queries // tile.queries)
    return Launch(
        f"attention_triton.attention_{'forward' if kernel == 'forward' else f'backward_{kernel}'}_kernel",
        (blocks, batch * (groups if kernel == "key" else heads)),
        tile.options,
        sizes=Sizes(queries, keys, seq, batch, heads, heads // groups, first_head),
        query_strides=query_strides,
        key_strides=key_strides,
        value_strides=value_strides,
        scale=scale,
        softcapping=softcapping,
        dropped_below=drop_threshold(p),
        keep_scale=1.0 / (1.0 - p),
        HEAD_DIM=head_dim,
        BLOCK_DIM=max(1 << (head_dim - 1).bit_length(), 16),
        **tile.constants,
    )


def _per_row(query: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocates a tensor [batch, heads, queries] with one element per row of scores."""
    queries, batch, heads, _ = query.shape
    return query.new_empty((batch, heads, queries), dtype=dtype)


# FLOPs of products [queries, keys, head_dim]. As in PyTorch's formulas, the causal mask does not halve them.
# The kernels compute no scores outside of a window.
PRODUCTS = {"attention_forward": 2, "attention_backward_query": 3, "attention_backward_key": 4}
"""The number of products of each operator. The forward pass computes the scores, and weights times values.
The backward pass of the queries computes the scores, and the gradients of weights and queries. The backward
pass of the keys computes the scores, and the gradients of weights, keys and values."""


def count_products(operators: Mapping[str, int]) -> None:
    """Registers the FLOPs of operators whose first arguments are query and key, and whose last argument is a
    window. operators: name -> number of products."""
    for name, number in operators.items():

        def flops(
            query_shape: torch.Size, key_shape: torch.Size, *others: Any, number: int = number, **_: Any
        ) -> int:
            return number * product_flops(query_shape, key_shape, others[-1])

        register_flop_formula(getattr(torch.ops.megatron, name))(flops)


def product_flops(query_shape: torch.Size, key_shape: torch.Size, window: int | None) -> int:
    """Returns the FLOPs of one product [queries, keys, head_dim], summed over samples and heads."""
    queries, batch, heads, head_dim = query_shape
    return 2 * batch * heads * head_dim * scores_within(window, queries, key_shape[0])


def scores_within(window: int | None, queries: int, keys: int) -> int:
    """Returns the number of scores that are counted for the last `queries` of `keys` tokens. Without a window
    it is queries x keys. A window multiplies this number by the share of the causal scores that lie in the
    window."""

    def below_mask(limit: int) -> int:
        """Returns twice the number of causal scores of the queries if each query has at most `limit` keys."""
        first, last = (n**2 if n <= limit else (2 * n - limit) * limit for n in (keys - queries, keys))
        return last - first

    product = queries * keys
    return product if window is None or not product else product * below_mask(window) // below_mask(keys)


count_products(PRODUCTS)
