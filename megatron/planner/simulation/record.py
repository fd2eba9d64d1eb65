"""What a simulated training step reports. All types are frozen and can be pickled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

STEP = "step"
"""The kind of the work of a step outside the instructions of the pipeline schedule."""


class SimulationError(RuntimeError):
    """The step cannot be simulated, or not extrapolated to more micro-batches."""


@dataclass(frozen=True)
class OperationCount:
    """Calls of one operation, and what they cost: FLOPs of matrix products and attention, and the bytes of
    the tensors that are read and written."""

    calls: int
    flops: int
    bytes_read: int
    bytes_written: int


POINT_TO_POINT = ("send", "recv_")
"""c10d's names of messages."""


@dataclass(frozen=True)
class CollectiveCall:
    """One call of a collective or of a point-to-point operation, as this rank issues it."""

    operation: str
    """Name of the c10d operation, as 'allreduce_', 'send' or 'recv_'."""
    ranks: tuple[int, ...]
    """Global ranks of the process group, sorted; of 'send' and 'recv_' only the other rank."""
    dtype: str
    elements: int
    """Of the full tensor: the output of an all-gather, the input of a reduce-scatter."""
    bytes: int


@dataclass(frozen=True)
class HostSync:
    """An operation for which the host waits until the device has finished all its work."""

    cause: str
    """'item', 'copy to host', 'copy to device', 'synchronize' or the name of the operation."""
    place: str
    """file:line function, innermost first, of the callers in this repository and in DeepSpeed."""


@dataclass(frozen=True)
class OpCounts:
    """Everything that one instruction of the schedule does, or the rest of the step does."""

    operations: Mapping[str, OperationCount]
    calls: tuple[CollectiveCall, ...]
    syncs: tuple[HostSync, ...]

    @property
    def flops(self) -> int:
        return sum(count.flops for count in self.operations.values())

    @property
    def launched(self) -> int:
        """Operations that run on the device; views launch nothing."""
        return sum(count.calls for count in self.operations.values())


@dataclass(frozen=True)
class Instruction:
    """One instruction of the schedule: its kind, as 'ForwardPass', and its chunk, which is 0 with 1F1B."""

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
    """Per in-flight micro-batch, what earlier instructions left for later ones; in the order of slots."""
    temporaries: int
    """Made by the current instruction."""
    tables: Mapping[str, int]
    """What lives longer than a step, by the place that made it: attention biases, receive buffers."""
    during: str = ""
    """The instruction."""

    @property
    def total(self) -> int:
        fixed = self.parameters + self.gradients + self.optimizer + self.temporaries
        return fixed + sum(self.activations) + sum(self.tables.values())


@dataclass(frozen=True)
class StepRecord:
    """One training step of one rank: the second of a run, when all state and all tables exist.

    `first`, `rest` and `last` are the work of one instruction: of its first occurrence in a step, of any
    other, and of its last one. The last backward pass also starts to reduce gradients. The simulation has
    checked that all others are equal, so that `works_of` is exact for any number of micro-batches.
    """

    rank: int
    stage: int
    world_size: int
    micro_batches: int
    """Simulated ones; `schedule` may have more."""
    parameters: int
    """Number of parameters on this rank."""
    start_peak: int
    """Most bytes on the device before the first step, while model and optimizer are made."""
    peak: Memory
    end: Memory
    host_bytes: int
    """Large tensors in host memory at the end of the step: offloaded state, offloaded activations."""
    communicators: int
    """Of NCCL, from the start of the process."""
    first: Mapping[Instruction, OpCounts]
    rest: Mapping[Instruction, OpCounts]
    last: Mapping[Instruction, OpCounts]
    order: tuple[Instruction, ...]
    """The instructions of the step, in order."""
    outside: OpCounts
    """The work of the step outside of instructions."""

    def works_of(self, order: Sequence[Instruction]) -> tuple[OpCounts, ...]:
        """The work of each instruction of `order`, then that outside of instructions. `order` may have more
        micro-batches than were simulated."""
        left, seen = Counter(order), set()
        works = []
        for instruction in order:
            left[instruction] -= 1
            kind = self.rest if left[instruction] else self.last
            works.append((kind if instruction in seen else self.first)[instruction])
            seen.add(instruction)
        return (*works, self.outside)

    @cached_property
    def works(self) -> tuple[OpCounts, ...]:
        """`works_of` the simulated step."""
        return self.works_of(self.order)

    @property
    def flops(self) -> int:
        return sum(work.flops for work in self.works)

    @property
    def calls(self) -> tuple[CollectiveCall, ...]:
        """All collective calls, in the order of the instructions; those outside come last."""
        return tuple(call for work in self.works for call in work.calls)

    @property
    def syncs(self) -> dict[tuple[str, HostSync], int]:
        """How often the host waits: (instruction kind, what for) -> number of times."""
        counts: Counter[tuple[str, HostSync]] = Counter()
        kinds = [*(instruction.kind for instruction in self.order), STEP]
        for kind, work in zip(kinds, self.works, strict=True):
            counts.update((kind, sync) for sync in work.syncs)
        return dict(counts)
