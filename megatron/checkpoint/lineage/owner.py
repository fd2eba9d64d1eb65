"""The owner of a --save folder: one job writes checkpoints there, and a second one stops before it starts.

The owner is the job of the file `owner-<n>.json` with the highest n. Its rank 0 writes a heartbeat into it. A
job becomes the owner by creating the file of the next number with O_EXCL: of several jobs only one succeeds,
on network file systems too. It does so if there is no owner, or if the owner is dead: its process has ended
on this machine, Slurm has requeued its job, or its heartbeat has not changed while this job watched. Clocks
of two hosts are never compared. If another job takes over the folder, the former owner finds its own file
removed, and stops before it writes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron.config.errors import ConfigError

_FILE = re.compile(r"owner-([0-9]{6,12})\.json")
# The file has its full size from the start and is overwritten in place, so a full disk stops no heartbeat.
_FILE_BYTES = 1024
_LONGEST_TEXT = 60


@dataclass(frozen=True)
class Timing:
    """Interval of the heartbeat, time without one after which the owner counts as dead, and interval at which
    a waiting job polls; in seconds."""

    heartbeat_s: float = 10.0
    dead_after_s: float = 60.0
    poll_s: float = 1.0
    sleep: Callable[[float], object] = time.sleep
    now: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Owner:
    """The content of an owner file. machine: boot id and process-id namespace, "" if unknown. process_start:
    start time of the process in the kernel's clock ticks. since, seen: the owner's clock, informative
    only."""

    token: str
    job: str
    restart: str
    host: str
    machine: str
    pid: int
    process_start: str
    since: str
    seen: str
    beats: int = 0
    run_id: str = ""

    @classmethod
    def of_this_process(cls, host: str, env: Mapping[str, str] = os.environ) -> Owner:
        """A new owner: this process, of the Slurm job that the environment names, if any."""
        now = _clock()
        return cls(
            token=secrets.token_hex(16),
            job=env.get("SLURM_JOB_ID", "")[:_LONGEST_TEXT],
            restart=env.get("SLURM_RESTART_COUNT", "0")[:_LONGEST_TEXT],
            host=host[:_LONGEST_TEXT],
            machine=_machine(),
            pid=os.getpid(),
            process_start=_start_of(os.getpid()) or "",
            since=now,
            seen=now,
        )

    @property
    def description(self) -> str:
        """Job, host and process, for a log or error text."""
        job = f"Slurm job {self.job}" if self.job else "another run"
        return f"{job} on {self.host} (process {self.pid}, since {self.since})"

    def is_on_same_machine(self, other: Owner) -> bool:
        """Whether both processes are on one machine and in one process-id namespace."""
        return bool(self.machine) and self.machine == other.machine

    def has_ended(self) -> bool:
        """Whether the process has ended. Only valid on the process's own machine."""
        start = _start_of(self.pid)
        return start is None or start != self.process_start


class FolderOwner:
    """Ownership of a folder by this process, from `acquire` to `release`."""

    def __init__(self, path: Path, owner: Owner, timing: Timing) -> None:
        self._path = path
        self._owner = owner
        self._timing = timing
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._run, name="owner-heartbeat", daemon=True)

    def start(self) -> None:
        """Starts the heartbeat thread."""
        self._thread.start()

    def set_run_id(self, run_id: str) -> None:
        """Records the run id, once it is known."""
        with self._lock:
            self._owner = replace(self._owner, run_id=run_id)
        self.beat()

    def beat(self) -> bool:
        """Writes one heartbeat; False once the file is gone."""
        with self._lock:
            self._owner = replace(self._owner, beats=self._owner.beats + 1, seen=_clock())
            try:
                # Never create the file: the job that removed it owns the folder now.
                descriptor = os.open(self._path, os.O_WRONLY)
            except OSError as error:
                return not _is_missing(error)
            with suppress(OSError):  # the next one may succeed
                os.pwrite(descriptor, _encoded(self._owner), 0)
            with suppress(OSError):
                os.close(descriptor)
        return True

    def problem(self) -> str | None:
        """An error text if this job is no longer the owner of the folder; None if it is."""
        try:
            content = self._path.read_bytes()
        except OSError as error:
            if not _is_missing(error):
                raise
            content = b""
        found = _parsed(content)
        if found is not None and found.token == self._owner.token:
            return None
        _, content = _current(self._path.parent)
        taker = _parsed(content)
        by = f"was taken over by {taker.description}" if taker else f"lost its {self._path.name}"
        return f"{self._path.parent} {by}: this job stops, because two jobs must not write to one folder"

    def release(self) -> None:
        """Ends the ownership."""
        self._released.set()
        if self._thread.is_alive():
            self._thread.join()
        with suppress(OSError):
            if self.problem() is None:
                self._path.unlink()

    def _run(self) -> None:
        while not self._released.wait(self._timing.heartbeat_s) and self.beat():
            pass


