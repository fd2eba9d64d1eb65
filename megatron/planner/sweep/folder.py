"""The folder of a sweep: sweep.json, which describes all runs, and one file per finished run.

    sweep.json               base command, combinations, predictions, commit, host
    runs/ROW-REPEAT.json     the result of a run, written at its end
    runs/ROW-REPEAT.log      the run's console output
    lock                     held while a local sweep runs

The number of a row never changes, so that a sweep can be resumed and extended.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron.child_processes import PACKAGE_PARENT
from megatron.cluster.launch import node_name
from megatron.errors import UserError
from megatron.files import expect_layout, open_own, read_json, write_json
from megatron.planner.sweep.axes import Row, checked_row
from megatron.planner.sweep.file_checks import check_record, check_result

FORMAT = 1
_MAX_WAIT_FOR_LOCK_S = 60.0


@dataclass(frozen=True)
class Record:
    """The content of sweep.json. base: the flags that all runs share. script: the value of --sbatch."""

    base: list[str]
    steps: int
    repeat: int
    script: str | None = None
    rows: list[Row] = field(default_factory=list)
    command: str = ""
    commit: str = ""
    host: str = ""
    python: str = ""
    created: str = ""
    format: int = FORMAT

    @property
    def runnable(self) -> list[Row]:
        return [row for row in self.rows if row.refused is None]

    def tasks(self) -> Iterator[tuple[Row, int]]:
        """Yields (row, repeat) of all runs in their order. Repeats are interleaved (A B C A B C), so that a
        change of the machine's speed affects all rows."""
        for repeat in range(1, self.repeat + 1):
            for row in self.runnable:
                yield row, repeat


class SweepFolder:
    """Reads and writes the files of a sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Record:
        """Returns the content of sweep.json. Raises UserError if it is missing or damaged."""
        file = self.path / "sweep.json"
        try:
            content = read_json(file)
        except FileNotFoundError:
            raise UserError(
                f"{self.path} has no sweep.json. Expected the folder of tools/sweep.py run."
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({error}). Set another folder.") from error
        with expect_layout(file, "the record of a sweep"):
            if content["format"] != FORMAT:
                raise UserError(
                    f"{file} has format {content['format']!r:.60}. Expected {FORMAT}. Use the version of the "
                    "program that wrote the file."
                )
            check_record(content)
            return Record(**{**content, "rows": [Row(**row) for row in content["rows"]]})

    def begin(self, record: Record) -> Record:
        """Writes the record, or adds its rows to the folder's record. Returns the record that was written.
        Existing rows keep their numbers. Raises UserError if the base command, the number of steps or the
        script differ from the folder's, or if the folder has a row that --vary does not accept."""
        if (self.path / "sweep.json").exists():
            record = _extend(self.read(), record, self.path)
            for row in record.runnable:
                checked_row(row.settings, record.base)
        (self.path / "runs").mkdir(parents=True, exist_ok=True)
        write_json(self.path / "sweep.json", asdict(record))
        return record

    def result_file(self, row: int, repeat: int) -> Path:
        return self.path / "runs" / f"{row:03d}-{repeat}.json"

    def results(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Returns (row, repeat) -> result for all finished runs. Raises UserError for a damaged file."""
        found = {}
        for file in sorted((self.path / "runs").glob("*-*.json")):
            try:
                result = read_json(file)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"{file} cannot be read ({error}). Delete the file; the sweep then repeats the run."
                ) from error
            with expect_layout(file, "the result of a run"):
                check_result(result, file.stem)
            found[result["row"], result["repeat"]] = result
        return found

    def write_result(self, result: dict[str, Any]) -> None:
        """Writes the result of a run. The file is complete, or it does not exist."""
        write_json(self.result_file(result["row"], result["repeat"]), result)

    def pending(self, record: Record, retry_failed: bool = False) -> list[tuple[Row, int]]:
        """Returns the runs without a result. Rows with a failed run are left out. retry_failed: whether
        failed runs count as runs without a result."""
        results = self.results()
        if retry_failed:
            results = {key: result for key, result in results.items() if result["status"] == "ok"}
        failed = {row for (row, _), result in results.items() if result["status"] != "ok"}
        return [
            (row, repeat)
            for row, repeat in record.tasks()
            if (row.index, repeat) not in results and row.index not in failed
        ]

    @contextmanager
    def lock(self) -> Iterator[int]:
        """Locks the folder, and yields the file descriptor of the lock. Raises UserError if another sweep
        holds the lock for a minute. Runs inherit the descriptor: if the sweep is killed, the folder stays
        locked until its run has ended."""
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = open_own(self.path / "lock", 0)
        try:
            deadline = time.monotonic() + _MAX_WAIT_FOR_LOCK_S
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{self.path}: another sweep or its last run uses this folder. Wait, or end it."
                    )
                time.sleep(0.2)
            yield descriptor
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _extend(old: Record, new: Record, path: Path) -> Record:
    """Returns the folder's record `old` with the rows of `new` added. Raises UserError if the two are
    different sweeps."""
    for what, before, now in (
        ("base command", shlex.join(old.base), shlex.join(new.base)),
        ("--steps", old.steps, new.steps),
        ("--sbatch", old.script, new.script),
    ):
        if before != now:
            raise UserError(
                f"{path} has a sweep with a different {what} ({before}; now {now}), so the results could not "
                "be compared. Set another folder."
            )
    rows = list(old.rows)
    places = {row.label: place for place, row in enumerate(rows)}
    for row in new.rows:
        place = places.get(row.label)
        if place is None:
            rows.append(replace(row, index=len(rows)))
        else:
            rows[place] = replace(row, index=rows[place].index)
    # The commit and host of the oldest results stay in the record. Each result also has its own commit and
    # host.
    return replace(old, rows=rows, repeat=max(old.repeat, new.repeat))


def version_and_host() -> dict[str, Any]:
    """Returns the commit of this repository ('+': changed files), the host and Python's version."""
    return {"commit": _commit(), "host": node_name(os.environ), "python": platform.python_version()}


def now_text() -> str:
    """Returns the current time in UTC, in ISO format."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _commit() -> str:
    def git(*words: str) -> str:
        run = subprocess.run(
            ["git", "-C", str(PACKAGE_PARENT), *words], capture_output=True, text=True, timeout=60
        )
        return run.stdout.strip()

    try:
        commit, changed = git("rev-parse", "--short=12", "HEAD"), git("status", "--porcelain")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return commit + ("+" if changed else "")
