"""Rank reports: one small file per rank that records how the rank ended.

Every rank of a run with several processes writes `rank-<N>.json`: node, process, stage, iteration and exit
status. `megatron.cluster.diagnosis` reads the files and names the first cause of a failure. The report of a
rank that was killed has no exit status.

The environment variable RANK_REPORTS names the folder, and whoever sets it (examples/slurm/common.sh) runs
the diagnosis. Without the variable, the ranks of a node share a temporary folder, and one of them prints the
diagnosis, see `megatron.cluster.node_diagnosis`. Needs no torch.
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
from pathlib import Path
from typing import Any

from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.launch import decimal_number, node_name, rank_of, world_size_of
from megatron.cluster.node_processes import (
    earlier_folders,
    is_running,
    shared_temporary_folder,
    started_by_living_launcher,
)
from megatron.errors import UserError, printable
from megatron.files import Check, is_count, is_text, list_of, open_own, open_regular, read_json

FOLDER_VARIABLE = "RANK_REPORTS"
# Size of a report. It is reserved on the disk at the start, so that a rank can report a full disk.
_REPORT_BYTES = 16_384
# Age of a folder that no diagnosis reads any longer.
_DEAD_AFTER_S = 600.0
# Enough for a hundred threads with a hundred frames each.
_MAX_STACKS_BYTES = 1 << 20
STOP_REQUEST_FILE = "stop_requested"
FAILED_FILE = "failed"


# Exit statuses of ranks that have not failed themselves.
_WITHOUT_FAILURE = {ExitStatus.FINISHED, ExitStatus.REQUEUE, ExitStatus.INTERRUPTED, ExitStatus.SIGNALLED}


class RankReport:
    """The report of this rank. Thread-safe. Only the first `end` is kept."""

    def __init__(self, folder: str | None, rank: str, host: str = "", *, is_temporary: bool = False) -> None:
        """Opens the report; never raises. folder: None for no report. is_temporary: whether the ranks of this
        node share the folder, and delete it at the end."""
        self.rank = rank
        self.started_at = time.monotonic()
        self.folder = None if folder is None else Path(folder)
        self.is_temporary = is_temporary
        self.stop_waiting = threading.Event()
        """Set on SIGTERM after `end`: the rank must not wait for other ranks any longer."""
        self.diagnosis_lock = threading.Lock()
        """Held while the diagnosis is printed: the process must not exit before."""
        self._lock = threading.Lock()
        self._facts: dict[str, Any] = {}
        self._file: int | None = None
        self._stacks: int | None = None
        if self.folder is None or decimal_number(rank) is None:
            return
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._open(self.folder / f"rank-{rank}.json")
        if self.is_enabled:
            self.note(rank=int(rank), host=host, pid=os.getpid(), started=time.time())

    def _open(self, path: Path) -> None:
        other = read_report(path)
        if other is not None and self.is_temporary:
            if other["pid"] != os.getpid() and is_running(other["pid"]):
                return  # another process has this RANK: this process has no report
        # If native code crashes, Python writes the signal and the stack to this file.
        self._stacks = open_own(path.with_suffix(".stacks"))
        faulthandler.enable(self._stacks)
        self._file = open_own(path)

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> RankReport:
        """Opens the report in the folder that RANK_REPORTS names. Without the variable it is a temporary
        report; a single process has none."""
        folder, rank, node = env.get(FOLDER_VARIABLE), rank_of(env), node_name(env)
        if folder or world_size_of(env) == 1:
            return cls(folder or None, rank, node)
        shared = shared_temporary_folder(env, node)
        if shared is not None and env.get("LOCAL_RANK", "0") == "0":
            with suppress(OSError):
                remove_dead_folders(Path(shared))
        return cls(shared, rank, node, is_temporary=True)

    @property
    def rank_and_node(self) -> str:
        """The rank and its node, for an error that is printed without the diagnosis."""
        return f"rank {self.rank} on {node_name(os.environ)}"

    @property
    def is_enabled(self) -> bool:
        """Whether there is a report, so that errors need not be printed to stderr."""
        return self._file is not None

    @property
    def has_ended(self) -> bool:
        """Whether `end` was called."""
        return "end" in self._facts

    @property
    def facts(self) -> Mapping[str, Any]:
        """The content of the report."""
        return self._facts

    def note(self, **facts: Any) -> None:
        """Adds facts (`stage`, `signal`, ...) and writes the file."""
        with self._lock:
            self._facts |= facts
            self._write()

    def set_iteration(self, iteration: int) -> None:
        """Records that `iteration` steps are done. The next `note` or `end` writes it to the file."""
        self._facts["iteration"] = iteration

    def end(self, end: ExitStatus, text: str = "", **facts: Any) -> bool:
        """Records how this rank ends. text: the error; its last line is the sentence that is printed.
        Returns False if the file cannot be written."""
        with self._lock:
            if "end" not in self._facts:
                self._mark_failed(end)
                self._facts |= {"end": end, "text": text, "ended": time.time(), **facts}
            return self._write()

    def write_stacks(self) -> None:
        """Writes the stacks of all threads to `rank-<N>.stacks`; without a report, to stderr."""
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(
                sys.stderr if self._stacks is None else self._stacks, all_threads=True
            )

    def write_flight_record(self, record: bytes) -> None:
        """Writes `flight-<N>` to the folder of RANK_REPORTS, which the job keeps. Raises OSError if the file
        cannot be written."""
        if self.folder is not None and not self.is_temporary:
            with open(open_own(self.folder / f"flight-{self.rank}"), "wb") as file:
                file.write(record)

    def siblings(self) -> list[dict[str, Any]]:
        """Returns the reports of the other ranks on this machine."""
        others = read_reports(self.folder) if self.folder is not None else []
        return [
            other for other in others if other["host"] == self._facts["host"] and other["pid"] != os.getpid()
        ]

    def stop_requested(self) -> bool:
        """Returns whether the job's script has created the file that requests to save and exit."""
        return self.folder is not None and (self.folder / STOP_REQUEST_FILE).exists()

    def another_rank_failed(self) -> bool:
        """Returns whether a rank has reported a failure, so that the steps of the others cannot finish."""
        return self.folder is not None and (self.folder / FAILED_FILE).exists()

    @contextmanager
    def folder_lock(self) -> Iterator[None]:
        """Holds a lock among the ranks that share the folder."""
        assert self.folder is not None
        with os.fdopen(open_own(self.folder / "lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def remove_folder(self) -> None:
        """Deletes a temporary folder with all reports."""
        if self.folder is not None and self.is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _mark_failed(self, end: ExitStatus) -> None:
        if self.folder is not None and end not in _WITHOUT_FAILURE:
            with suppress(OSError):
                os.close(open_own(self.folder / FAILED_FILE))

    def _write(self) -> bool:
        if self._file is None:
            return False
        try:
            os.pwrite(self._file, _encoded(self._facts).ljust(_REPORT_BYTES), 0)
        except OSError:
            return False
        return True


def remove_dead_folders(own: Path) -> None:
    """Deletes the reports of earlier launches on this node whose launcher and ranks were all killed, so that
    no rank could delete them. Folders that changed recently stay: a diagnosis may still read them."""
    for folder in earlier_folders(own):
        with suppress(OSError):  # another start deletes it, too
            changed = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            is_used = started_by_living_launcher(folder) or any(
                is_running(report["pid"]) for report in read_reports(folder)
            )
            if time.time() - changed > _DEAD_AFTER_S and not is_used:
                shutil.rmtree(folder, ignore_errors=True)


def ended_well(report: Mapping[str, Any]) -> bool:
    """Returns whether a rank finished, or stopped on request without being sent a signal."""
    end = report.get("end")
    return end == ExitStatus.FINISHED or (end == ExitStatus.REQUEUE and "signal" not in report)


def _encoded(facts: dict[str, Any]) -> bytes:
    """Returns the facts as JSON of at most _REPORT_BYTES, with the start of a long text removed."""
    facts = {name: printable(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
    while len(encoded := json.dumps(facts).encode()) > _REPORT_BYTES:
        text = facts["text"]
        facts = {**facts, "text": text[len(text) // 4 + 1 :]}
    return encoded


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Returns the readable reports in a folder, sorted by rank."""
    reports = [report for path in folder.glob("rank-*.json") if (report := read_report(path)) is not None]
    return sorted(reports, key=lambda report: report["rank"])


def read_report(path: Path) -> dict[str, Any] | None:
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
    return report


def _is_number(value: Any) -> bool:
    return is_count(value, most=(1 << 31) - 1)


# The types of the facts that the diagnosis reads. Other facts may have any value.
_EXPECTED: dict[str, Check] = {
    **dict.fromkeys(
        ("rank", "pid", "stage", "cp_rank", "iteration", "saved_iteration", "first_rank"), _is_number
    ),
    **dict.fromkeys(("host", "text", "signal", "place", "device", "waits_in", "load_to_resume"), is_text),
    **dict.fromkeys(("first", "on_all_ranks"), lambda value: isinstance(value, bool)),
    "ended": lambda value: type(value) in (int, float) and abs(value) < math.inf,
    "end": lambda value: value in [status.value for status in ExitStatus],
    "stopped": list_of(_is_number),
}


def _is_complete(report: dict[str, Any]) -> bool:
    """Returns whether the facts have the expected types, and all facts that the diagnosis needs exist."""
    needed = {"rank", "pid", "host"}
    if "end" in report:
        needed |= {"text", "ended"}
    if report.get("end") == ExitStatus.HANG:
        needed.add("place")
    return needed <= report.keys() and all(
        is_valid(report[name]) for name, is_valid in _EXPECTED.items() if name in report
    )
