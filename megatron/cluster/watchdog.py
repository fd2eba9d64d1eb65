"""A thread that watches over the others of its process: a step that never ends, a signal that nobody handles.

The main thread may be inside a collective, in native code, where no Python handler runs and no exception
arrives. This thread then still writes the report of its rank, and ends the process.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from functools import partial
from types import FrameType
from typing import NoReturn

from megatron.cluster.launch import node_name
from megatron.cluster.rank_reports import ExitStatus, RankReport

# As timeout(1) says it.
HANG_EXIT_CODE = 124
# How long a rank that has found a hang waits for the others to find it too, before it ends and ends them.
_GRACE_S = 3.0
_TICK_S = 1.0


class Watchdog:
    """Notes SIGTERM where a report is kept, and ends the process on it, unless the training loop handles it
    and no other rank has failed. From `start` to `pause` or `stop` it waits for beats. To be made in the main
    thread."""

    def __init__(self, report: RankReport) -> None:
        self.report = report
        self._timeout_s = 0.0
        self._beats = 0
        self._watching = self._signals_handled = self._signalled = self._stopped = False
        self._wake, self._awake = os.pipe()
        for end in (self._wake, self._awake):
            os.set_blocking(end, False)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        if report.is_enabled:
            # The number of each signal that has a handler in Python is written there at once, by the C code.
            signal.set_wakeup_fd(self._awake, warn_on_full_buffer=False)
            signal.signal(signal.SIGTERM, lambda *_: None)
            # A data loader's process would write into this one's pipe.
            os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
        self._thread.start()

    def start(self, timeout_s: float, *, signals_handled: bool = False) -> None:
        """From now on a `heartbeat` must come every timeout_s seconds; 0: no limit. signals_handled: the main
        thread handles SIGTERM."""
        self._beats += 1
        self._timeout_s, self._watching, self._signals_handled = timeout_s, True, signals_handled

    def heartbeat(self, iteration: int) -> None:
        """The main thread gets on, and has done `iteration` steps."""
        self._beats += 1
        self.report.set_iteration(iteration)

    def pause(self) -> None:
        """Until the next `start` the main thread may take its time."""
        self._watching = False

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped = True
        os.write(self._awake, b"\0")
        self._thread.join()

    def _run(self) -> None:
        before, beats, silent_s = time.monotonic(), 0, 0.0
        while not self._stopped:
            ready, _, _ = select.select([self._wake], [], [], _TICK_S)
            if ready and signal.SIGTERM in os.read(self._wake, 4096):
                self._signalled = True
                self.report.note(signal="SIGTERM")
            # Nobody else will handle it: training has not begun, or is stuck for another's failure. Slurm and
            # torch's launcher would wait half a minute before they kill.
            if self._signalled and (not self._signals_handled or self.report.another_rank_failed()):
                self.report.end(ExitStatus.SIGNALLED)
                os._exit(128 + signal.SIGTERM)
            now = time.monotonic()
            # Time in which this process stood still as a whole (Ctrl-Z, a suspended job) does not count.
            silent_s = silent_s + min(now - before, _TICK_S) if beats == self._beats else 0.0
            before, beats = now, self._beats
            if self._watching and 0 < self._timeout_s < silent_s:
                self._exit_on_hang()

    def _exit_on_hang(self) -> NoReturn:
        place, pause = main_thread_location(), f"no step ended for {self._timeout_s:g} s"
        self.report.write_stacks()
        stopped = [rank for rank, pid in self.report.siblings().items() if _is_stopped(pid)]
        if not self.report.end(ExitStatus.HANG, pause, place=place, stopped=stopped):
            where = f"rank {self.report.rank} on {node_name(os.environ)}"
            print(f"error: {where}: {pause} (--hang-timeout), at {place}", file=sys.stderr, flush=True)
        time.sleep(_GRACE_S)
        os._exit(HANG_EXIT_CODE)


def main_thread_location() -> str:
    """Where the main thread is: the innermost call of this program, and the innermost."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = _name(frame) if frame is not None else "nowhere"
    while frame is not None and not _is_ours(frame):
        frame = frame.f_back
    return innermost if frame is None or _name(frame) == innermost else f"{_name(frame)} -> {innermost}"


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("megatron", "__main__")


def _name(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


def _is_stopped(pid: int) -> bool:
    """Whether a signal holds a process of this machine (SIGSTOP, or a debugger)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
