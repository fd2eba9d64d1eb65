"""Memory of a simulated step by owner: the rank's state, and the micro-batches in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

import torch

from megatron.planner.simulation.memory_tracker import MemoryTracker, rounded
from tests.support.simulation.record import Memory

_STATE = "state"
Owner = Hashable
"""The owner of a storage: `_STATE`, the buffer of a micro-batch, or None."""


class StepMemory(MemoryTracker):
    """Counts the bytes of the storages by owner, until they are freed."""

    def __init__(self) -> None:
        self._owners: dict[int, Owner] = {}
        self._new: set[int] = set()
        """Keys of the storages that the current instruction has made."""
        self._sums: Counter[Owner] = Counter()
        super().__init__()
        self.restart_peak()

    def mark_state(self, tensors: Iterable[torch.Tensor]) -> None:
        """Marks tensors as the rank's state."""
        for tensor in tensors:
            self._set_owner(tensor.untyped_storage()._cdata, _STATE)

    def begin_step(self) -> None:
        """Starts a step and its peak."""
        for key, owner in list(self._owners.items()):
            if owner != _STATE:
                self._set_owner(key, None)
        self._new.clear()
        self.restart_peak()

    def end_instruction(self, slot: Owner) -> None:
        """Ends an instruction. Its storages that are not freed are kept for the micro-batch in `slot`. With
        `slot` None they are kept for work outside of instructions."""
        for key in self._new:
            self._set_owner(key, slot)
        self._new.clear()

    def now(self) -> Memory:
        """Returns the memory at this time."""
        in_flight = {owner: size for owner, size in self._sums.items() if owner not in (_STATE, None)}
        return Memory(self.total, self._sums[_STATE], tuple(size for size in in_flight.values() if size))

    def restart_peak(self) -> None:
        super().restart_peak()
        self.at_peak = self.now()

    def _set_owner(self, key: int, owner: Owner) -> None:
        if key in self._sizes:
            self._sums[self._owners[key]] -= self._sizes[key]
            self._sums[owner] += self._sizes[key]
            self._owners[key] = owner

    def _resize(self, key: int, size: int) -> None:
        if key not in self._sizes:
            self._owners[key] = None
            self._new.add(key)
        self._sums[self._owners[key]] += rounded(size) - self._sizes.get(key, 0)
        super()._resize(key, size)

    def _free(self, key: int) -> None:
        self._sums[self._owners.pop(key)] -= self._sizes[key]
        self._new.discard(key)
        super()._free(key)
