"""The record of a simulated training step. All types are frozen and can be pickled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

STEP = "step"
"""Name of the work in a step that is outside the instructions of the pipeline schedule."""


class SimulationError(RuntimeError):
    """A step cannot be simulated, or cannot be extrapolated to more micro-batches."""


@dataclass(frozen=True)
class OperationCount:
    """Number of calls of one operation, their FLOPs (of matrix products and attention), and the bytes of the
    tensors that they read and write."""

    calls: int
    flops: int
    bytes_read: int
    bytes_written: int


POINT_TO_POINT = ("send", "recv_")
"""c10d's names of the operations that send and receive a message."""


@dataclass(frozen=True)
class CollectiveCall:
    """One call of a collective or of a point-to-point operation, as this rank issues it."""

    operation: str
    """Name of the c10d operation, such as 'allreduce_', 'send' or 'recv_'."""
    ranks: tuple[int, ...]
    """Global ranks of the process group, sorted; for 'send' and 'recv_' only the other rank."""
    dtype: str
    elements: int
    """Elements of the full tensor: the output of an all-gather, the input of a reduce-scatter."""
    bytes: int
    """Bytes of the full tensor."""


@dataclass(frozen=True)
class HostSync:
    """An operation for which the host waits until the device has finished all its work."""

    cause: str
    """'item', 'copy to host', 'copy to device', 'synchronize' or the name of the operation."""
    place: str
    """Callers in this repository and in DeepSpeed, innermost first, as 'file:line function'."""


@dataclass(frozen=True)
class OpCounts:
    """The work of one instruction of the schedule, or of the step outside of instructions."""

    operations: Mapping[str, OperationCount]
    calls: tuple[CollectiveCall, ...]
    syncs: tuple[HostSync, ...]

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
    """Bytes on the device at one time, by owner. Every storage is rounded up to 512 bytes."""

    parameters: int
    gradients: int
    optimizer: int
    activations: tuple[int, ...]
    """Bytes that earlier instructions keep for later ones; an entry per micro-batch in flight, by slot."""
    temporaries: int
    """Bytes that the current instruction has made."""
    tables: Mapping[str, int]
    """Storages that live longer than a step, such as attention biases: place in the code
    that made them -> bytes."""
    during: str = ""
    """Name of the current instruction."""

    @property
    def total(self) -> int:
        fixed = self.parameters + self.gradients + self.optimizer + self.temporaries
        return fixed + sum(self.activations) + sum(self.tables.values())


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
    world_size: int
    micro_batches: int
    """Number of simulated micro-batches; the run's step may have more."""
    parameters: int
    """Number of parameters on this rank."""
    start_peak: int
    """Largest number of bytes on the device before the first step, while model and optimizer are made."""
    peak: Memory
    end: Memory
    host_bytes: int
    """Bytes of large tensors in host memory at the end of the step: offloaded state and activations."""
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
