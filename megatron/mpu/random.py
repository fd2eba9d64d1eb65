"""Dropout that does not depend on the parallel layout.

The idea: a counter-based random number generator (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3,
SC 2011). Whether an element is dropped depends only on a hash of (seed, salt, global sample number,
coordinates of the element in the full activation of that sample). Hence

- a replicated activation has the same mask on every tensor-parallel rank;
- a sharded activation has its part of the full mask on each rank;
- recomputation in the backward pass gives the same mask;
- micro-batch size, data-parallel and pipeline-parallel degrees do not change the mask.

There is no generator state to save. The hash is not one of that paper's generators, but a cheaper combination
of known mixing functions; each function below names its source. `tests/unit/mpu/test_dropout.py` measures the
shares of dropped elements per row, column and sample, the correlations between neighbors, samples, salts and
seeds, and the lengths of runs of equal decisions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from megatron.kernels.dropout import (
    NO_DROPOUT,
    KernelMask,
    drop_threshold,
    fused_dropout_add,
    part_offsets,
    shard_offsets,
)
from megatron.kernels.operators import first_order
from megatron.kernels.selection import uses_kernels
from megatron.mpu.mesh import Axis
from megatron.mpu.mix64 import mix64, signed

# Number of mask elements that a CPU computes at a time, so that temporaries stay in a core's cache.
_ELEMENTS_PER_PIECE = 1 << 17


class Samples(tuple[int, ...]):
    """The global sample numbers of a micro-batch, one per batch row, and data that its passes share."""

    keys: tuple[torch.Tensor, ...] = ()
    """The dropout keys of each salt, int64 [batch] on the device: see `DropoutRNG.device_keys`."""
    loss_gradient = 1.0
    """The gradient of the micro-batch's loss in the backward pass, for losses that layers add."""

    def __init__(self, samples: Sequence[int] = ()) -> None:
        self.kept: dict[str, Any] = {}
        """Values, by name, that layers keep from the forward pass for its recomputation."""


class DropoutRNG:
    """The seed of a run's dropout, and the global sample numbers of the current micro-batch.

    The engine sets `samples` for each forward pass with `use_samples`. Recomputation in the backward pass
    restores the `samples` object of the forward pass, and thereby its keys.
    """

    def __init__(self, seed: int, samples: Sequence[int] = ()) -> None:
        self.seed = seed
        self.samples = Samples(samples)
        self._salts: dict[str, int] = {}

    @contextmanager
    def use_samples(self, samples: Sequence[int], loss_gradient: float = 1.0) -> Iterator[None]:
        """Sets the global sample numbers of the current micro-batch, one per batch row, within the context.
        loss_gradient: see `Samples`; ignored if `samples` is already a `Samples` object."""
        before = self.samples
        if isinstance(samples, Samples):
            self.samples = samples
        else:
            self.samples = Samples(samples)
            self.samples.loss_gradient = loss_gradient
        try:
            yield
        finally:
            self.samples = before

    def sample_keys(self, salt: str) -> list[int]:
        """Returns, for each sample of `samples`, a signed 64-bit hash of seed, salt and sample number."""
        keys = []
        for sample in self.samples:
            digest = hashlib.sha256(f"{self.seed}/{salt}/{sample}".encode()).digest()
            keys.append(int.from_bytes(digest[:8], "little", signed=True))
        return keys

    def host_keys(self) -> torch.Tensor:
        """Returns `sample_keys` for each salt that was ever used, int64 [salts, batch], in pinned memory.
        Rows are padded to multiples of 16 bytes: for addresses that are not multiples of 16, Triton would
        compile a separate kernel."""
        padding = [0] * (len(self.samples) % 2)
        table = torch.tensor([self.sample_keys(salt) + padding for salt in self._salts])
        return get_accelerator().pin_memory(table)

    def copy_keys(self, device: torch.device) -> torch.Tensor | None:
        """Copies `host_keys` of the current samples to the device, asynchronously, and returns the copy; None
        if there is no salt. Writing to the copy changes the dropout masks of these samples."""
        if not self._salts:
            return None
        table = self.host_keys().to(device, non_blocking=True)
        self.samples.keys = table[:, : len(self.samples)].unbind()
        return table

    def device_keys(self, salt: str, device: torch.device) -> torch.Tensor:
        """Returns `sample_keys`, int64 [batch], on `device`. The first call for a micro-batch copies the keys
        of all salts that were ever used."""
        row = self._salts.setdefault(salt, len(self._salts))
        if row >= len(self.samples.keys) or self.samples.keys[row].device.type != device.type:
            self.copy_keys(device)
        return self.samples.keys[row]


