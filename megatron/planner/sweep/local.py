"""Runs a sweep on this machine, one run after another."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from megatron.child_processes import PACKAGE_PARENT
from megatron.cluster.launch import TORCH_VARIABLES
from megatron.cluster.rank_reports import FOLDER_VARIABLE
from megatron.files import open_own
from megatron.planner.sweep.axes import Row, checked_row, num_processes, run_words
from megatron.planner.sweep.folder import Record, SweepFolder, now_text, version_and_host
from megatron.planner.sweep.run_log import read_result
from megatron.training.log_lines import read_log_lines

# Variables that a launcher sets. A sweep may itself run under a launcher, but its runs must not see them.
_LAUNCHER = (*TORCH_VARIABLES, FOLDER_VARIABLE)
# A process that diagnoses a failure still prints after torch's launcher has ended.
_MAX_WAIT_FOR_OUTPUT_S = 100.0
# torch's launcher kills its ranks 30 s after SIGTERM.
_MAX_WAIT_FOR_END_S = 45.0


def run_sweep(
    folder: SweepFolder,
    record: Record,
    print_fn: Callable[[str], None],
    *,
    timeout_s: float | None = None,
    retry_failed: bool = False,
) -> None:
    """Executes all runs that have no result. timeout_s: a run that takes longer is ended and counts as a
    hang. retry_failed: see `SweepFolder.pending`."""
    with folder.lock() as lock:
        todo = folder.pending(record, retry_failed)
        num_tasks = len(list(record.tasks()))
        if len(todo) < num_tasks:
            print_fn(f"{num_tasks - len(todo)} of {num_tasks} runs are done, or belong to a failed row")
        failed: set[int] = set()
        for place, (row, repeat) in enumerate(todo, start=1):
            if row.index in failed:
                continue
            print_fn(f"run {place} of {len(todo)}: row {row.index}, repeat {repeat}: {row.label}")
            result = _run_one(folder, record, row, repeat, lock, timeout_s)
            folder.write_result(result)
            if result["status"] == "ok":
                print_fn(f"  {result['step_s']:.4g} s per step, loss {result['steps'][-1]['loss']}")
            else:
                failed.add(row.index)
                print_fn(f"  {result['status']}: {result['reason']}")


def run_command(base: list[str], row: Row, steps: int) -> list[str]:
    """Returns the command of a run: torch's launcher, or plain Python for one process. Raises UserError for
    settings that --vary does not accept."""
    # The words are computed from the settings, because another user may have changed the words in sweep.json.
    words = run_words(base, checked_row(row.settings, base).words, steps)
    processes = num_processes(words)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [
        sys.executable,
        "-u",
        *(launcher if processes > 1 else []),
        str(PACKAGE_PARENT / "pretrain_gpt.py"),
        *words,
    ]


def run_environment(env: dict[str, str]) -> dict[str, str]:
    """Returns `env` without the variables of a launcher."""
    kept = {
        name: value
        for name, value in env.items()
        if name not in _LAUNCHER and not name.startswith("TORCHELASTIC")
    }
    kept.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    return kept


def _run_one(
    folder: SweepFolder, record: Record, row: Row, repeat: int, lock: int, timeout_s: float | None
) -> dict[str, Any]:
    log = folder.result_file(row.index, repeat).with_suffix(".log")
    started, start = now_text(), time.monotonic()
    process = subprocess.Popen(
        run_command(record.base, row, record.steps),
        env=run_environment(dict(os.environ)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(lock,),
    )
    try:
        timed_out = _wait(process, log, timeout_s)
    finally:
        _end(process)
    text = "\n".join(read_log_lines(log))
    result = read_result(row, repeat, text, process.returncode, record.steps)
    if timed_out:
        result |= {"status": "hang", "reason": f"not finished after {timeout_s:g} s (--timeout)"}
    times = {"started": started, "seconds": round(time.monotonic() - start, 3), "log": log.name}
    return {**result, **times, **version_and_host()}


def _wait(process: subprocess.Popen[bytes], log: Path, timeout_s: float | None) -> bool:
    """Copies the output to the log until the run has ended. Returns whether the run took longer than
    `timeout_s`."""
    assert process.stdout is not None
    # The run writes to a pipe, not directly to the file. The end of the pipe shows that the diagnosis of a
    # failure is complete, and if the sweep is killed, the ranks end at their next print.
    with os.fdopen(open_own(log), "wb") as file:
        copier = threading.Thread(target=_copy, args=(process.stdout, file), daemon=True)
        copier.start()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return True
        finally:
            if process.poll() is None:
                _end(process)
            copier.join(_MAX_WAIT_FOR_OUTPUT_S)
    return False


def _copy(source: IO[bytes], file: IO[bytes]) -> None:
    for line in source:
        file.write(line)
        file.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the launcher, which then ends its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_MAX_WAIT_FOR_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
