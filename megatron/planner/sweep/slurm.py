"""Runs of a sweep as an array of Slurm jobs, which run a script of examples/slurm.

`submit` writes the runs of an array into a file and submits the script itself, with SWEEP=FILE in its
environment. examples/slurm/common.sh then asks this module for the flags of its array task, and hands it the
exit code at the end:

    python -m megatron.planner.sweep.slurm flags FILE TASK
    python -m megatron.planner.sweep.slurm record FILE TASK CODE LOG

The second half needs no torch.
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
from megatron.planner.sweep.folder import Record, SweepFolder, machine_facts, now_text
from megatron.planner.sweep.run_log import read_result
from megatron.training.log_lines import read_log_lines

# Variables of the scripts: full batches from the first step on, and nothing but steps.
SCRIPT_VARIABLES = {"RAMPUP_BATCH_SIZE": "", "SAVE": "", "LOAD": "", "EVAL_ITERS": "0"}
_TIMEOUT_S = 120


def read_base_command(script: str, flags: Sequence[str], folder: Path) -> ScriptCommand:
    """The training command that a script of examples/slurm starts with `flags` after its name. UserError if
    it does not print one with torch's launcher."""
    command = read_script("--sbatch", script, flags, _environment(folder))
    if command.processes is None:
        raise UserError(
            f"--sbatch {script} prints a command without --nnodes and --nproc_per_node: expected one of "
            "torch's launcher, as in examples/slurm"
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
    """Submits the runs that have no result and are not in the queue; returns a sentence.

    nodes: of a job. flags: after the script's name. options: of sbatch. Raises UserError if sbatch refuses.
    """
    assert record.script is not None
    queued = _queued(folder)
    todo = [
        (row, repeat)
        for row, repeat in folder.pending(record, retry_failed)
        if (row.index, repeat) not in queued
    ]
    waiting = f"; {len(queued)} are in the queue" if queued else ""
    if not todo:
        return f"nothing to submit{waiting}: all other runs are done"
    arrays = folder.path / "arrays"
    arrays.mkdir(parents=True, exist_ok=True)
    file = arrays / f"{len(list(arrays.glob('*.json')))}.json"
    tasks = [{"row": row.index, "repeat": repeat} for row, repeat in todo]
    write_json(file, {"job": None, "tasks": tasks})
    # One job at a time, so that the rows do not disturb each other.
    # There is nothing to save: the scripts' ten minutes of warning would stop a short job at its start.
    words = [
        "sbatch",
        "--parsable",
        "--signal=B:USR2@60",
        f"--array=0-{len(tasks) - 1}%1",
        "--job-name=sweep",
    ]
    words += [
        f"--nodes={nodes}",
        f"--output={folder.path.resolve()}/runs/slurm-%A_%a.out",
        *options,
    ]
    words += [record.script, *flags]
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
            "sbatch is not installed here: run without --sbatch, or on a machine of the cluster"
        ) from None
    if run.returncode:
        file.unlink()
        reason = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        raise UserError(f"sbatch refuses the array: {reason}")
    # A wrapper of sbatch may print more before it.
    job = (run.stdout.strip().splitlines() or [""])[-1].partition(";")[0]
    if not re.fullmatch(r"[0-9]+", job):
        raise UserError(
            f"sbatch --parsable prints '{one_line(job or 'nothing')}' as its last line, expected a job's "
            "number: if squeue shows the array, wait for its end before you submit again"
        )
    write_json(file, {"job": job, "tasks": tasks})
    return (
        f"submitted job {job}: an array of {len(tasks)} runs{waiting}; tools/sweep.py report {folder.path} "
        "shows their results"
    )


def _environment(folder: Path) -> dict[str, str]:
    """The environment of a script: nothing but full steps, and its files in the folder of the sweep."""
    return {**script_environment(), **SCRIPT_VARIABLES, "RUN_DIR": str(folder.resolve() / "runs")}


def _queued(folder: SweepFolder) -> set[tuple[int, int]]:
    """The runs of earlier arrays that wait or run."""
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
    """The Slurm job of an array, unchecked, and the (row, repeat) of its tasks."""
    with expect_layout(file, "the tasks of an array"):
        array = read_json(file)
        job, runs = array["job"], [(task["row"], task["repeat"]) for task in array["tasks"]]
        if not all(is_count(row, 0) and is_count(repeat, 1) for row, repeat in runs):
            raise ValueError("a run has no numbers")
    return job, runs


def task_flags(file: Path, task: int) -> list[str]:
    """The flags that an array task appends to those of its script."""
    record, row, _ = _task(file, task)
    return run_words([], checked_row(record.rows[row].settings, record.base).words, record.steps)


def record_task(file: Path, task: int, code: int, log: Path) -> None:
    """Writes the result of an array task. code: the exit code of the run. log: its output."""
    record, row, repeat = _task(file, task)
    text = "\n".join(read_log_lines(log))
    result = read_result(record.rows[row], repeat, text, code, record.steps)
    facts: Mapping[str, object] = {"started": None, "seconds": None, "log": log.name, "finished": now_text()}
    _folder(file).write_result({**result, **facts, **machine_facts()})


def _task(file: Path, task: int) -> tuple[Record, int, int]:
    _, runs = _read_array(file)
    record = _folder(file).read()
    if not 0 <= task < len(runs) or runs[task][0] >= len(record.rows) or runs[task][1] > record.repeat:
        raise UserError(f"{file} has no task {task} of a run in sweep.json: submit the sweep again")
    return record, *runs[task]


def _folder(file: Path) -> SweepFolder:
    """The sweep of an array's file, which is FOLDER/arrays/NUMBER.json."""
    return SweepFolder(file.resolve().parent.parent)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the commands above."""
    parser = argparse.ArgumentParser(description="the flags and the result of one task of a sweep's array")
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
