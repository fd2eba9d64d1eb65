"""The time that a rank spends in forward and backward passes, and the bubble of a step (--log-bubble)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import get_accelerator

from megatron.mpu.mesh import Mesh
from megatron.mpu.world import gather_from_all_ranks


class PassTimes:
    """Records the start and the end of each pass of the current step, by device events, or on a CPU by the
    clock."""

    def __init__(self) -> None:
        self._start: Any = _mark()
        self._passes: list[tuple[Any, Any]] = []

    def begin_step(self) -> None:
        """Deletes the recorded passes of the last step."""
        self._start, self._passes = _mark(), []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Returns a context that records one pass."""
        start = _mark()
        yield
        self._passes.append((start, _mark()))

    def busy_and_span(self) -> tuple[float, float]:
        """Returns two times in seconds: the sum over all passes, and the time from the start of the step to
        the end of the last pass. It waits for the device."""
        if not self._passes:
            return 0.0, 0.0
        get_accelerator().synchronize()
        last = self._passes[-1][1]
        return sum(_seconds(start, end) for start, end in self._passes), _seconds(self._start, last)


def bubble_line(times: PassTimes, mesh: Mesh) -> str:
    """Returns the log line with each pipeline rank's idle share of the last step, in percent. It is a
    collective.

    As in the planner's simulation, the step ends with the last pass of any rank, before gradient reduction
    and optimizer. The share of a pipeline rank is the mean over its processes.
    """
    found = gather_from_all_ranks((mesh.pp.rank, *times.busy_and_span()))
    makespan = max(span for _, _, span in found)
    shares = []
    for stage in range(mesh.pp_size):
        idle = [1 - busy / makespan for place, busy, _ in found if place == stage and makespan]
        shares.append(f"{100 * sum(idle) / len(idle):.1f}" if idle else "-")
    return f"bubble, % of the passes' time per pipeline rank: {' '.join(shares)}"


def _mark() -> Any:
    if get_accelerator().device_name() == "cpu":
        return time.perf_counter()
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    return start.elapsed_time(end) / 1000
