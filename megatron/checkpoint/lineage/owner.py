"""Ownership of a --save folder: only one job writes checkpoints there; a second job stops at its start.

A job claims the folder with an empty file `owner-<n>-<token>.json`. The token is random, and n is greater
than the numbers of all existing claims. Then the job lists the folder again. It withdraws if there is a
higher claim, or if a filled claim is active, and it waits until all other empty claims are gone. So if
several jobs claim the folder at the same time, or see an old listing, only one of them fills its file and
becomes the owner. Rank 0 of the owner then writes heartbeats into the file. In an object store the files are
objects.

A claim is stale if its process has ended on this machine, if Slurm has requeued its job, or if its file did
not change while this job watched it. The new owner removes stale claims. Clocks of two hosts are never
compared. A job that has lost the folder finds that its own file was removed, or that there is a higher filled
claim, and stops.
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
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron.child_processes import process_fields, start_of
from megatron.errors import UserError
from megatron.files import open_regular

# Names of earlier versions have no token.
_FILE = re.compile(r"owner-([0-9]{6,12})(?:-([0-9a-f]{32}))?\.json")
_LAST_NUMBER = 10**12 - 1
# The file is overwritten in place and has a fixed size, so a full disk does not stop the heartbeat.
_FILE_BYTES = 1024
_LONGEST_TEXT = 60
# How long the end of a run waits for the last heartbeat: if a store does not answer, a heartbeat lasts
# minutes.
_LAST_HEARTBEAT_S = 10.0


@dataclass(frozen=True)
class Timing:
    """Times in seconds: between heartbeats, until a claim without heartbeat is stale, and between polls."""

    heartbeat_s: float = 10.0
    stale_after_s: float = 60.0
    poll_s: float = 1.0
    sleep: Callable[[float], object] = time.sleep
    now: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Owner:
    """The content of an owner file. machine: boot id and process-id namespace, "" if unknown. process_start:
    start time in clock ticks, from /proc. since, seen: times of the claim and of the last heartbeat by the
    owner's clock; they appear only in messages."""

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
        """Returns the owner for this process, with the Slurm job that `env` names, if it names one."""
        now = _clock()
        return cls(
            token=secrets.token_hex(16),
            job=env.get("SLURM_JOB_ID", "")[:_LONGEST_TEXT],
            restart=env.get("SLURM_RESTART_COUNT", "0")[:_LONGEST_TEXT],
            host=host[:_LONGEST_TEXT],
            machine=_machine(),
            pid=os.getpid(),
            process_start=start_of(os.getpid()) or "",
            since=now,
            seen=now,
        )

    @property
    def description(self) -> str:
        """Returns job, host and process, for messages."""
        job = f"Slurm job {self.job}" if self.job else "another run"
        return f"{job} on {self.host} (process {self.pid}, since {self.since})"

    def is_on_same_machine(self, other: Owner) -> bool:
        """Returns whether both processes are in one process-id namespace of one machine."""
        return bool(self.machine) and self.machine == other.machine

    def has_ended(self) -> bool:
        """Returns whether the owner's process has ended. Valid only on the owner's machine."""
        is_gone = process_fields(self.pid)[:1] in (["Z"], ["X"])
        return is_gone or start_of(self.pid) != self.process_start


class FolderOwner:
    """The ownership of a folder, from `acquire` to `release`."""

    def __init__(self, folder: ClaimFolder, name: str, owner: Owner, timing: Timing) -> None:
        """name: name of the owner file."""
        self._folder = folder
        self._name = name
        self._owner = owner
        self._timing = timing
        self.lost_reason: str | None = None
        """Why this job must not write to the folder any more, as found last; None if it may."""
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._run, name="owner-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def set_run_id(self, run_id: str) -> None:
        """Adds the id of the run to the owner file, once it is known."""
        with self._lock:
            self._owner = replace(self._owner, run_id=run_id)
        self.write_heartbeat()

    def write_heartbeat(self) -> bool:
        """Writes one heartbeat. Returns False once the folder is lost."""
        with self._lock, suppress(OSError):  # the next heartbeat may succeed
            if self._find_problem() is None:
                self._owner = replace(self._owner, beats=self._owner.beats + 1, seen=_clock())
                self._folder.write(self._name, _encoded(self._owner))
        return self.lost_reason is None

    def problem(self) -> str | None:
        """Returns why this job must not write to the folder any more; None while this job is the owner.
        Raises OSError if the folder cannot be read."""
        with self._lock:
            return self._find_problem()

    def _find_problem(self) -> str | None:
        if self.lost_reason is None:
            claims = _claims(self._folder)
            # The file is opened by its name, because a listing of a network file system may be old.
            exists = self._folder.read(self._name) is not None
            own = _Claim.of(self._name)
            takers = [claim for claim in claims if claim.owner is not None and claim != own]
            takers = [claim for claim in takers if not exists or claim > own]
            if takers and takers[-1].owner is not None:
                by = f"was taken over by {takers[-1].owner.description}"
            else:
                by = f"lost its {self._name}"
            if takers or not exists:
                self.lost_reason = f"{self._folder} {by}, stopping: only one job may write to a folder"
        return self.lost_reason

    def release(self) -> None:
        self._released.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_HEARTBEAT_S)
        with suppress(OSError):
            self._folder.remove(self._name)

    def _run(self) -> None:
        while not self._released.wait(self._timing.heartbeat_s) and self.write_heartbeat():
            pass


