"""Decides when a process hangs: time limits per phase that adapt to the durations seen. Has no clock of its
own."""

from __future__ import annotations

from collections import deque
from enum import Enum
from statistics import median


class Phase(str, Enum):
    """What the main thread is doing. Each phase has its own limit."""

    START = "the start"
    PREFLIGHT = "the preflight"
    LOAD = "loading the checkpoint"
    STEP = "a step"
    EVALUATION = "an evaluation"
    SAVE = "saving a checkpoint"


# The limit of a phase is --hang-timeout times this factor. At the start a rank may wait for another one that
# builds index files, and during a load or save for another one that reads or writes: there it has no progress
# of its own.
_FACTORS = {
    Phase.START: 10.0,
    Phase.PREFLIGHT: 1.0,
    Phase.LOAD: 4.0,
    Phase.STEP: 1.0,
    Phase.EVALUATION: 1.0,
    Phase.SAVE: 4.0,
}
# torch.compile compiles in the first one of each, without progress of its own.
_COMPILING_PHASES = {Phase.STEP, Phase.EVALUATION}
# The limit is at least this many times the median duration of the phase's last occurrences.
_MEDIAN_FACTOR = 3.0
_WINDOW = 21
# A longer pause between two ticks means that the whole process was stopped (Ctrl-Z, a suspended job).
_MAX_TICK_S = 2.0
# Bytes read and written that count as progress, where reading and writing is the work. The heartbeats of
# files are not enough: DeepSpeed writes a rank's state as one file, of tens of GB, in one call of torch.save.
_IO_PHASES = {Phase.START, Phase.LOAD, Phase.SAVE}
_PROGRESS_BYTES = 2**20


class HangDetector:
    """Counts the time without progress. All times are in seconds, of any one clock.

    The main thread calls `enter`, `leave` and `heartbeat`, the watchdog thread `tick`.
    """

    def __init__(self, timeout_s: float, compiles: bool = False) -> None:
        """timeout_s: --hang-timeout; 0: no limit. compiles: --compile."""
        self._timeout_s = timeout_s
        self._compiles = compiles
        self._open: list[tuple[Phase, float]] = []
        self._durations: dict[Phase, deque[float]] = {phase: deque(maxlen=_WINDOW) for phase in Phase}
        self._heartbeats = self._seen_heartbeats = 0
        self._last_tick: float | None = None
        self._io_bytes = 0
        self.silent_s = 0.0
        """Time since the last progress, without time in which the process was stopped."""

    @property
    def phase(self) -> Phase:
        """The innermost phase."""
        return self._open[-1][0] if self._open else Phase.START

    def enter(self, phase: Phase, now: float) -> None:
        """The main thread begins a phase; phases nest."""
        self._open.append((phase, now))
        self.heartbeat()

    def leave(self, now: float) -> None:
        """The main thread ends the innermost phase."""
        phase, begun = self._open.pop()
        self._durations[phase].append(now - begun)
        self.heartbeat()

    def heartbeat(self) -> None:
        """The main thread makes progress."""
        self._heartbeats += 1

    def limit_s(self) -> float:
        """The longest time without progress in the current phase."""
        phase = self.phase
        factor = _FACTORS[phase]
        if self._compiles and phase in _COMPILING_PHASES and not self._durations[phase]:
            factor = _FACTORS[Phase.START]
        # An evaluation before the first one has ended is compared with steps, which take longer.
        seen = self._durations[phase] or self._durations[Phase.STEP]
        return max(factor * self._timeout_s, _MEDIAN_FACTOR * median(seen) if seen else 0.0)

    def tick(self, now: float, io_bytes: int = 0) -> bool:
        """Whether the process hangs. Call it about every second. io_bytes: read and written by the process so
        far."""
        if self.phase in _IO_PHASES and io_bytes >= self._io_bytes + _PROGRESS_BYTES:
            self.heartbeat()
        if self._heartbeats != self._seen_heartbeats:
            self._seen_heartbeats, self._io_bytes, self.silent_s = self._heartbeats, io_bytes, 0.0
        elif self._last_tick is not None:
            self.silent_s += min(now - self._last_tick, _MAX_TICK_S)
        self._last_tick = now
        return 0 < self._timeout_s and self.limit_s() < self.silent_s
