"""Rank reports: one small file per rank that records how the rank ended.

Every rank of a run with several processes writes its `Record` to `rank-<N>.json`. The record of a rank that
was killed has no exit status. `megatron.cluster.diagnosis` reads the files and names the first cause of a
failure.

The environment variable RANK_REPORTS names the folder of the files. The script that sets the variable
(examples/slurm/common.sh) runs the diagnosis. Without the variable, the ranks of a node share a temporary
folder, and one of these ranks prints the diagnosis, see `exit_codes.finish_rank_reports`. The module does not
import torch.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Required, TypedDict, get_type_hints

from megatron.child_processes import is_running, start_of
from megatron.cluster.exit_status import NOT_FAILED, ExitStatus
from megatron.cluster.launch import (
    decimal_number,
    launch_id,
    node_name,
    private_temporary_folder,
    rank_of,
    world_size_of,
)
from megatron.errors import UserError, printable
from megatron.files import Check, is_count, is_text, list_of, open_own, open_regular, read_json

FOLDER_VARIABLE = "RANK_REPORTS"
# Size of a report. It is reserved on the disk at the start, so that a rank can report a full disk.
_REPORT_BYTES = 16_384
# A temporary folder that is older than this is not read by any diagnosis.
_DEAD_AFTER_S = 600.0
# Maximum size of the stacks that are read: a hundred threads with a hundred frames each.
_MAX_STACKS_BYTES = 1 << 20
STOP_REQUEST_FILE = "stop_requested"
FAILED_FILE = "failed"


class Record(TypedDict, total=False):
    """How one rank ran and ended: the content of `rank-<N>.json`. Entries that are not known are missing."""

    rank: Required[int]
    host: Required[str]
    pid: Required[int]
    started: float
    stage: int
    cp_rank: int
    iteration: int
    """Number of completed steps."""
    signal: str
    """Name of the last signal that the process received."""
    saved_iteration: int
    load_to_resume: str
    """Folder for --load, if the same command without it would not resume the run."""
    end: ExitStatus
    ended: float
    text: str
    """The error; its last line is the sentence that is printed."""
    on_all_ranks: bool
    """Whether all ranks have ended with this error."""
    first_rank: int
    """The rank that failed first, according to the rendezvous store."""
    first: bool
    """Whether this rank is `first_rank`."""
    place: str
    """After a hang: the location of the main thread in the code."""
    stopped: list[int]
    """After a hang: ranks of the node that a signal has stopped."""
    device: str
    """After a hang: what the device does."""
    waits_in: str
    """After a hang: the calls in which the rank waits for others."""
    stacks: str
    """Content of `rank-<N>.stacks`."""


class RankReport:
    """The report of this rank. All methods are thread-safe. Only the first call of `end` is recorded."""

    def __init__(self, folder: str | None, rank: str, host: str = "", *, is_temporary: bool = False) -> None:
        """Opens the report. An error of the file system raises nothing: the rank then has no report. folder:
        None for no report. is_temporary: whether only the ranks of this node share the folder, and delete it
        at the end."""
        self.rank = rank
        self.started_at = time.monotonic()
        self.folder = None if folder is None else Path(folder)
        self.is_temporary = is_temporary
        self.stop_waiting = threading.Event()
        """It is set on SIGTERM after `end`: the rank must not wait for other ranks any longer."""
        self.diagnosis_lock = threading.Lock()
        """Held while the diagnosis is printed, so that the process does not exit before the end of the
        print."""
        self._lock = threading.Lock()
        self.record: Record = {"rank": -1, "host": host, "pid": os.getpid()}
        """The content of the report."""
        self._file: int | None = None
        self._stacks: int | None = None
        if self.folder is None or decimal_number(rank) is None:
            return
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._open(self.folder / f"rank-{rank}.json")
        if self.is_enabled:
            self.note(rank=int(rank), started=time.time())

    def _open(self, path: Path) -> None:
        other = read_report(path)
        if other is not None and self.is_temporary:
            if other["pid"] != os.getpid() and is_running(other["pid"]):
                return  # another process uses this RANK, so this process has no report
        # If native code crashes, Python writes the signal and the stack to this file.
        self._stacks = open_own(path.with_suffix(".stacks"))
        faulthandler.enable(self._stacks)
        self._file = open_own(path)

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> RankReport:
        """Opens the report in the folder that RANK_REPORTS names, or without the variable in a temporary
        folder. A single process without the variable has no report."""
        folder, rank, node = env.get(FOLDER_VARIABLE), rank_of(env), node_name(env)
        if folder or world_size_of(env) == 1:
            return cls(folder or None, rank, node)
        base = private_temporary_folder()
        if base is None:
            return cls(None, rank, node, is_temporary=True)
        shared = base / f"{launch_id(env)}{_suffix(node)}"
        if env.get("LOCAL_RANK", "0") == "0":
            with suppress(OSError):
                _remove_dead_folders(shared, _suffix(node))
        return cls(str(shared), rank, node, is_temporary=True)

    @property
    def rank_and_node(self) -> str:
        """Returns the rank and its node, for an error that is printed without the diagnosis."""
        return f"rank {self.rank} on {node_name(os.environ)}"

    @property
    def is_enabled(self) -> bool:
        """Returns whether there is a report, so that errors need not be printed to stderr."""
        return self._file is not None

    @property
    def has_ended(self) -> bool:
        """Returns whether `end` was called."""
        return "end" in self.record

    def note(self, **entries: Any) -> None:
        """Adds entries of `Record` (`stage`, `signal`, ...) and writes the file."""
        with self._lock:
            self.record |= entries  # type: ignore[typeddict-item]
            self._write()

    def set_iteration(self, iteration: int) -> None:
        """Records that `iteration` steps are done. The next `note` or `end` writes it to the file."""
        self.record["iteration"] = iteration

    def end(self, end: ExitStatus, text: str = "", **entries: Any) -> bool:
        """Records how this rank ends. text: the error; its last line is the sentence that is printed.
        entries: further entries of `Record`. Returns False if the file cannot be written."""
        with self._lock:
            if "end" not in self.record:
                if self.folder is not None and end not in {*NOT_FAILED, ExitStatus.SIGNALLED}:
                    with suppress(OSError):
                        os.close(open_own(self.folder / FAILED_FILE))
                self.record |= {"end": end, "text": text, "ended": time.time(), **entries}  # type: ignore[typeddict-item]
            return self._write()

    def write_stacks(self) -> None:
        """Writes the stacks of all threads to `rank-<N>.stacks`; without a report, to stderr."""
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(
                sys.stderr if self._stacks is None else self._stacks, all_threads=True
            )

    def write_flight_record(self, record: bytes) -> None:
        """Writes the calls of torch's flight recorder to the file `flight-<N>`, if RANK_REPORTS names a
        folder. Raises OSError if the file cannot be written."""
        if self.folder is not None and not self.is_temporary:
            with open(open_own(self.folder / f"flight-{self.rank}"), "wb") as file:
                file.write(record)

    def siblings(self) -> list[Record]:
        """Returns the reports of the other ranks on this machine."""
        others = read_reports(self.folder) if self.folder is not None else []
        return [
            other for other in others if other["host"] == self.record["host"] and other["pid"] != os.getpid()
        ]

    def stop_requested(self) -> bool:
        """Returns whether the job's script has created the file that requests to save and exit."""
        return self.folder is not None and (self.folder / STOP_REQUEST_FILE).exists()

    def another_rank_failed(self) -> bool:
        """Returns whether a rank has reported a failure. The steps of the other ranks then cannot finish."""
        return self.folder is not None and (self.folder / FAILED_FILE).exists()

    @contextmanager
    def folder_lock(self) -> Iterator[None]:
        """Holds a lock that excludes the other ranks that share the folder."""
        assert self.folder is not None
        with os.fdopen(open_own(self.folder / "lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def remove_folder(self) -> None:
        """Deletes a temporary folder with all reports."""
        if self.folder is not None and self.is_temporary:
            # The folder is renamed first. Otherwise a rank that ends now would create files in a half-deleted
            # folder.
            removed = self.folder.with_name(f"removed-{os.getpid()}-{self.folder.name}")
            with suppress(OSError):
                self.folder.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)

    def _write(self) -> bool:
        if self._file is None:
            return False
        try:
            os.pwrite(self._file, _encoded(self.record).ljust(_REPORT_BYTES), 0)
        except OSError:
            return False
        return True


def _suffix(node: str) -> str:
    """Returns the last part of the name of a temporary folder: the node, and the process-id namespace,
    because processes of two namespaces must not share reports."""
    try:
        namespace = "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
    except OSError:
        namespace = "0"
    return f"-{namespace}@{node}"


def _remove_dead_folders(own: Path, suffix: str) -> None:
    """Deletes the reports of earlier launches on this node whose launcher and ranks were all killed, so that
    no rank could delete them. Folders that changed recently stay: a diagnosis may still read them."""
    for folder in own.parent.iterdir():
        if folder == own or not folder.name.endswith(suffix):
            continue
        pid, _, rest = folder.name.partition("-")  # see `launch_id`
        with suppress(OSError):  # another start may delete the folder at the same time
            changed = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            is_used = (pid.isdigit() and start_of(int(pid)) == rest.partition("-")[0]) or any(
                is_running(report["pid"]) for report in read_reports(folder)
            )
            if time.time() - changed > _DEAD_AFTER_S and not is_used:
                shutil.rmtree(folder, ignore_errors=True)


def ended_well(report: Record) -> bool:
    """Returns whether a rank finished, or stopped on request without being sent a signal."""
    end = report.get("end")
    return end == ExitStatus.FINISHED or (end == ExitStatus.REQUEUE and "signal" not in report)


def _encoded(record: Record) -> bytes:
    """Returns the record as JSON of at most _REPORT_BYTES. The start of a long `text` is removed."""
    entries = {name: printable(value) if isinstance(value, str) else value for name, value in record.items()}
    while len(encoded := json.dumps(entries).encode()) > _REPORT_BYTES:
        text = str(entries["text"])
        entries = {**entries, "text": text[len(text) // 4 + 1 :]}
    return encoded


def read_reports(folder: Path) -> list[Record]:
    """Returns the readable reports in a folder, sorted by rank."""
    reports = [report for path in folder.glob("rank-*.json") if (report := read_report(path)) is not None]
    return sorted(reports, key=lambda report: report["rank"])


def read_report(path: Path) -> Record | None:
    """Returns a report with its stacks; None if it cannot be read, or no rank wrote it."""
    try:
        report = read_json(path)
    except (OSError, ValueError, UserError):
        return None
    if not isinstance(report, dict) or not _is_complete(report):
        return None
    report["stacks"] = ""
    with suppress(OSError), open_regular(path.with_suffix(".stacks")) as stacks:
        report["stacks"] = stacks.read(_MAX_STACKS_BYTES).decode(errors="replace")
    return report  # type: ignore[return-value]


_CHECKS: dict[Any, Check] = {
    int: partial(is_count, most=(1 << 31) - 1),
    float: lambda value: type(value) in (int, float) and abs(value) < math.inf,
    str: is_text,
    bool: lambda value: isinstance(value, bool),
    ExitStatus: lambda value: value in [status.value for status in ExitStatus],
    list[int]: list_of(partial(is_count, most=(1 << 31) - 1)),
}
"""Type of an entry -> check whether a value from a file has this type."""
_TYPES = get_type_hints(Record)


def _is_complete(report: dict[str, Any]) -> bool:
    """Returns whether all entries have the expected types, and the entries that the diagnosis needs exist."""
    needed = {"rank", "pid", "host"}
    if "end" in report:
        needed |= {"text", "ended"}
    if report.get("end") == ExitStatus.HANG:
        needed.add("place")
    return needed <= report.keys() and all(
        _CHECKS[kind](report[name]) for name, kind in _TYPES.items() if name in report
    )