class FixedKeys(DropoutRNG):
    """A `DropoutRNG` with given keys: the keys of one dropout and one micro-batch, which are an input of a
    compiled layer."""

    def __init__(self, keys: torch.Tensor) -> None:
        """keys: int64 [batch], on the device of the activation."""
        super().__init__(0, range(len(keys)))
        self._keys = keys

    def device_keys(self, salt: str, device: torch.device) -> torch.Tensor:
        return self._keys


@dataclass(frozen=True)
class Part:
    """One or several ranges of an activation along one dimension."""

    dim: int
    """The dimension. It is neither the last one nor the one that is sharded over the tensor-parallel
    ranks."""
    ranges: tuple[range, ...]
    """The indices in the full activation, in ascending order."""
    size: int
    """Number of elements of the full activation in this dimension."""


class DropoutMask(NamedTuple):
    """All that a dropout mask depends on, for an activation that may be sharded."""

    p: float
    """Probability that an element is dropped."""
    rng: DropoutRNG
    salt: str
    """Name of this dropout in the model. It must be unique in a forward pass, so it includes the layer
    index."""
    batch_dim: int
    """The dimension that indexes the samples of `rng`. It is not the last dimension."""
    shard_dim: int | None
    """The dimension that is sharded over the tensor-parallel ranks; None if the activation is replicated."""
    tp_group: Axis
    part: Part | None = None
    """Which part of the full activation this is, apart from the sharding of shard_dim; None: all of it."""


def dropout(
    x: torch.Tensor,
    p: float,
    dropout_rng: DropoutRNG,
    salt: str,
    *,
    batch_dim: int,
    shard_dim: int | None = None,
    part: Part | None = None,
    tp_group: Axis,
) -> torch.Tensor:
    """Sets elements of `x` to zero with probability p, and divides all other elements by 1 - p. With p = 0 it
    returns `x`. For the other arguments see `DropoutMask`."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability {p} is outside [0, 1)")
    if p == 0.0:
        return x
    return dropout_add(x, None, DropoutMask(p, dropout_rng, salt, batch_dim, shard_dim, tp_group, part))


def dropout_add(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    mask: DropoutMask | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns residual + dropout(x + bias). With Triton it is one kernel. residual: None adds nothing. mask:
    None applies no dropout. bias: [size of the last dimension]."""
    if mask is not None:
        of_kernel = kernel_mask(x, mask) if uses_kernels(x) else None
        if of_kernel is not None:
            return fused_dropout_add(x, bias, residual, of_kernel)
    elif bias is not None and not torch.compiler.is_compiling() and uses_kernels(x):
        return fused_dropout_add(x, bias, residual, NO_DROPOUT)
    x = x if bias is None else x + bias
    x = x if mask is None else _Dropout.apply(x, keep_mask(x, mask), 1.0 / (1.0 - mask.p))
    return x if residual is None else residual + x


def kernel_mask(x: torch.Tensor, mask: DropoutMask) -> KernelMask | None:
    """Returns the values from which a kernel computes the mask of `x`; None if the kernels do not support its
    shard."""
    batch_dim = mask.batch_dim % x.dim()
    if mask.part is None:
        shard_dim = None if mask.shard_dim is None else mask.shard_dim % x.dim()
        offsets = shard_offsets(x.shape, batch_dim, shard_dim, mask.tp_group.rank, mask.tp_group.size)
    else:
        offsets = part_offsets(x.shape, batch_dim, mask.part.dim, mask.part.ranges)
    if offsets is None:
        return None
    return KernelMask(device_sample_keys(x, mask.rng, mask.salt, batch_dim), mask.p, offsets)


