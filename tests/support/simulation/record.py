"""The record of a simulated training step. All types can be pickled."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from megatron.planner.simulation.device import CollectiveCall

STEP = "step"
"""Name of the work in a step that is outside the instructions of the pipeline schedule."""


@dataclass(frozen=True)
class OperationCount:
    """Number of calls of one operation, their FLOPs (of matrix products and attention), and the bytes of the
    tensors that they read and write."""

    calls: int
    flops: int
    bytes_read: int
    bytes_written: int

    def plus(self, flops: int, bytes_read: int, bytes_written: int) -> OperationCount:
        """Returns these counts plus one more call."""
        read, written = self.bytes_read + bytes_read, self.bytes_written + bytes_written
        return OperationCount(self.calls + 1, self.flops + flops, read, written)


@dataclass(frozen=True)
class HostSync:
    """An operation for which the host waits until the device has finished all its work."""

    cause: str
    """'item', 'copy to host', 'copy to device', 'synchronize' or the name of the operation."""
    place: str
    """Callers in this repository and in DeepSpeed, innermost first, as 'file:line function'."""


@dataclass
class OpCounts:
    """The work of one instruction of the schedule, or of the step outside of instructions."""

    operations: dict[str, OperationCount] = field(default_factory=dict)
    calls: list[CollectiveCall] = field(default_factory=list)
    syncs: list[HostSync] = field(default_factory=list)

    @property
    def flops(self) -> int:
        return sum(count.flops for count in self.operations.values())

    @property
    def launched(self) -> int:
        """Returns the number of operations that run on the device. Views do not."""
        return sum(count.calls for count in self.operations.values())


@dataclass(frozen=True)
class Instruction:
    """One instruction of the schedule. kind: such as 'ForwardPass'. chunk: the model chunk; 0 with 1F1B."""

    kind: str
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of chunk {self.chunk}" if self.chunk else self.kind


@dataclass(frozen=True)
class Memory:
    """Bytes on the device at one time. The size of every storage is rounded up to a multiple of 512 bytes.

    state: parameters, gradients and optimizer state. activations: for each micro-batch in flight, bytes that
    earlier instructions keep for later ones.
    """

    total: int
    state: int
    activations: tuple[int, ...]


# Passes that produce gradients. The last such pass in a step also starts to reduce them.
_REDUCING_PASSES = ("BackwardPass", "WeightGradPass")


@dataclass(frozen=True)
class StepRecord:
    """One training step of one rank: the second step of a run, when all state and all tables exist.

    `first`, `rest` and `last` are the work of an instruction in its first occurrence in the step, in any
    middle one, and in its last one. `rest` and `last` do not contain an instruction that occurs once. Raises
    ValueError if the middle occurrences differ: their work then depends on more than the schedule.
    """

    rank: int
    stage: int
    micro_batches: int
    """Number of simulated micro-batches. The run's step may have more."""
    parameters: int
    """Number of parameters on this rank."""
    start_peak: int
    """Largest number of bytes on the device before the first step, while model and optimizer are made."""
    peak: Memory
    end: Memory
    communicators: int
    """Number of NCCL communicators that the process has made."""
    works: tuple[tuple[Instruction, OpCounts], ...]
    """The instructions of the step and their work, in order."""
    outside: OpCounts
    """The work of the step outside of instructions."""

    def __post_init__(self) -> None:
        for instruction, found in self._occurrences.items():
            for count in found[2:-1] if instruction.kind in _REDUCING_PASSES else found[2:]:
                if count != self.rest[instruction]:
                    raise ValueError(
                        f"{instruction} differs between micro-batches: {self.rest[instruction]}, {count}"
                    )

    @cached_property
    def _occurrences(self) -> dict[Instruction, list[OpCounts]]:
        found: dict[Instruction, list[OpCounts]] = {}
        for instruction, count in self.works:
            found.setdefault(instruction, []).append(count)
        return found

    @property
    def first(self) -> dict[Instruction, OpCounts]:
        return {instruction: found[0] for instruction, found in self._occurrences.items()}

    @cached_property
    def rest(self) -> dict[Instruction, OpCounts]:
        # The second occurrence may finish the reduction that the first one started, and the first one
        # overwrites the sums.
        index = {name: 2 if len(found) > 3 else 1 for name, found in self._occurrences.items()}
        return {name: found[index[name]] for name, found in self._occurrences.items() if found[1:]}

    @property
    def last(self) -> dict[Instruction, OpCounts]:
        return {instruction: found[-1] for instruction, found in self._occurrences.items() if found[1:]}

    @property
    def counts(self) -> tuple[OpCounts, ...]:
        """Returns the work of each instruction of the step, and of the step outside of instructions."""
        return (*(count for _, count in self.works), self.outside)

    @property
    def flops(self) -> int:
        return sum(count.flops for count in self.counts)

    @property
    def calls(self) -> tuple[CollectiveCall, ...]:
        """Returns all collective calls in the order of the instructions, then the calls outside of
        instructions."""
        return tuple(call for count in self.counts for call in count.calls)

    @property
    def syncs(self) -> dict[tuple[str, HostSync], int]:
        """Returns the host synchronizations: (kind of instruction, synchronization) -> number of times."""
        found: Counter[tuple[str, HostSync]] = Counter()
        kinds = [*(instruction.kind for instruction, _ in self.works), STEP]
        for kind, count in zip(kinds, self.counts, strict=True):
            found.update((kind, sync) for sync in count.syncs)
        return dict(found)