@contextmanager
def hold_folder(
    folder: str | None, host: str, print_fn: Callable[[str], object]
) -> Iterator[FolderOwner | None]:
    """Makes this process the owner of a folder within the block; does nothing if `folder` is None."""
    if folder is None:
        yield None
        return
    held = acquire(Path(folder), Owner.of_this_process(host), print_fn)
    held.start()
    try:
        yield held
    finally:
        held.release()


def acquire(
    folder: Path, me: Owner, print_fn: Callable[[str], object], timing: Timing | None = None
) -> FolderOwner:
    """Makes this process the owner of `folder`. Waits while it is unknown whether the present owner is alive.

    print_fn: receives a line when the wait begins and when the folder is taken over from a dead owner. Raises
    ConfigError, which names the owner, if the owner is alive.
    """
    timing = timing or Timing()
    started = timing.now()
    watched: tuple[int, bytes] | None = None
    unchanged_since = started
    while True:
        number, content = _current(folder)
        other = _parsed(content)
        silent_s = timing.now() - unchanged_since if watched == (number, content) else 0.0
        death = _reason_owner_is_dead(other, me, silent_s, timing)
        if number == 0 or death:
            held = _claim(folder, number + 1, me, timing)
            if held is not None:
                if number:
                    print_fn(f"{folder} taken over from {_describe(other)}: {death}")
                return held
        else:
            beating = watched is not None and watched[0] == number and watched[1] != content
            if _is_same_job(other, me):
                # A process of this same job, from before a requeue, may take a while to end.
                alive = beating and timing.now() - started >= timing.dead_after_s
            else:
                alive = beating or (other is not None and other.is_on_same_machine(me))
            if other is not None and alive:
                raise ConfigError(
                    f"--save {folder} is in use by {other.description}, whose last heartbeat was at "
                    f"{other.seen}: give another --save, or end that job first"
                )
            if watched is None or watched[0] != number:
                print_fn(
                    f"--save {folder} belongs to {_describe(other)}: waiting up to "
                    f"{timing.dead_after_s:.0f} s to see whether it is alive"
                )
            if watched != (number, content):
                watched, unchanged_since = (number, content), timing.now()
        timing.sleep(timing.poll_s)


def _reason_owner_is_dead(other: Owner | None, me: Owner, silent_s: float, timing: Timing) -> str:
    """The reason to consider the owner dead, or "" if it may be alive. silent_s: time without a change of its
    file."""
    if other is not None and other.is_on_same_machine(me) and other.has_ended():
        return "its process has ended"
    if _is_same_job(other, me) and other is not None and other.restart != me.restart:
        return "Slurm has ended it and requeued the job"
    return f"no heartbeat for {silent_s:.0f} s" if silent_s >= timing.dead_after_s else ""


def _is_same_job(other: Owner | None, me: Owner) -> bool:
    return other is not None and bool(me.job) and other.job == me.job


def _describe(owner: Owner | None) -> str:
    return owner.description if owner else "an unknown job"


def _claim(folder: Path, number: int, me: Owner, timing: Timing) -> FolderOwner | None:
    """Creates the owner file with this number; None if another job has created it first."""
    path = folder / f"owner-{number:06d}.json"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return None
    except OSError as error:
        raise ConfigError(f"--save {folder}: {path.name} cannot be made ({error.strerror})") from error
    try:
        try:
            os.pwrite(descriptor, _encoded(me), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise ConfigError(f"--save {folder}: {path.name} cannot be written ({error.strerror})") from error
    for before, old in _files(folder):
        if before < number:
            with suppress(OSError):
                old.unlink()
    return FolderOwner(path, me, timing)


def _files(folder: Path) -> list[tuple[int, Path]]:
    matches = ((_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def _current(folder: Path) -> tuple[int, bytes]:
    """Number and content of the owner file: 0 if there is none, no content if it cannot be read now."""
    files = _files(folder)
    if not files:
        return 0, b""
    number, path = files[-1]
    try:
        with open(path, "rb") as file:
            return number, file.read(_FILE_BYTES)
    except OSError:
        return number, b""


def _encoded(owner: Owner) -> bytes:
    return json.dumps(asdict(owner)).encode().ljust(_FILE_BYTES)


def _parsed(content: bytes) -> Owner | None:
    """The owner in a file; None if the content is incomplete, for example while it is being written."""
    try:
        values: Any = json.loads(content)
    except (ValueError, RecursionError):
        return None
    kinds = {entry.name: int if entry.name in ("pid", "beats") else str for entry in fields(Owner)}
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        return None
    return Owner(**values) if all(isinstance(values[name], kind) for name, kind in kinds.items()) else None


def _is_missing(error: OSError) -> bool:
    return error.errno in (errno.ENOENT, errno.ESTALE)


def _clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _machine() -> str:
    """Identifies boot and process-id namespace: containers on one machine have process ids of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """Start time of a process on this machine; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if status[0] in ("Z", "X") else status[19]
