"""Counts the bytes of the storages on the simulated device.

Sizes are rounded up to 512 bytes, as PyTorch's CUDA allocator counts them. Fragmentation, the CUDA context
and the buffers of NCCL and cuBLAS are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

ROUNDING = 512


def rounded(size: int) -> int:
    """Returns the bytes that the allocator uses for a storage of this size."""
    return -(-size // ROUNDING) * ROUNDING


class MemoryTracker:
    """Counts the bytes of the storages that were passed to `add`, until they are freed."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self.total = 0
        self.peak = 0

    def add(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage, but only once."""
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._free, key)
            self._resize(key, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Updates the size of a storage after it has changed."""
        if storage._cdata in self._sizes:
            self._resize(storage._cdata, storage.nbytes())

    def is_alive(self, storage_key: int) -> bool:
        """Returns whether the storage is still allocated. storage_key: the storage's `_cdata`."""
        return storage_key in self._sizes

    def sizes_of(self, tensors: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
        """Returns name -> bytes of its tensors. A storage that several names share counts for the first of
        them."""
        named: dict[int, str] = {}
        for name, parts in tensors.items():
            for tensor in parts:
                named.setdefault(tensor.untyped_storage()._cdata, name)
        sums = dict.fromkeys(tensors, 0)
        for key, name in named.items():
            sums[name] += self._sizes.get(key, 0)
        return sums

    def restart_peak(self) -> None:
        """Sets the peak to the memory that is allocated now."""
        self.peak = self.total

    def _resize(self, key: int, size: int) -> None:
        self.total += rounded(size) - self._sizes.get(key, 0)
        self._sizes[key] = rounded(size)
        if self.total > self.peak:
            self.restart_peak()

    def _free(self, key: int) -> None:
        self.total -= self._sizes.pop(key)
