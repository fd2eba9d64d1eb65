"""Reads the output of sbatch, which submits a sweep as an array of Slurm jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.errors import UserError
from megatron.planner.sweep.folder import SweepFolder
from megatron.planner.sweep.slurm import submit, task_flags
from tests.unit.planner.sweep.made import make_record, make_row


def submit_with(output: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Submits one run with a stub of sbatch that prints `output`. Returns the file of the array."""
    commands = folder / "bin"
    commands.mkdir()
    (commands / "output").write_text(output)
    (commands / "sbatch").write_text(f"#!/bin/sh\nexec cat {commands}/output\n")
    (commands / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    record = make_record(make_row(0, "memory"), repeat=1, script="job.slurm")
    sweep = SweepFolder(folder / "sweep")
    sweep.begin(record)
    array = sweep.path / "arrays" / "0.json"
    submit(sweep, record, 1, [], [], False)
    return array


@pytest.mark.parametrize("output", ["123\n", "123;cluster\n", "Welcome to X\n\n123;cluster\n"])
def test_the_job_is_the_last_line_of_sbatch(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(submit_with(output, tmp_path, monkeypatch).read_text())["job"] == "123"


@pytest.mark.parametrize("output", ["", "submitted\n", "123\nBye \x1b[2J\n"])
def test_tasks_of_a_job_without_a_known_number_run(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="as its last line. Expected a job's number") as caught:
        submit_with(output, tmp_path, monkeypatch)
    assert str(caught.value).isprintable()
    array = tmp_path / "sweep" / "arrays" / "0.json"
    assert task_flags(array, 0)[:2] == ["--partition-method", "memory"]
