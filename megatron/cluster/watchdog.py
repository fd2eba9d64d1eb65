"""The watchdog: a thread that ends the process after a hang, or on a signal if the main thread cannot react.

While the main thread waits in a collective (native code), no Python signal handler runs and no exception is
raised. The watchdog thread can still write the rank's report and end the process.

`HangDetector` decides when a process hangs. Each phase has a time limit, which grows with the past durations
of the phase.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from statistics import median
from types import FrameType
from typing import NoReturn

from megatron.child_processes import io_bytes, is_running, process_state, start_of
from megatron.cluster.diagnosis import hang_position
from megatron.cluster.exit_codes import end_rank, finish_rank_reports
from megatron.cluster.exit_status import FAILURE_EXIT_CODE, HANG_EXIT_CODE, ExitStatus
from megatron.cluster.launch import find_launcher
from megatron.cluster.rank_reports import RankReport
from megatron.config.sections.training import EXIT_SIGNALS
from megatron.errors import print_error


class Phase(Enum):
    """A phase of a run: what the main thread is doing. The time limit of a phase is --hang-timeout times its
    factor.

    The factors are above 1 for phases in which a rank waits for another rank and makes no progress itself: at
    the start for the rank that builds index files, during a load or save for a rank that reads or writes.
    """

    START = "the start", 10.0
    PREFLIGHT = "the preflight", 1.0
    LOAD = "loading the checkpoint", 4.0
    STEP = "a step", 1.0
    EVALUATION = "an evaluation", 1.0
    SAVE = "saving a checkpoint", 4.0

    def __init__(self, title: str, factor: float) -> None:
        self.title, self.factor = title, factor


# torch.compile compiles in the first step and the first evaluation, without a heartbeat.
_COMPILING_PHASES = {Phase.STEP, Phase.EVALUATION}
# The limit of a phase is at least this many times the median of its last durations.
_MEDIAN_FACTOR = 3.0
_WINDOW = 21
# A longer pause between two ticks means that the process was stopped (Ctrl-Z, a suspended job).
_MAX_TICK_S = 2.0
# In these phases, reading or writing this many bytes is progress. One heartbeat per file would not be enough,
# because DeepSpeed writes the state of a rank, tens of GB, in one call of torch.save.
_IO_PHASES = {Phase.START, Phase.LOAD, Phase.SAVE}
_PROGRESS_BYTES = 2**20


class HangDetector:
    """Measures the time without progress. All times are in seconds, from one clock.

    The main thread calls `enter`, `leave` and `heartbeat`, the watchdog thread `tick`.
    """

    def __init__(self, timeout_s: float, compiles: bool = False) -> None:
        """Makes a detector. timeout_s: --hang-timeout in seconds; 0 for no limit. compiles: whether --compile
        is set."""
        self._timeout_s = timeout_s
        self._compiles = compiles
        self._open: list[tuple[Phase, float]] = []
        self._durations: dict[Phase, deque[float]] = {phase: deque(maxlen=_WINDOW) for phase in Phase}
        self._heartbeats = self._seen_heartbeats = 0
        self._last_tick: float | None = None
        self._io_bytes = 0
        self.silent_s = 0.0
        """Seconds since the last progress, without the time in which the process was stopped."""

    @property
    def phase(self) -> Phase:
        """Returns the innermost phase."""
        return self._open[-1][0] if self._open else Phase.START

    def enter(self, phase: Phase, now: float) -> None:
        """Records that the main thread begins a phase. Phases nest."""
        self._open.append((phase, now))
        self.heartbeat()

    def leave(self, now: float) -> None:
        """Records that the main thread ends the innermost phase."""
        phase, begun = self._open.pop()
        self._durations[phase].append(now - begun)
        self.heartbeat()

    def heartbeat(self) -> None:
        """Records that the main thread makes progress."""
        self._heartbeats += 1

    def limit_s(self) -> float:
        """Returns the limit of the time without progress in the current phase, in seconds."""
        phase = self.phase
        factor = phase.factor
        if self._compiles and phase in _COMPILING_PHASES and not self._durations[phase]:
            factor = Phase.START.factor
        # Before the first evaluation has ended, the limit of evaluations follows from the durations of steps,
        # which take longer.
        seen = self._durations[phase] or self._durations[Phase.STEP]
        return max(factor * self._timeout_s, _MEDIAN_FACTOR * median(seen) if seen else 0.0)

    def tick(self, now: float, io_bytes: int = 0) -> bool:
        """Returns whether the process hangs. Must be called about every second. io_bytes: bytes that the
        process has read and written so far."""
        if self.phase in _IO_PHASES and io_bytes >= self._io_bytes + _PROGRESS_BYTES:
            self.heartbeat()
        if self._heartbeats != self._seen_heartbeats:
            self._seen_heartbeats, self._io_bytes, self.silent_s = self._heartbeats, io_bytes, 0.0
        elif self._last_tick is not None:
            self.silent_s += min(now - self._last_tick, _MAX_TICK_S)
        self._last_tick = now
        return 0 < self._timeout_s and self.limit_s() < self.silent_s


# After a hang a rank waits this long before it exits, so that the other ranks can report the hang too.
_GRACE_S = 3.0
_TICK_S = 1.0
# After a hang, the device, its driver and the disk of the reports must answer within this time.
_DEVICE_ANSWER_S = 10.0
# A rank ends this long after another rank of its node has ended. Usually the next collective of the rank
# fails earlier.
_ABORT_AFTER_S = 10.0
# After SIGINT before the training loop, the main thread has this long to end by KeyboardInterrupt.
_INTERRUPT_S = 5.0
# Signals that end the process. SIGHUP is one of them: a closed terminal sends it, and torch's launcher
# forwards it, even under nohup.
_ENDING_SIGNALS = frozenset(signal.Signals[name] for name in EXIT_SIGNALS)


class Watchdog:
    """A thread that ends the process if it makes no progress (see `HangDetector`), on a signal that the main
    thread does not handle, on a second SIGINT, if torch's launcher was killed, and if another rank of the
    node failed. It must be created in the main thread."""

    def __init__(self, report: RankReport) -> None:
        self.report = report
        self._launcher = find_launcher(os.environ)
        self._hangs = HangDetector(0.0)
        self._signals: list[int] = []
        self._handled: frozenset[int] = frozenset()
        self._signalled_at = self._aborting_since = 0.0
        self._stopped = False
        self._device_entries: Callable[[], Mapping[str, str]] = dict
        self._flight_record: Callable[[], bytes] = bytes
        self._wake, self._awake = os.pipe()
        for end in (self._wake, self._awake):
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        # Python's C handler writes the number of each signal to the pipe at once.
        signal.set_wakeup_fd(self._awake, warn_on_full_buffer=False)
        # Without a handler these signals would end the process without a report. A signal that nohup ignores
        # stays ignored.
        for number in _ENDING_SIGNALS - {signal.SIGINT}:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, lambda *_: None)
        # A forked process must not write to the pipe of its parent.
        os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
        self._thread.start()

    def start(self, timeout_s: float, compiles: bool = False) -> None:
        """Starts the detection of hangs, see `HangDetector`."""
        self._hangs = HangDetector(timeout_s, compiles)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Applies the limit of `phase` within the block."""
        self._hangs.enter(phase, time.monotonic())
        try:
            yield
        finally:
            self._hangs.leave(time.monotonic())

    def heartbeat(self) -> None:
        """Records that the main thread makes progress."""
        self._hangs.heartbeat()

    def set_handled_signals(self, numbers: frozenset[int]) -> None:
        """Sets the signals that the main thread handles from now on. These signals do not end the process."""
        self._handled = numbers

    def set_device_entries(
        self, entries: Callable[[], Mapping[str, str]], flight_record: Callable[[], bytes]
    ) -> None:
        """Sets functions that are called at a hang. entries: returns entries for the report: `device` (what
        this rank's device does) and `waits_in` (the calls in which the rank waits for others). flight_record:
        returns all recorded calls, for a file beside the report."""
        self._device_entries, self._flight_record = entries, flight_record

    def stop(self) -> None:
        self._stopped = True
        os.write(self._awake, b"\0")
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            ready, _, _ = select.select([self._wake], [], [], _TICK_S)
            now = time.monotonic()
            for number in os.read(self._wake, 4096) if ready else b"":
                if number in _ENDING_SIGNALS:
                    self._note_signal(number, now)
            if self.report.has_ended:
                continue  # the main thread ends the process
            self._check_signals(now)
            self._check_launcher()
            self._check_other_ranks(now)
            if self._hangs.tick(now, io_bytes()):
                self._exit_on_hang()

    def _note_signal(self, number: int, now: float) -> None:
        self._signalled_at = self._signalled_at or now
        self._signals.append(number)
        self.report.note(signal=signal.Signals(number).name)
        if self.report.has_ended:
            self.report.stop_waiting.set()

    def _check_signals(self, now: float) -> None:
        """Ends the process on a signal that the main thread does not handle in time."""
        if self._signals.count(signal.SIGINT) > 1:
            self._exit(ExitStatus.SIGNALLED, 128 + signal.SIGINT, "interrupted twice (SIGINT)")
        # If another rank has failed, the main thread cannot finish its step and handle the signal. Slurm and
        # torch's launcher would wait 30 s before SIGKILL.
        if not self._signals or (
            set(self._signals) <= self._handled and not self.report.another_rank_failed()
        ):
            return
        number = self._signals[-1]
        if number != signal.SIGINT or now - self._signalled_at > _INTERRUPT_S:
            self._exit(ExitStatus.SIGNALLED, 128 + number, f"ended by {signal.Signals(number).name}")

    def _check_launcher(self) -> None:
        """Ends the process if torch's launcher was killed. Otherwise nothing would end this process, which
        keeps the --save folder in use. Does nothing after a signal: the signal may have ended the launcher,
        and the process saves."""
        if self._launcher is None or self._signals:
            return
        pid, start = self._launcher
        if not is_running(pid) or start_of(pid) not in (start, None):  # None: /proc is unreadable
            text = f"torch's launcher (process {pid}) was killed: start its command again to resume"
            self._exit(ExitStatus.FAILED, FAILURE_EXIT_CODE, text)

    def _check_other_ranks(self, now: float) -> None:
        """Ends the process some seconds after another rank of this node has failed or was killed. Does
        nothing if RANK_REPORTS is set, because the job's script or the launcher then ends the ranks."""
        if not self.report.is_temporary:
            return
        lost = any(
            other["end"] == ExitStatus.SIGNALLED if "end" in other else not is_running(other["pid"])
            for other in self.report.siblings()
        )
        if not (lost or self.report.another_rank_failed()):
            return
        self._aborting_since = self._aborting_since or now
        if now - self._aborting_since > _ABORT_AFTER_S:
            self._exit(ExitStatus.ABORTED, FAILURE_EXIT_CODE, "another rank of this node has ended")

    def _exit_on_hang(self) -> NoReturn:
        place = main_thread_location()
        problem = f"no progress for {self._hangs.silent_s:.0f} s in {self._hangs.phase.title}"
        self.report.write_stacks()
        stopped = [
            other["rank"] for other in self.report.siblings() if process_state(other["pid"]) in ("T", "t")
        ]
        reported = self.report.end(ExitStatus.HANG, problem, place=place, stopped=stopped)
        if not reported:
            text = f"error: {self.report.rank_and_node}: {problem} (--hang-timeout), at {place}"
            print_error(text)
        entries = self._ask_device()
        if reported:
            self.report.note(**entries)
        elif entries:
            waits = f"; waits in {entries['waits_in']}" if entries.get("waits_in") else ""
            print(f"{hang_position(entries)}{waits}", file=sys.stderr, flush=True)
        time.sleep(_GRACE_S)
        finish_rank_reports(self.report)
        os._exit(HANG_EXIT_CODE)

    def _ask_device(self) -> Mapping[str, str]:
        """Returns the entries from the function of `set_device_entries`. If the device's library does not
        answer, a thread in C prints the stacks and ends the process; a Python thread could not, because the
        library may hold Python's lock."""
        entries: Mapping[str, str] = {}
        faulthandler.dump_traceback_later(_DEVICE_ANSWER_S, exit=True, file=2)  # sys.stderr may be closed
        with suppress(Exception):
            entries = self._device_entries()
            self.report.write_flight_record(self._flight_record())
        faulthandler.cancel_dump_traceback_later()
        return entries

    def _exit(self, status: ExitStatus, code: int, sentence: str) -> NoReturn:
        end_rank(self.report, status, f"error: {sentence}")
        os._exit(code)


def main_thread_location() -> str:
    """Returns the location of the main thread: its innermost frame in this package, and its innermost frame
    of all."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = _name(frame) if frame is not None else "nowhere"
    own = ("megatron", "__main__")
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] not in own:
        frame = frame.f_back
    return innermost if frame is None or _name(frame) == innermost else f"{_name(frame)} -> {innermost}"


def _name(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
