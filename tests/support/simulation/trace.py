"""Collects the work of one step while it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from types import FrameType

import torch.distributed as dist

from megatron.planner.simulation import device
from megatron.planner.simulation.device import CollectiveCall
from megatron.planner.simulation.passes import Kernel
from tests.support.simulation.memory import StepMemory
from tests.support.simulation.record import HostSync, Instruction, OpCounts, OperationCount

_SIMULATION = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, device.__file__))
_FRAMES = 3
COMMIT = "CommitP2P"


class QueuedMessages:
    """Names the instructions of a schedule with several stages per rank.

    Such a schedule queues messages until CommitP2P exchanges them together. So the work of a CommitP2P
    depends on the messages since the previous CommitP2P, and these messages become part of its name.
    """

    def __init__(self) -> None:
        self._queue: list[str] = []

    def name(self, instruction: Instruction) -> Instruction:
        """Returns the next instruction of the schedule. A CommitP2P names the queued messages."""
        if instruction.kind == COMMIT:
            queued, self._queue = self._queue, []
            return Instruction(f"{COMMIT}({', '.join(queued)})")
        if instruction.kind.startswith(("Send", "Recv")):
            self._queue.append(f"{instruction.kind} {instruction.chunk}")
        return instruction


class StepTrace:
    """Counts the work of the current step: per instruction, and outside of instructions.
    `megatron.planner.simulation.device.Trace` describes the `add_` methods."""

    def __init__(self, memory: StepMemory) -> None:
        self._memory = memory
        self.begin_step()

    def begin_step(self) -> None:
        """Starts a step, and discards the counts of the previous step."""
        self._memory.begin_step()
        self.works: list[tuple[Instruction, OpCounts]] = []
        self._queued = QueuedMessages()
        self._current = self.outside = OpCounts()
        """The work outside of instructions."""

    @contextmanager
    def instruction(self, instruction: Instruction, slot: int) -> Iterator[None]:
        """Counts the work within this context as the instruction's work, for the micro-batch in buffer
        `slot`."""
        self._current = OpCounts()
        instruction = self._queued.name(instruction)
        self._memory.end_instruction(None)
        try:
            yield
        finally:
            self._memory.end_instruction((instruction.chunk, slot))
            self.works.append((instruction, self._current))
            self._current = self.outside

    def add_operation(self, kernel: Kernel, bytes_written: int) -> None:
        read = int(kernel.bytes) - bytes_written
        before = self._current.operations.get(kernel.name, OperationCount(0, 0, 0, 0))
        self._current.operations[kernel.name] = before.plus(int(kernel.flops), read, bytes_written)

    def add_call(self, call: CollectiveCall, work: dist.Work | None = None) -> None:
        self._current.calls.append(call)

    def add_wait(self, work: dist.Work) -> None:
        """Counts nothing: calls are ordered by their starts, not by the waits for them."""

    def add_sync(self, cause: str) -> None:
        """Counts a host synchronization at the place of the caller."""
        self._current.syncs.append(HostSync(cause, call_site()))


def call_site() -> str:
    """Returns the innermost frames of this repository and of DeepSpeed, as 'file:line function'."""
    places = [
        f"{file}:{frame.f_lineno} {frame.f_code.co_name}" for file, frame in islice(_callers(), _FRAMES)
    ]
    return " < ".join(places) or "unknown place"


def _callers() -> Iterator[tuple[str, FrameType]]:
    """Yields the frames of this repository and of DeepSpeed with their files, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if file := _shown(frame.f_code.co_filename):
            yield file, frame
        frame = frame.f_back


def _shown(file: str) -> str:
    """Returns the path relative to the package's parent folder. Returns '' for the simulation and for other
    packages."""
    if file.startswith(_SIMULATION):
        return ""
    for package in ("/deepspeed/", "/megatron/"):
        head, found, tail = file.rpartition(package)
        if found and tail:
            return package[1:] + tail
    return ""
