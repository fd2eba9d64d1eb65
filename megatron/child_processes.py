"""Functions for processes of this node: the imports and signals of children, and what the kernel reports
about a process."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import megatron

PACKAGE_PARENT = Path(megatron.__path__[0]).parent
"""The folder that contains this package: the checkout, or the site-packages of an installation."""
_PR_SET_PDEATHSIG = 1
# The library is loaded before a fork, because only few functions are safe in a forked child.
_LIBC = ctypes.CDLL(None)


def python_path(env: Mapping[str, str]) -> str:
    """Returns the PYTHONPATH with which a child can import this package, even if the package is not
    installed."""
    return os.pathsep.join([str(PACKAGE_PARENT), *filter(None, [env.get("PYTHONPATH")])])


@contextmanager
def signals_blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Blocks signals within the block. A child that starts in the block inherits the mask, so that a signal
    to the process group does not end the child before it ignores the signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Makes the kernel end this process when its parent has ended (on Linux)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def process_fields(pid: int) -> list[str]:
    """Returns the fields of /proc/<pid>/stat without the first two (process id and name). The first returned
    field is the state, which is 'Z' or 'X' if the process has ended. Returns [] if the file cannot be
    read."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def start_of(pid: int) -> str | None:
    """Returns the start time of a process, in clock ticks since boot; None if the process does not exist."""
    fields = process_fields(pid)
    return fields[19] if len(fields) > 19 else None


def process_state(pid: int) -> str:
    """Returns the state of a process in /proc: 'R', 'S', 'T' (stopped), 'Z' (zombie), ...; '' if unknown."""
    return next(iter(process_fields(pid)), "")


def is_running(pid: int) -> bool:
    """Returns whether a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return process_state(pid) not in ("Z", "X")


def io_bytes(pid: int | str = "self") -> int:
    """Returns the number of bytes that a process has read and written, in files and sockets; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/io") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(("rchar", "wchar")))
    except OSError:
        return 0


def status_bytes(field: str) -> int:
    """Returns a size in /proc/self/status, for example VmRSS or VmHWM, in bytes. On systems without that
    file, returns the peak resident memory for every field."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
