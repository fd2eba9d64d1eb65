"""What one step does, collected while it runs, and checked to be the same for every micro-batch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType

import torch.distributed as dist

from megatron.planner.simulation.memory_tracker import MemoryTracker
from megatron.planner.simulation.passes import Kernel
from megatron.planner.simulation.record import (
    CollectiveCall,
    HostSync,
    Instruction,
    OpCounts,
    OperationCount,
    SimulationError,
)

_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_FRAMES = 3
COMMIT = "CommitP2P"
# The last of these passes starts to reduce gradients.
REDUCING_PASSES = ("BackwardPass", "WeightGradPass")


@dataclass
class _OpenCounts:
    counts: dict[str, list[int]] = field(default_factory=dict)
    calls: list[CollectiveCall] = field(default_factory=list)
    syncs: list[HostSync] = field(default_factory=list)

    def closed(self) -> OpCounts:
        operations = {name: OperationCount(*numbers) for name, numbers in self.counts.items()}
        return OpCounts(operations, tuple(self.calls), tuple(self.syncs))


class QueuedMessages:
    """Names the instructions of several stages per rank. Their messages are queued until CommitP2P exchanges
    them together, so what this instruction does depends on the messages since the last one."""

    def __init__(self) -> None:
        self._queue: list[str] = []

    def name(self, instruction: Instruction) -> Instruction:
        """The next instruction of the schedule; of CommitP2P with the queued messages."""
        if instruction.kind == COMMIT:
            queued, self._queue = self._queue, []
            return Instruction(f"{COMMIT}({', '.join(queued)})")
        if instruction.kind.startswith(("Send", "Recv")):
            self._queue.append(f"{instruction.kind} {instruction.chunk}")
        return instruction


class StepTrace:
    """The work of the current step: per instruction, and outside of instructions."""

    def __init__(self, memory: MemoryTracker) -> None:
        self._memory = memory
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets the step before."""
        self._done: list[tuple[Instruction, OpCounts]] = []
        self._queued = QueuedMessages()
        self._outside = _OpenCounts()
        self._current = self._outside

    @contextmanager
    def instruction(self, instruction: Instruction, slot: int) -> Iterator[None]:
        """Within this context the work is that of the instruction, for the micro-batch in buffer `slot`."""
        self._current = _OpenCounts()
        instruction = self._queued.name(instruction)
        self._memory.begin_instruction(str(instruction))
        try:
            yield
        finally:
            self._memory.end_instruction((instruction.chunk, slot))
            self._done.append((instruction, self._current.closed()))
            self._current = self._outside

    def add_operation(self, kernel: Kernel, bytes_written: int) -> None:
        """Counts an operation that runs on the device. bytes_written: of the kernel's bytes."""
        count = self._current.counts.setdefault(kernel.name, [0, 0, 0, 0])
        count[0] += 1
        count[1] += int(kernel.flops)
        count[2] += int(kernel.bytes) - bytes_written
        count[3] += bytes_written

    def add_call(self, call: CollectiveCall, work: dist.Work | None = None) -> None:
        """Counts a collective call. work: what the caller can wait for."""
        self._current.calls.append(call)

    def add_wait(self, work: dist.Work) -> None:
        """Counts nothing: the order of the calls is that of their starts."""

    def add_sync(self, cause: str) -> None:
        """Counts a host synchronization, at the place that the caller's frames show."""
        self._current.syncs.append(HostSync(cause, calling_place()))

    @property
    def order(self) -> tuple[Instruction, ...]:
        """The instructions so far."""
        return tuple(instruction for instruction, _ in self._done)

    @property
    def outside(self) -> OpCounts:
        """The work outside of instructions so far."""
        return self._outside.closed()

    def by_instruction(
        self,
    ) -> tuple[dict[Instruction, OpCounts], dict[Instruction, OpCounts], dict[Instruction, OpCounts]]:
        """The work of each instruction: of its first occurrence, of all others but the last, and of the last,
        if there are several. With two occurrences the second one stands for all others.

        SimulationError if the others differ: what they do then depends on more than the schedule, and other
        numbers of micro-batches cannot be computed from this step.
        """
        works: dict[Instruction, list[OpCounts]] = {}
        for instruction, work in self._done:
            works.setdefault(instruction, []).append(work)
        for instruction, found in works.items():
            for work in found[2:-1] if instruction.kind in REDUCING_PASSES else found[2:]:
                if work != found[1]:
                    raise SimulationError(
                        f"{instruction} does not do the same for every micro-batch: "
                        f"{difference(found[1], work)}"
                    )
        repeated = {instruction: found for instruction, found in works.items() if len(found) > 1}
        return (
            {instruction: found[0] for instruction, found in works.items()},
            {instruction: found[1] for instruction, found in repeated.items()},
            {instruction: found[-1] for instruction, found in repeated.items()},
        )


def difference(expected: OpCounts, found: OpCounts) -> str:
    """The first difference of two works, in words."""
    for name in sorted(expected.operations.keys() | found.operations.keys()):
        before, after = expected.operations.get(name), found.operations.get(name)
        if before != after:
            return f"operation {name}: {before} and {after}"
    for what in ("calls", "syncs"):
        before, after = getattr(expected, what), getattr(found, what)
        if before != after:
            index = next(
                (i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]),
                min(len(before), len(after)),
            )
            return f"{what} differ at {index}: {before[index : index + 1]} and {after[index : index + 1]}"
    return "nothing"


def calling_place() -> str:
    """The innermost frames of this repository and of DeepSpeed, as 'file:line function'."""
    places = [
        f"{file}:{frame.f_lineno} {frame.f_code.co_name}" for file, frame in islice(_callers(), _FRAMES)
    ]
    return " < ".join(places) or "unknown place"


def making_place() -> str:
    """The innermost frame of this repository or of DeepSpeed, as 'file function'."""
    for file, frame in _callers():
        return f"{file} {frame.f_code.co_name}"
    return "unknown place"


def _callers() -> Iterator[tuple[str, FrameType]]:
    """The frames of this repository and of DeepSpeed with their files, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if file := _shown(frame.f_code.co_filename):
            yield file, frame
        frame = frame.f_back


def _shown(file: str) -> str:
    """The path from the package's folder on; '' for files of other packages and of the simulation."""
    if file.startswith(_OWN_FOLDER):
        return ""
    for package in ("/deepspeed/", "/megatron/"):
        head, found, tail = file.rpartition(package)
        if found and tail:
            return package[1:] + tail
    return ""
