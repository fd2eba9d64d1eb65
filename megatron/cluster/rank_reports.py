"""What each rank leaves behind about its end: one small file per rank, from which a verdict is made.

With the environment variable RANK_REPORTS set to a folder (examples/slurm/common.sh does), every rank keeps
`rank-<N>.json` there: who it is, how far it came, and how it ended. `megatron.cluster.diagnosis` reads them.
A rank that was killed leaves a report without an end, which says so. Where the variable is not set there are
no reports. Needs no torch.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from megatron.cluster.launch import node_name, rank_of

FOLDER_VARIABLE = "RANK_REPORTS"
# Its place on the disk is taken at the start: a report of a full disk still fits on it.
_REPORT_BYTES = 16_384
STOP_REQUEST_FILE = "leave"
FAILED_FILE = "failed"


class ExitStatus(str, Enum):
    """How a rank ended; of a report without an end, the rank was killed or still runs."""

    FINISHED = "finished"
    CONTINUED = "to be continued"
    MISTAKE = "mistake"
    STOPPED = "stopped"
    FAILED = "failed"
    HANG = "hang"
    SIGNALLED = "signalled"


class RankReport:
    """The report of this rank. Threads may write at the same time; the first end that is told counts."""

    def __init__(self, folder: str | None, rank: str, host: str = "") -> None:
        """folder: None for no report. Never raises: a run does not fail for its reports."""
        self.rank = rank
        self.started_at = time.monotonic()
        self.folder = None if folder is None else Path(folder)
        self._lock = threading.Lock()
        self._facts: dict[str, Any] = {}
        self._file: int | None = None
        self._stacks: TextIO | None = None
        if self.folder is None:
            return
        with suppress(OSError, ValueError):
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"rank-{rank}.json"
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            self._stacks = open(path.with_suffix(".stacks"), "w")
            # A crash in native code leaves its signal and its stack there.
            faulthandler.enable(self._stacks)
            self.note(rank=int(rank), host=host, pid=os.getpid(), started=time.time())

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> RankReport:
        """The report in the folder that RANK_REPORTS names."""
        return cls(env.get(FOLDER_VARIABLE) or None, rank_of(env), node_name(env))

    @property
    def is_enabled(self) -> bool:
        """Whether there is a report, so that nothing need be said on stderr."""
        return self._file is not None

    def note(self, **facts: Any) -> None:
        """Adds facts (`stage`, `signal`, ...) and writes."""
        with self._lock:
            self._facts |= facts
            self._write()

    def set_iteration(self, iteration: int) -> None:
        """`iteration` steps are done. Not written before something else is: a step costs no file access."""
        self._facts["iteration"] = iteration

    def end(self, end: ExitStatus, text: str = "", **facts: Any) -> bool:
        """Tells how this rank ends. text: what to say of it, the last line being the sentence. False if that
        cannot be kept."""
        with self._lock:
            if "end" not in self._facts:
                self._mark_failed(end)
                self._facts |= {"end": end, "text": text, "ended": time.time(), **facts}
            return self._write()

    def write_stacks(self) -> None:
        """Writes the stacks of all threads beside the report; without reports, to stderr."""
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(self._stacks or sys.stderr, all_threads=True)

    def siblings(self) -> dict[int, int]:
        """Rank -> process id of the other ranks on this machine."""
        others = read_reports(self.folder) if self.folder is not None else []
        here = (other for other in others if other["host"] == self._facts["host"])
        return {other["rank"]: other["pid"] for other in here if other["pid"] != os.getpid()}

    def stop_requested(self) -> bool:
        """Whether the job's script has asked the run to save and exit, by a file beside the reports."""
        return self.folder is not None and (self.folder / STOP_REQUEST_FILE).exists()

    def another_rank_failed(self) -> bool:
        """Whether a rank has told that it failed: then no step of this run will end any more."""
        return self.folder is not None and (self.folder / FAILED_FILE).exists()

    def _mark_failed(self, end: ExitStatus) -> None:
        if self.folder is not None and end not in (
            ExitStatus.FINISHED,
            ExitStatus.CONTINUED,
            ExitStatus.SIGNALLED,
        ):
            with suppress(OSError):
                (self.folder / FAILED_FILE).touch()

    def _write(self) -> bool:
        if self._file is None:
            return False
        try:
            os.pwrite(self._file, _fitting(self._facts).ljust(_REPORT_BYTES), 0)
        except OSError:
            return False
        return True


def _fitting(facts: dict[str, Any]) -> bytes:
    """As JSON; of a text that is too long, the end."""
    while len(encoded := json.dumps(facts).encode()) > _REPORT_BYTES:
        text = facts["text"]
        facts = {**facts, "text": text[len(text) // 4 + 1 :]}
    return encoded


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """The reports of a folder by rank; one that cannot be read is left out."""
    return sorted(_readable(folder.glob("rank-*.json")), key=lambda report: report["rank"])


def _readable(paths: Iterable[Path]) -> Iterable[dict[str, Any]]:
    for path in paths:
        with suppress(OSError, ValueError, KeyError):
            report = json.loads(path.read_text())
            report["rank"], report["pid"] = int(report["rank"]), int(report["pid"])
            stacks = path.with_suffix(".stacks")
            report["stacks"] = stacks.read_text() if stacks.exists() else ""
            yield report