@dataclass(frozen=True, order=True)
class _Claim:
    """An owner file. Claims are ordered by number, then by token."""

    number: int
    token: str
    name: str = field(compare=False)
    content: bytes = field(default=b"", compare=False)

    @classmethod
    def of(cls, name: str, content: bytes = b"") -> _Claim:
        """Returns the claim in an owner file. name: the file's name, which contains number and token."""
        match = _FILE.fullmatch(name)
        assert match is not None
        return cls(int(match[1]), match[2] or "", name, content)

    @property
    def owner(self) -> Owner | None:
        """The owner that the file contains; None while the file is empty."""
        return _parsed(self.content)


class ClaimFolder:
    """The owner files in a folder of a file system. str() of this object is the folder's name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def names(self) -> list[str]:
        """Returns the names of all files in the folder."""
        try:
            return os.listdir(self._path)
        except OSError as error:
            if _is_missing(error):
                return []
            raise

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file; None if the file does not exist."""
        try:
            with open_regular(self._path / name) as file:
                return file.read(_FILE_BYTES)
        except OSError as error:
            if _is_missing(error):
                return None
            raise

    def create(self, name: str) -> None:
        os.close(os.open(self._path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))

    def write(self, name: str, content: bytes) -> None:
        """Fills an existing file. Never creates one: if the file was removed, another job owns the folder."""
        descriptor = os.open(self._path / name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.pwrite(descriptor, content, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        (self._path / name).unlink()


@contextmanager
def hold_folder(
    folder: ClaimFolder | None, host: str, print_fn: Callable[[str], object]
) -> Iterator[FolderOwner | None]:
    """Owns a folder during the block, and yields the ownership. Does nothing if `folder` is None."""
    if folder is None:
        yield None
        return
    held = acquire(folder, Owner.of_this_process(host), print_fn)
    held.start()
    try:
        yield held
    finally:
        held.release()


def acquire(
    folder: ClaimFolder, me: Owner, print_fn: Callable[[str], object], timing: Timing | None = None
) -> FolderOwner:
    """Makes this process the owner of `folder`. If there is an owner, first waits until it is known whether
    it is active.

    print_fn: receives a line for the wait and one for the takeover. Raises UserError, which names the current
    owner, if that owner is active.
    """
    attempt = _Attempt(folder, me, print_fn, timing or Timing())
    try:
        while (held := attempt.step()) is None:
            attempt.timing.sleep(attempt.timing.poll_s)
        return held
    except BaseException as error:
        attempt.withdraw()
        if isinstance(error, OSError):
            raise UserError(f"--save {folder} cannot be read ({error.strerror})") from error
        raise


class _Attempt:
    """A job's attempt to become the owner. It has the job's own claim, and the last state of other claims."""

    def __init__(
        self, folder: ClaimFolder, me: Owner, print_fn: Callable[[str], object], timing: Timing
    ) -> None:
        self.folder, self.me, self.print_fn, self.timing = folder, me, print_fn, timing
        self.own: _Claim | None = None
        self.started = timing.now()
        self.seen: dict[str, tuple[bytes, float]] = {}  # claim -> (its content, when it last changed)
        self.reported: str | None = None

    def step(self) -> FolderOwner | None:
        """Lists the folder once. Returns the ownership if no other job can become the owner, else None."""
        claims = _claims(self.folder)
        if self.own is not None and self.own not in claims:
            self.withdraw()  # this process was silent for so long that another job removed its file
        others = [claim for claim in claims if claim != self.own]
        before = dict(self.seen)
        stale_reasons = {claim.name: self._observe(claim) for claim in others}
        # The owner if there is one, otherwise the claim with the highest priority.
        active_claims = [claim for claim in others if not stale_reasons[claim.name]]
        other_claim = max(active_claims, key=lambda claim: (claim.owner is not None, claim), default=None)
        if other_claim is not None:
            if self.own is not None and (other_claim.owner is not None or other_claim > self.own):
                self.withdraw()
            if self.own is None:
                self._wait_for(other_claim, before.get(other_claim.name))
            return None
        if self.own is None:
            highest = max(others, default=None)
            number = 1 + (0 if highest is None else highest.number)
            if highest is not None and number > _LAST_NUMBER:
                raise UserError(
                    f"--save {self.folder}: {highest.name} has the last possible number, which no job "
                    "reaches by counting: remove the file if no job uses the folder"
                )
            self.own = _claim(self.folder, number, self.me)
            return self.step()
        return self._confirm(self.own, others, stale_reasons)

    def withdraw(self) -> None:
        """Removes this job's claim if it has one."""
        if self.own is not None:
            with suppress(OSError):
                self.folder.remove(self.own.name)
            self.own = None

    def _observe(self, claim: _Claim) -> str:
        """Returns why another job's claim is stale; "" if it may be active."""
        content, since = self.seen.get(claim.name, (None, 0.0))
        if content != claim.content:
            since = self.timing.now()
            self.seen[claim.name] = (claim.content, since)
        return _stale_reason(claim.owner, self.me, self.timing.now() - since, self.timing)

    def _wait_for(self, other_claim: _Claim, before: tuple[bytes, float] | None) -> None:
        """Raises UserError if the owner of the other claim is active. before: (content of the claim in the
        last listing, when it last changed)."""
        timing, other = self.timing, other_claim.owner
        has_heartbeat = before is not None and before[0] != other_claim.content
        if _is_same_job(other, self.me):
            # An earlier process of the same Slurm job may take a while to end.
            is_active = has_heartbeat and timing.now() - self.started >= timing.stale_after_s
        else:
            is_active = has_heartbeat or (other is not None and other.is_on_same_machine(self.me))
        if other is not None and is_active:
            raise UserError(
                f"--save {self.folder} is in use by {other.description}, whose last heartbeat was at "
                f"{other.seen}: give another --save, or end that job first"
            )
        if self.reported != other_claim.name:
            self.reported = other_claim.name
            self.print_fn(
                f"--save {self.folder} belongs to {_describe(other)}: waiting up to "
                f"{timing.stale_after_s:.0f} s to see whether it is active"
            )

    def _confirm(
        self, own: _Claim, stale_claims: list[_Claim], stale_reasons: Mapping[str, str]
    ) -> FolderOwner | None:
        """Fills this job's claim and removes stale claims. Returns None if another job became the owner
        first."""
        try:
            self.folder.write(own.name, _encoded(self.me))
        except OSError as error:
            if _is_missing(error):
                return None
            raise UserError(
                f"--save {self.folder}: {own.name} cannot be written ({error.strerror})"
            ) from error
        for claim in stale_claims:
            with suppress(OSError):
                self.folder.remove(claim.name)
        held = FolderOwner(self.folder, own.name, self.me, self.timing)
        if held.problem() is not None:
            self.withdraw()
            return None
        if stale_claims:
            last = stale_claims[-1]
            self.print_fn(
                f"{self.folder} taken over from {_describe(last.owner)}: {stale_reasons[last.name]}"
            )
        return held


def _stale_reason(other: Owner | None, me: Owner, silent_s: float, timing: Timing) -> str:
    """Returns why a claim is stale; "" if it may be active. silent_s: seconds since its file last changed."""
    if other is not None and other.is_on_same_machine(me) and other.has_ended():
        return "its process has ended"
    if _is_same_job(other, me) and other is not None and other.restart != me.restart:
        return "Slurm has ended it and requeued the job"
    return f"no heartbeat for {silent_s:.0f} s" if silent_s >= timing.stale_after_s else ""


def _is_same_job(other: Owner | None, me: Owner) -> bool:
    return other is not None and bool(me.job) and other.job == me.job


def _describe(owner: Owner | None) -> str:
    return owner.description if owner else "a job that did not write its name"


def _claim(folder: ClaimFolder, number: int, me: Owner) -> _Claim:
    """Creates the empty file of a claim, and returns the claim."""
    name = f"owner-{number:06d}-{me.token}.json"
    try:
        folder.create(name)
    except OSError as error:
        raise UserError(f"--save {folder}: {name} cannot be created ({error.strerror})") from error
    return _Claim.of(name)


def _claims(folder: ClaimFolder) -> list[_Claim]:
    """Returns the claims in a folder, the highest last. A file that cannot be read counts as empty."""
    claims = []
    for name in filter(_FILE.fullmatch, folder.names()):
        try:
            content = folder.read(name)
        except OSError:
            content = b""
        if content is not None:
            claims.append(_Claim.of(name, content))
    return sorted(claims)


def _encoded(owner: Owner) -> bytes:
    return json.dumps(asdict(owner)).encode().ljust(_FILE_BYTES)


def _parsed(content: bytes) -> Owner | None:
    """Returns the owner in an owner file; None if the file is incomplete."""
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
    """Returns boot id and process-id namespace. The namespace matters because each container has its own
    process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
