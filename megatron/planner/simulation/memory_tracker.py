"""Which storages are alive on the simulated device, how large they are, and whose they are.

An owner is one of

    ("state", name)       parameters, gradients or optimizer, as marked by `mark_state`
    ("table", place)      alive when a step began, and not state
    ("kept", slot)        made by an earlier instruction of this step, for the micro-batch in this slot
    ("temporary", "")     made by the current instruction

Sizes are what PyTorch's CUDA allocator counts as allocated: rounded up to 512 bytes. Fragmentation, the CUDA
context and buffers of NCCL and cuBLAS are not known here.
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
    """Counts the storages that it is shown, until they are freed."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._young: set[int] = set()
        """Storages that the current instruction has made."""
        self._sums: Counter[Owner] = Counter()
        self._peak_sums: dict[Owner, int] = {}
        self._during = self._peak_during = ""
        self.total = 0
        self.peak = 0

    def add(self, storage: torch.UntypedStorage, place: str) -> None:
        """Counts a storage, once. place: where it was made, as 'model/position.py _causal'."""
        key = storage._cdata
        if key in self._blocks:
            return
        self._blocks[key] = _Block(0, _TEMPORARY, place)
        self._young.add(key)
        weakref.finalize(storage, self._free, key)
        self._resize(key, _rounded(storage.nbytes()))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """The storage's size has changed."""
        if storage._cdata in self._blocks:
            self._resize(storage._cdata, _rounded(storage.nbytes()))

    def mark_state(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Says that the tensors on the device are the rank's state `name`, one of `STATE`. The first mark of
        a storage counts."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            block = self._blocks.get(key)
            if block is not None and block.owner[0] != "state":
                self._give(key, block, ("state", name))

    def begin_step(self) -> None:
        """From now on the peak is that of the step; what exists already, and is not state, is a table."""
        for key, block in self._blocks.items():
            if block.owner[0] != "state":
                self._give(key, block, ("table", block.place))
        self._young.clear()
        self.restart_peak()

    def is_alive(self, storage_key: int) -> bool:
        """Whether the storage, by its `_cdata`, has not been freed."""
        return storage_key in self._blocks

    def begin_instruction(self, name: str) -> None:
        """What is made from now on is temporary, until the instruction ends."""
        self.end_instruction(None)
        self._during = name

    def end_instruction(self, slot: Hashable) -> None:
        """What the instruction has made and not freed is kept for the micro-batch in `slot`; None: the work
        was outside of instructions."""
        owner = ("kept", slot)
        for key in self._young:
            self._give(key, self._blocks[key], owner)
        self._young.clear()
        self._during = ""

    def peak_memory(self) -> Memory:
        """By owner, when most was allocated since `begin_step`."""
        return _memory(self._peak_sums, self._peak_during)

    def current_memory(self) -> Memory:
        return _memory(self._sums, self._during)

    def _give(self, key: int, block: _Block, owner: Owner) -> None:
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
        """Most was allocated now, until more is allocated after this call."""
        self.peak, self._peak_sums, self._peak_during = self.total, dict(self._sums), self._during

    def _free(self, key: int) -> None:
        block = self._blocks.pop(key)
        self._young.discard(key)
        self._sums[block.owner] -= block.size
        self.total -= block.size


def _rounded(size: int) -> int:
    return -(-size // ROUNDING) * ROUNDING


def _memory(sums: dict[Owner, int], during: str) -> Memory:
    def of_kind(kind: str) -> dict[Hashable, int]:
        return {what: size for (owner, what), size in sums.items() if owner == kind and size}

    state, kept = of_kind("state"), of_kind("kept")
    outside = kept.pop(None, 0)
    return Memory(
        parameters=state.get("parameters", 0),
        gradients=state.get("gradients", 0),
        optimizer=state.get("optimizer", 0),
        activations=tuple(kept[slot] for slot in sorted(kept, key=str)),
        temporaries=sum(of_kind("temporary").values()) + outside,
        tables={str(place): size for place, size in sorted(of_kind("table").items(), key=str)},
        during=during,
    )
