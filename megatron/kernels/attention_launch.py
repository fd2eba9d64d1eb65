"""Sizes of the tiles of the attention kernels, and their launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from megatron.kernels.attention_triton import (
    attention_backward_key_kernel,
    attention_backward_query_kernel,
    attention_forward_kernel,
)
from megatron.kernels.dropout import drop_threshold


@dataclass(frozen=True)
class Tiles:
    """Sizes of the tiles of queries and of keys, and compile options."""

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


# Kernel -> tiles, for heads of up to 64 and of up to 128. Compiled for sm_80 and sm_90, none of them spills a
# register, and a block needs at most 99 KiB of shared memory, which consumer GPUs have.
_TILES = {
    "forward": (Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2)),
    "query": (Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)),
    "key": (Tiles(32, 64, 8, 2), Tiles(32, 64, 8, 2)),
}
_FP32_TILES = {
    "forward": (Tiles(32, 32, 8, 1), Tiles(16, 64, 8, 1)),
    "query": (Tiles(32, 32, 8, 1), Tiles(16, 32, 8, 1)),
    "key": (Tiles(32, 32, 8, 1), Tiles(16, 16, 8, 1)),
}


def tiles(kernel: str, dtype: torch.dtype, head_dim: int) -> Tiles:
    """For 'forward', 'query' and 'key'."""
    return (_FP32_TILES if dtype == torch.float32 else _TILES)[kernel][head_dim > 64]


def launch_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    slopes: torch.Tensor | None,
    first_keys: torch.Tensor | None,
    sample_keys: torch.Tensor | None,
    scale: float,
    p: float,
    first_head: int,
) -> None:
    """Fills `out` and `log_sums`; see `megatron::attention_forward`."""
    sizes, common = _common("forward", query, key, value, slopes, first_keys, scale, p)
    seq, batch, heads, _ = query.shape
    if query.numel():
        attention_forward_kernel[(triton.cdiv(seq, sizes.queries), batch * heads)](
            query,
            key,
            value,
            out,
            log_sums,
            sample_keys=sample_keys,
            first_head=first_head,
            HAS_DROPOUT=sample_keys is not None,
            **common,
        )


def launch_backward_query(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    grad: torch.Tensor,
    log_sums: torch.Tensor,
    grad_query: torch.Tensor,
    row_sums: torch.Tensor,
    row_keys: torch.Tensor,
    slopes: torch.Tensor | None,
    first_keys: torch.Tensor | None,
    sample_keys: torch.Tensor | None,
    scale: float,
    p: float,
    first_head: int,
) -> None:
    """Fills `grad_query`, `row_sums` and `row_keys`; see `megatron::attention_backward_query`."""
    sizes, common = _common("query", query, key, value, slopes, first_keys, scale, p)
    seq, batch, heads, _ = query.shape
    if query.numel():
        attention_backward_query_kernel[(triton.cdiv(seq, sizes.queries), batch * heads)](
            query,
            key,
            value,
            out,
            grad,
            log_sums,
            grad_query,
            row_sums,
            row_keys,
            sample_keys=sample_keys,
            first_head=first_head,
            HAS_DROPOUT=sample_keys is not None,
            **common,
        )


def launch_backward_key(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad: torch.Tensor,
    log_sums: torch.Tensor,
    row_sums: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    slopes: torch.Tensor | None,
    first_keys: torch.Tensor | None,
    end_queries: torch.Tensor | None,
    row_keys: torch.Tensor,
    scale: float,
    p: float,
) -> None:
    """Fills `grad_key` and `grad_value`; see `megatron::attention_backward_key`."""
    sizes, common = _common("key", query, key, value, slopes, first_keys, scale, p)
    seq, batch, groups, _ = key.shape
    if query.numel():
        attention_backward_key_kernel[(triton.cdiv(seq, sizes.keys), batch * groups)](
            query,
            key,
            value,
            grad,
            log_sums,
            row_sums,
            grad_key,
            grad_value,
            end_queries=end_queries,
            row_keys=row_keys,
            HAS_DROPOUT=p > 0,
            **common,
        )


def _common(
    kernel: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slopes: torch.Tensor | None,
    first_keys: torch.Tensor | None,
    scale: float,
    p: float,
) -> tuple[Tiles, dict[str, Any]]:
    """Tile sizes, and the arguments that all kernels have."""
    seq, batch, heads, head_dim = query.shape
    block_dim = max(triton.next_power_of_2(head_dim), 16)
    sizes = tiles(kernel, query.dtype, head_dim)
    strides = {
        f"{name}_{dim}": stride
        for name, tensor in (("query", query), ("key", key), ("value", value))
        for dim, stride in zip(("seq", "batch", "head"), tensor.stride(), strict=False)
    }
    return sizes, {
        "slopes": slopes,
        "first_keys": first_keys,
        "HAS_SLOPES": slopes is not None,
        "HAS_RANGES": first_keys is not None,
        "seq": seq,
        "batch": batch,
        "heads": heads,
        "group": heads // key.shape[2],
        **strides,
        "scale": scale,
        "dropped_below": drop_threshold(p),
        "keep_scale": 1.0 / (1.0 - p),
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": block_dim,
        **sizes.constants,
        **sizes.options,
    }
