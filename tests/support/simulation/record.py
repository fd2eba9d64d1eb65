"""The record of a simulated training step. All types can be pickled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
        """Returns these counts and one more call."""
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
        """Number of operations that run on the device; views do not."""
        return sum(count.calls for count in self.operations.values())


@dataclass(frozen=True)
class Instruction:
    """One instruction of the schedule. kind: such as 'ForwardPass'. chunk: model chunk; 0 with 1F1B."""

    kind: str
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of chunk {self.chunk}" if self.chunk else self.kind


@dataclass(frozen=True)
class Memory:
    """Bytes on the device at one time. Every storage is rounded up to 512 bytes.

    state: parameters, gradients and optimizer state. activations: bytes that earlier instructions keep for
    later ones; an entry per micro-batch in flight.
    """

    total: int
    state: int
    activations: tuple[int, ...]


@dataclass(frozen=True)
class StepRecord:
    """One training step of one rank: the second of a run, when all state and all tables exist.

    `first`, `rest` and `last` are the work of an instruction in its first occurrence in the step, in any
    middle one, and in its last one. (The last backward pass also starts to reduce gradients.) The simulation
    has checked that all middle occurrences are equal, so `counts_of` is exact for any number of
    micro-batches.
    """

    rank: int
    stage: int
    micro_batches: int
    """Number of simulated micro-batches; the run's step may have more."""
    parameters: int
    """Number of parameters on this rank."""
    start_peak: int
    """Largest number of bytes on the device before the first step, while model and optimizer are made."""
    peak: Memory
    end: Memory
    communicators: int
    """Number of NCCL communicators that the process has made."""
    first: Mapping[Instruction, OpCounts]
    rest: Mapping[Instruction, OpCounts]
    last: Mapping[Instruction, OpCounts]
    order: tuple[Instruction, ...]
    """The instructions of the simulated step, in order."""
    outside: OpCounts
    """The work of the step outside of instructions."""

    def counts_of(self, order: Sequence[Instruction]) -> tuple[OpCounts, ...]:
        """Returns the work of each instruction in `order`, followed by the work outside of instructions.
        `order` may have more micro-batches than were simulated."""
        left, seen = Counter(order), set()
        found = []
        for instruction in order:
            left[instruction] -= 1
            kind = self.rest if left[instruction] else self.last
            found.append((kind if instruction in seen else self.first)[instruction])
            seen.add(instruction)
        return (*found, self.outside)

    @cached_property
    def counts(self) -> tuple[OpCounts, ...]:
        """The work of each instruction of the simulated step, and of the step outside of instructions."""
        return self.counts_of(self.order)

    @property
    def flops(self) -> int:
        return sum(count.flops for count in self.counts)

    @property
    def calls(self) -> tuple[CollectiveCall, ...]:
        """All collective calls in the order of the instructions, then those outside of instructions."""
        return tuple(call for count in self.counts for call in count.calls)

    @property
    def syncs(self) -> dict[tuple[str, HostSync], int]:
        """Host synchronizations: (kind of instruction, synchronization) -> number of times."""
        found: Counter[tuple[str, HostSync]] = Counter()
        kinds = [*(instruction.kind for instruction in self.order), STEP]
        for kind, count in zip(kinds, self.counts, strict=True):
            found.update((kind, sync) for sync in count.syncs)
        return dict(found)
