"""Tracks the storages on the simulated device: their sizes, and to which owner each belongs.

An owner is one of

    ("state", name)       parameters, gradients or optimizer state, as marked by `mark_state`
    ("table", place)      allocated before the step began, but not state; place: the code that made it
    ("kept", slot)        made by an earlier instruction of this step, for the micro-batch in this slot
    ("temporary", "")     made by the current instruction

Sizes are rounded up to 512 bytes, as PyTorch's CUDA allocator counts them. Fragmentation, the CUDA context
and the buffers of NCCL and cuBLAS are not tracked.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch

from megatron.planner.simulation.record import Memory

ROUNDING = 512
STATE = ("parameters", "gradients", "optimizer")
_TEMPORARY = ("temporary", "")

Owner = tuple[str, Hashable]


@dataclass
class _Block:
    size: int
    owner: Owner
    place: str


class MemoryTracker:
    """Counts the bytes of the storages passed to `add`, until they are freed."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._new: set[int] = set()
        """Keys of the storages that the current instruction has made."""
        self._sums: Counter[Owner] = Counter()
        self._peak_sums: dict[Owner, int] = {}
        self._during = self._peak_during = ""
        self.total = 0
        self.peak = 0

    def add(self, storage: torch.UntypedStorage, place: str) -> None:
        """Counts a storage once. place: the code that made it, such as 'model/position.py _causal'."""
        key = storage._cdata
        if key in self._blocks:
            return
        self._blocks[key] = _Block(0, _TEMPORARY, place)
        self._new.add(key)
        weakref.finalize(storage, self._free, key)
        self._resize(key, _rounded(storage.nbytes()))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Updates the size of a storage after it has changed."""
        if storage._cdata in self._blocks:
            self._resize(storage._cdata, _rounded(storage.nbytes()))

    def mark_state(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Marks tensors as the rank's state `name`, one of `STATE`. A storage keeps its first mark."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            block = self._blocks.get(key)
            if block is not None and block.owner[0] != "state":
                self._set_owner(key, block, ("state", name))

    def begin_step(self) -> None:
        """Starts a step and its peak. Storages that exist at this time and are not state become tables."""
        for key, block in self._blocks.items():
            if block.owner[0] != "state":
                self._set_owner(key, block, ("table", block.place))
        self._new.clear()
        self.restart_peak()

    def is_alive(self, storage_key: int) -> bool:
        """Returns whether the storage is still allocated. storage_key: the storage's `_cdata`."""
        return storage_key in self._blocks

    def begin_instruction(self, name: str) -> None:
        """Starts an instruction. Storages made from now on are temporary until it ends."""
        self.end_instruction(None)
        self._during = name

    def end_instruction(self, slot: Hashable) -> None:
        """Ends the instruction. Its storages that are not freed are kept for the micro-batch in `slot`, or,
        if `slot` is None, for work outside of instructions."""
        owner = ("kept", slot)
        for key in self._new:
            self._set_owner(key, self._blocks[key], owner)
        self._new.clear()
        self._during = ""

    def peak_memory(self) -> Memory:
        """Returns the bytes by owner at the peak since `begin_step`."""
        return _memory(self._peak_sums, self._peak_during)

    def current_memory(self) -> Memory:
        """Returns the bytes by owner at this time."""
        return _memory(self._sums, self._during)

    def _set_owner(self, key: int, block: _Block, owner: Owner) -> None:
        self._sums[block.owner] -= block.size
        self._sums[owner] += block.size
        block.owner = owner

    def _resize(self, key: int, size: int) -> None:
        block = self._blocks[key]
        self._sums[block.owner] += size - block.size
        self.total += size - block.size
        block.size = size
        if self.total > self.peak:
            self.restart_peak()

    def restart_peak(self) -> None:
        """Sets the peak to the memory at this time."""
        self.peak, self._peak_sums, self._peak_during = self.total, dict(self._sums), self._during

    def _free(self, key: int) -> None:
        block = self._blocks.pop(key)
        self._new.discard(key)
        self._sums[block.owner] -= block.size
        self.total -= block.size


def _rounded(size: int) -> int:
    return -(-size // ROUNDING) * ROUNDING


def _memory(sums: dict[Owner, int], during: str) -> Memory:
    def owned_by(kind: str) -> dict[Hashable, int]:
        return {what: size for (owner, what), size in sums.items() if owner == kind and size}

    state, kept = owned_by("state"), owned_by("kept")
    outside = kept.pop(None, 0)
    return Memory(
        parameters=state.get("parameters", 0),
        gradients=state.get("gradients", 0),
        optimizer=state.get("optimizer", 0),
        activations=tuple(kept[slot] for slot in sorted(kept, key=str)),
        temporaries=sum(owned_by("temporary").values()) + outside,
        tables={str(place): size for place, size in sorted(owned_by("table").items(), key=str)},
        during=during,
    )
