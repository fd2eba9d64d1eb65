"""Dropout that does not know the layout.

Whether an element is dropped is a function of (seed, salt, global sample number, the element's coordinates in
the whole activation of that sample) and of nothing else. So it is the same on every tensor rank where the
activation is replicated, each rank's own part of the whole where it is cut, the same when it is computed
again for the backward pass, and the same for every micro-batch size, data and pipeline degree. No generator
has a state to keep.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.autograd.function import once_differentiable

from megatron.mpu.layout import TPGroup

# Masks are made this many elements at a time, which is what stays in a CPU core's cache.
_ELEMENTS_PER_PIECE = 1 << 17


class DropoutRNG:
    """The seed of all dropout of a run, and which samples the micro-batch in flight consists of.

    The engine sets `samples` before each forward pass. What computes activations again in the backward pass
    keeps the samples of its forward pass and puts them back with `use_samples`.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.samples: tuple[int, ...] = ()

    @contextmanager
    def use_samples(self, samples: Sequence[int]) -> Iterator[None]:
        """Within the block, the micro-batch in flight is these global sample numbers, one per batch row."""
        before = self.samples
        self.samples = tuple(samples)
        try:
            yield
        finally:
            self.samples = before

    def sample_keys(self, salt: str) -> list[int]:
        """For each sample in flight, 64 bits (signed) made of the seed, the salt and its number."""
        keys = []
        for sample in self.samples:
            digest = hashlib.sha256(f"{self.seed}/{salt}/{sample}".encode()).digest()
            keys.append(int.from_bytes(digest[:8], "little", signed=True))
        return keys


def dropout(
    x: torch.Tensor,
    p: float,
    dropout_rng: DropoutRNG,
    salt: str,
    *,
    batch_dim: int,
    shard_dim: int | None = None,
    tp_group: TPGroup,
) -> torch.Tensor:
    """Set elements of `x` to zero with probability p and divide the others by 1 - p. With p = 0, `x` itself.

    salt: name of the place in the model, another one for each call in a forward pass (layer number included).
    batch_dim: the dimension of `x` that counts the samples of `dropout_rng`; any but the last one.
    shard_dim: the dimension of which this tensor rank has its part; None where `x` is the same on all ranks.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability {p} is outside [0, 1)")
    if p == 0.0:
        return x
    return _Dropout.apply(
        x, keep_mask(x, p, dropout_rng, salt, batch_dim, shard_dim, tp_group), 1.0 / (1.0 - p)
    )


def keep_mask(
    x: torch.Tensor,
    p: float,
    dropout_rng: DropoutRNG,
    salt: str,
    batch_dim: int,
    shard_dim: int | None,
    tp_group: TPGroup,
) -> torch.Tensor:
    """The mask that `dropout` uses: int8, of the shape of `x`, 1 where the element is kept."""
    row_keys = _row_keys(x, dropout_rng, salt, batch_dim % x.dim(), shard_dim, tp_group)
    offset = (
        tp_group.rank * x.shape[-1] if shard_dim is not None and shard_dim % x.dim() == x.dim() - 1 else 0
    )
    columns = torch.arange(offset, offset + x.shape[-1], device=x.device)
    # One to one on 32 bits, so that no two columns share their key.
    column_keys = _mix32(columns).to(torch.int32)
    dropped_below = min(round(p * 2**32), 2**32 - 1) - 2**31

    mask = torch.empty(row_keys.shape[0], x.shape[-1], dtype=torch.int8, device=x.device)
    rows_per_piece = (
        max(_ELEMENTS_PER_PIECE // max(x.shape[-1], 1), 1) if x.device.type == "cpu" else mask.shape[0]
    )
    for keys, piece in zip(row_keys.split(rows_per_piece), mask.split(rows_per_piece), strict=True):
        bits = _element_bits(keys, column_keys)
        piece.copy_(bits.ge_(dropped_below))
    return mask.view(x.shape)


def _row_keys(
    x: torch.Tensor,
    dropout_rng: DropoutRNG,
    salt: str,
    batch_dim: int,
    shard_dim: int | None,
    tp_group: TPGroup,
) -> torch.Tensor:
    """Two int32 keys [rows, 2] for each row of `x`: the elements that differ in the last dim only."""
    last = x.dim() - 1
    if batch_dim == last:
        raise ValueError("the batch cannot be the last dimension of an activation that dropout is applied to")
    if len(dropout_rng.samples) != x.shape[batch_dim]:
        in_batch, in_rng = x.shape[batch_dim], len(dropout_rng.samples)
        raise ValueError(f"dropout '{salt}': the batch has {in_batch} samples, and the RNG {in_rng}")
    row = torch.zeros((1,) * last, dtype=torch.int64, device=x.device)
    stride = 1
    for dim in reversed(range(last)):
        if dim == batch_dim:
            continue
        is_cut = shard_dim is not None and shard_dim % x.dim() == dim
        first = tp_group.rank * x.shape[dim] if is_cut else 0
        coordinates = torch.arange(first, first + x.shape[dim], device=x.device)
        row = row + (coordinates * stride).view([-1 if d == dim else 1 for d in range(last)])
        stride *= x.shape[dim] * (tp_group.size if is_cut else 1)
    # A copy from pinned memory is not waited for.
    sample_keys = get_accelerator().pin_memory(torch.tensor(dropout_rng.sample_keys(salt), dtype=torch.int64))
    sample_keys = sample_keys.to(x.device, non_blocking=True)
    sample_keys = sample_keys.view([-1 if d == batch_dim else 1 for d in range(last)])
    return mix64(sample_keys + row * _signed(0x9E3779B97F4A7C15)).reshape(-1, 1).view(torch.int32)


def _element_bits(row_keys: torch.Tensor, column_keys: torch.Tensor) -> torch.Tensor:
    """int32 [rows, columns] with random upper bits: a hash of the row's two keys and the column's."""
    bits = column_keys ^ row_keys[:, :1]
    bits *= row_keys[:, 1:] | 1
    # The mask makes a logical shift of an arithmetic one.
    bits ^= (bits >> 15).bitwise_and_((1 << 17) - 1)
    bits *= 0x2C1B3C6D
    return bits


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """A one-to-one map of [0, 2**32) that spreads every bit; int64 in and out."""
    low = 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & low
    x = ((x ^ (x >> 15)) * 0x846CA68B) & low
    return x ^ (x >> 16)


def mix64(x: torch.Tensor) -> torch.Tensor:
    """A one-to-one map of 64 bits that spreads every bit (the finisher of SplitMix64); int64 in and out."""
    x = (x ^ _logical_shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _logical_shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return x - (1 << 64) if x >= 1 << 63 else x


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        # The scale last: a number of Python is a factor in fp32, which a 16-bit mask would round.
        return mask.to(x.dtype).mul_(x).mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return mask.to(grad.dtype).mul_(grad).mul_(ctx.scale), None, None