def keep_mask(x: torch.Tensor, settings: DropoutMask) -> torch.Tensor:
    """Returns the mask of `dropout`, int8 in the shape of `x`: 1 for elements that are kept, 0 for dropped
    ones."""
    row_keys, shard_dim = _row_keys(x, settings), settings.shard_dim
    is_sharded = shard_dim is not None and shard_dim % x.dim() == x.dim() - 1
    offset = settings.tp_group.rank * x.shape[-1] if is_sharded else 0
    columns = torch.arange(offset, offset + x.shape[-1], device=x.device)
    # `_mix32` is a bijection on 32 bits, so no two columns have the same key.
    column_keys = _mix32(columns).to(torch.int32)
    dropped_below = drop_threshold(settings.p)
    mask = torch.empty(row_keys.shape[0], x.shape[-1], dtype=torch.int8, device=x.device)
    rows_per_piece = (
        max(_ELEMENTS_PER_PIECE // max(x.shape[-1], 1), 1) if x.device.type == "cpu" else mask.shape[0]
    )
    for keys, piece in zip(row_keys.split(rows_per_piece), mask.split(rows_per_piece), strict=True):
        bits = _element_bits(keys, column_keys)
        piece.copy_(bits.ge_(dropped_below))
    return mask.view(x.shape)


def _row_keys(x: torch.Tensor, mask: DropoutMask) -> torch.Tensor:
    """Returns two int32 keys for each row of `x`, [rows, 2]. A row runs along the last dimension."""
    batch_dim, shard_dim, tp_group = mask.batch_dim % x.dim(), mask.shard_dim, mask.tp_group
    last = x.dim() - 1
    row = torch.zeros((1,) * last, dtype=torch.int64, device=x.device)
    stride = 1
    for dim in reversed(range(last)):
        if dim == batch_dim:
            continue
        is_sharded = shard_dim is not None and shard_dim % x.dim() == dim
        first = tp_group.rank * x.shape[dim] if is_sharded else 0
        full = x.shape[dim] * (tp_group.size if is_sharded else 1)
        ranges: tuple[range, ...] = (range(first, first + x.shape[dim]),)
        if mask.part is not None and mask.part.dim == dim:
            ranges, full = mask.part.ranges, mask.part.size
        coordinates = torch.cat([torch.arange(part.start, part.stop, device=x.device) for part in ranges])
        row = row + (coordinates * stride).view([-1 if d == dim else 1 for d in range(last)])
        stride *= full
    sample_keys = device_sample_keys(x, mask.rng, mask.salt, batch_dim).view(
        [-1 if d == batch_dim else 1 for d in range(last)]
    )
    return mix64(sample_keys + row * signed(0x9E3779B97F4A7C15)).reshape(-1, 1).view(torch.int32)


def device_sample_keys(x: torch.Tensor, dropout_rng: DropoutRNG, salt: str, batch_dim: int) -> torch.Tensor:
    """Returns `DropoutRNG.device_keys` on the device of `x`. Raises ValueError if `x` and the RNG have
    different numbers of samples."""
    if batch_dim == x.dim() - 1:
        raise ValueError("the batch cannot be the last dimension of an activation that dropout is applied to")
    if len(dropout_rng.samples) != x.shape[batch_dim]:
        in_batch, in_rng = x.shape[batch_dim], len(dropout_rng.samples)
        raise ValueError(f"dropout '{salt}': the batch has {in_batch} samples, and the RNG {in_rng}")
    return dropout_rng.device_keys(salt, x.device)


def _element_bits(row_keys: torch.Tensor, column_keys: torch.Tensor) -> torch.Tensor:
    """Returns int32 [rows, columns]: a hash of the row's two keys and the column's key.

    The column's key is combined with both keys of the row, and then mixed by a shift and a product. This is
    the first round of hash-prospector's `prospector32`. The second round is not needed: products carry only
    upward, so the upper bits depend on all bits of the keys, and these upper bits decide a comparison with a
    threshold.
    """
    bits = column_keys ^ row_keys[:, :1]
    bits *= row_keys[:, 1:] | 1
    # The bit mask turns the arithmetic shift into a logical one.
    bits ^= (bits >> 15).bitwise_and_((1 << 17) - 1)
    bits *= 0x2C1B3C6D
    return bits


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """Applies a bijection on [0, 2**32) to each int64, which mixes all bits well. It is `lowbias32` of
    https://github.com/skeeto/hash-prospector, which found the constants by search."""
    low = 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & low
    x = ((x ^ (x >> 15)) * 0x846CA68B) & low
    return x ^ (x >> 16)


@first_order
class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        # The scale is applied last, because PyTorch multiplies by a Python number in fp32. A scaled 16-bit
        # mask would be rounded.
        return mask.to(x.dtype).mul_(x).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return mask.to(grad.dtype).mul_(grad).mul_(ctx.scale), None, None
