"""Runs a sweep as an array of Slurm jobs. Each job runs a script of examples/slurm.

`submit` writes the runs of the array to a file, and submits the script with SWEEP=FILE in its environment. In
each job, examples/slurm/common.sh asks this module for the flags of its array task. At the end it records the
exit code and the log with this module:

    python -m megatron.planner.sweep.slurm flags FILE TASK
    python -m megatron.planner.sweep.slurm record FILE TASK CODE LOG

The two commands do not import torch.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.errors import UserError, exit_on_user_error, one_line
from megatron.files import expect_layout, is_count, read_json, write_json
from megatron.planner.command import ScriptCommand, read_script, script_environment
from megatron.planner.sweep.axes import checked_row, run_words
from megatron.planner.sweep.folder import Record, SweepFolder, now_text, version_and_host
from megatron.planner.sweep.run_log import read_result
from megatron.training.log_lines import read_log_lines

# Variables of the scripts: these values turn off ramp-up, checkpoints and evaluation.
SCRIPT_VARIABLES = {"RAMPUP_BATCH_SIZE": "", "SAVE": "", "LOAD": "", "EVAL_ITERS": "0"}
_TIMEOUT_S = 120


def read_base_command(script: str, flags: Sequence[str], folder: Path) -> ScriptCommand:
    """Returns the training command of a script of examples/slurm that is called with `flags`. Raises
    UserError if the script does not print a command with torch's launcher. folder: the sweep's folder."""
    command = read_script("--sbatch", script, flags, _environment(folder))
    if command.processes is None:
        raise UserError(
            f"--sbatch {script} prints a command without --nnodes and --nproc_per_node. Expected a command "
            "with torch's launcher, like those in examples/slurm."
        )
    return command


def submit(
    folder: SweepFolder,
    record: Record,
    nodes: int,
    flags: Sequence[str],
    options: Sequence[str],
    retry_failed: bool,
) -> str:
    """Submits the runs that have no result and are not in the queue. Returns a sentence for the user. nodes:
    number of nodes per job. flags: arguments of the script. options: options of sbatch. retry_failed: see
    `SweepFolder.pending`. Raises UserError if sbatch fails."""
    assert record.script is not None
    queued = _queued(folder)
    todo = [
        (row, repeat)
        for row, repeat in folder.pending(record, retry_failed)
        if (row.index, repeat) not in queued
    ]
    waiting = f"; {len(queued)} are in the queue" if queued else ""
    if not todo:
        return f"nothing to submit: all {'other ' if queued else ''}runs are done{waiting}"
    arrays = folder.path / "arrays"
    arrays.mkdir(parents=True, exist_ok=True)
    file = arrays / f"{len(list(arrays.glob('*.json')))}.json"
    tasks = [{"row": row.index, "repeat": repeat} for row, repeat in todo]
    write_json(file, {"job": None, "tasks": tasks})
    # One job at a time (%1), so that rows do not disturb each other. --signal replaces the scripts' warning
    # of ten minutes, which would stop a shorter job at its start; a sweep has no checkpoint to save.
    words = ["sbatch", "--parsable", "--signal=B:USR2@60"]
    words += [f"--array=0-{len(tasks) - 1}%1", "--job-name=sweep", f"--nodes={nodes}"]
    words += [f"--output={folder.path.resolve()}/runs/slurm-%A_%a.out", *options, record.script, *flags]
    try:
        run = subprocess.run(
            words,
            env={**_environment(folder.path), "SWEEP": str(file.resolve())},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except FileNotFoundError:
        file.unlink()
        raise UserError(
            "sbatch is not installed on this machine. Remove --sbatch, or use a machine of the cluster."
        ) from None
    if run.returncode:
        file.unlink()
        reason = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        raise UserError(f"sbatch rejects the array: {reason}")
    # The job's number is on the last line, because a wrapper of sbatch may print further lines before it.
    job = (run.stdout.strip().splitlines() or [""])[-1].partition(";")[0]
    if not re.fullmatch(r"[0-9]+", job):
        raise UserError(
            f"sbatch --parsable prints '{one_line(job or 'nothing')}' as its last line. Expected a job's "
            "number. If squeue shows the array, wait for its end before you submit again."
        )
    write_json(file, {"job": job, "tasks": tasks})
    return (
        f"submitted job {job}: an array of {len(tasks)} runs{waiting}; tools/sweep.py report {folder.path} "
        "shows their results"
    )


def _environment(folder: Path) -> dict[str, str]:
    """Returns the environment of a script: SCRIPT_VARIABLES, and RUN_DIR inside the sweep's folder."""
    return {**script_environment(), **SCRIPT_VARIABLES, "RUN_DIR": str(folder.resolve() / "runs")}


def _queued(folder: SweepFolder) -> set[tuple[int, int]]:
    """Returns the runs of earlier arrays that are pending or running in Slurm."""
    queued: set[tuple[int, int]] = set()
    for file in sorted((folder.path / "arrays").glob("*.json")):
        job, runs = _read_array(file)
        if not isinstance(job, str) or not re.fullmatch(r"[0-9]+", job):
            continue
        command = ["squeue", "--noheader", "--array", "--format=%K", "--jobs", job]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except FileNotFoundError:
            continue
        queued |= {runs[int(word)] for word in run.stdout.split() if word.isdigit() and int(word) < len(runs)}
    return queued


def _read_array(file: Path) -> tuple[object, list[tuple[int, int]]]:
    """Returns the content of an array's file: its Slurm job, unchecked, and (row, repeat) of each task."""
    with expect_layout(file, "the tasks of an array"):
        array = read_json(file)
        job, runs = array["job"], [(task["row"], task["repeat"]) for task in array["tasks"]]
        if not all(is_count(row, 0) and is_count(repeat, 1) for row, repeat in runs):
            raise ValueError("row or repeat is not a number")
    return job, runs


def task_flags(file: Path, task: int) -> list[str]:
    """Returns the flags that an array task appends to the flags of its script."""
    record, row, _ = _task(file, task)
    return run_words([], checked_row(record.rows[row].settings, record.base).words, record.steps)


def record_task(file: Path, task: int, code: int, log: Path) -> None:
    """Writes the result of an array task. code: the exit code of the run. log: the file with its output."""
    record, row, repeat = _task(file, task)
    text = "\n".join(read_log_lines(log))
    result = read_result(record.rows[row], repeat, text, code, record.steps)
    job: Mapping[str, object] = {"started": None, "seconds": None, "log": log.name, "finished": now_text()}
    _folder(file).write_result({**result, **job, **version_and_host()})


def _task(file: Path, task: int) -> tuple[Record, int, int]:
    """Returns the record, row and repeat of an array task. Raises UserError if the task is not a run of the
    sweep."""
    _, runs = _read_array(file)
    record = _folder(file).read()
    if not 0 <= task < len(runs) or runs[task][0] >= len(record.rows) or runs[task][1] > record.repeat:
        raise UserError(f"{file}: task {task} is not a run of sweep.json. Submit the sweep again.")
    return record, *runs[task]


def _folder(file: Path) -> SweepFolder:
    """Returns the sweep's folder. file: path of the array's file, FOLDER/arrays/NUMBER.json."""
    return SweepFolder(file.resolve().parent.parent)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the two commands that the docstring of this module describes."""
    parser = argparse.ArgumentParser(description="prints the flags, or records the result, of an array task")
    parser.add_argument("action", choices=("flags", "record"))
    parser.add_argument("file", type=Path)
    parser.add_argument("task", type=int)
    parser.add_argument("code", type=int, nargs="?", default=0)
    parser.add_argument("log", type=Path, nargs="?")
    options = parser.parse_args(argv)
    with exit_on_user_error():
        if options.action == "flags":
            print("\n".join(task_flags(options.file, options.task)))
        else:
            record_task(options.file, options.task, options.code, options.log)


if __name__ == "__main__":
    main()
