"""Other users can write to the folder of a sweep, so its content is checked like typed flags."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.commands import sweep
from megatron.errors import UserError
from megatron.planner.sweep.axes import Axis, make_rows
from megatron.planner.sweep.folder import SweepFolder
from megatron.planner.sweep.local import run_command
from megatron.planner.sweep.run_log import read_result
from megatron.planner.sweep.slurm import record_task, task_flags
from tests.unit.hostile import HOSTILE_VALUES, MUTATIONS, bounds, fuzz, mutated_json, refusal
from tests.unit.planner.sweep.made import make_record, make_result, make_row

A, B = make_row(0, "memory"), make_row(1, "time")


def change(file: Path, edit: Callable[[Any], object]) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    """Returns the folder of a sweep that has one of two results."""
    made = SweepFolder(tmp_path / "shared" / "sweep")
    made.begin(make_record(A, B, repeat=1))
    made.write_result(make_result(A, 1, 1.0, [2.0, 1.0, 1.5, 1.25]))
    return made


def test_flags_injected_as_words_do_not_run(folder: SweepFolder) -> None:
    injected = ["--save", "/victim"]
    change(folder.path / "sweep.json", lambda record: record["rows"][1]["words"].extend(injected))
    record = folder.begin(make_record(A, B, repeat=1))
    command = run_command(record.base, record.rows[1], record.steps)
    assert "--save" not in command and command[command.index("--partition-method") + 1] == "time"
    array = folder.path / "arrays" / "0.json"
    array.parent.mkdir()
    array.write_text(json.dumps({"job": None, "tasks": [{"row": 1, "repeat": 1}]}))
    assert task_flags(array, 0)[:3] == ["--partition-method", "time", "--exit-interval"]


def test_injected_processes_are_not_started(folder: SweepFolder) -> None:
    change(folder.path / "sweep.json", lambda record: record["rows"][1].update(processes=5000))
    record = folder.begin(make_record(A, B, repeat=1))
    assert "5000" not in run_command(record.base, record.rows[1], record.steps)


@pytest.mark.parametrize(
    "settings",
    [
        {"--save": "/victim"},
        {"--dry-run": "on"},
        {"--exit-interval": "9"},
        {"--data-path": "x --save /victim"},
        {"--seed": "--save=/victim"},
        {"--data-path": "'open"},
        {"--unknown": "1"},
        {"--bf16": "maybe"},
    ],
)
def test_injected_settings_are_refused_as_if_typed(settings: dict[str, str], folder: SweepFolder) -> None:
    with pytest.raises(UserError, match="--vary"):
        make_rows([Axis(flag, (value,)) for flag, value in settings.items()], [])
    change(folder.path / "sweep.json", lambda record: record["rows"][1].update(settings=settings))
    with pytest.raises(UserError, match="--vary"):
        folder.begin(make_record(A, repeat=1))
    with pytest.raises(UserError, match="--vary"):
        run_command([], make_row(1, "time", settings=settings), 4)


@pytest.mark.parametrize("repeat", ["x/../../../esc", "../esc", -1, 0, 2, 1.0, True, None, [1]])
def test_an_injected_number_of_a_run_writes_nothing_outside(
    repeat: Any, folder: SweepFolder, tmp_path: Path
) -> None:
    (folder.path / "runs" / "001-x").mkdir()
    array, log = folder.path / "arrays" / "0.json", tmp_path / "log"
    array.parent.mkdir()
    task = {"row": 1, "repeat": repeat}
    array.write_text(json.dumps({"folder": str(tmp_path / "victim"), "job": None, "tasks": [task]}))
    log.write_text("")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="0.json"):
        record_task(array, 0, 1, log)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_result_is_written_to_the_folder_of_its_array(folder: SweepFolder, tmp_path: Path) -> None:
    array, log = folder.path / "arrays" / "0.json", tmp_path / "log"
    array.parent.mkdir()
    array.write_text(
        json.dumps({"folder": str(tmp_path / "victim"), "job": "7", "tasks": [{"row": 1, "repeat": 1}]})
    )
    log.write_text("error: x")
    record_task(array, 0, 1, log)
    assert (1, 1) in folder.results() and not (tmp_path / "victim").exists()


@pytest.mark.parametrize("mutations", MUTATIONS)
@pytest.mark.parametrize("name", ["sweep.json", "runs/000-1.json"])
def test_hostile_values_are_reported_or_refused_by_a_sentence(
    name: str, mutations: int, folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "draw_summary", lambda summary, path: None)  # drawing takes seconds
    file = folder.path / name
    honest = json.loads(file.read_text())

    def write(data: Any, _: object) -> None:
        file.write_text(json.dumps(mutated_json(honest, data)))

    for field in honest:
        for value in [*HOSTILE_VALUES, 10**400, [None], [{}], {"x": 1}]:
            file.write_text(json.dumps({**honest, field: value}))
            try:
                sweep.write_report(folder)
            except UserError as error:
                assert str(folder.path) in str(error)
    fuzz(mutations, lambda: sweep.write_report(folder), write, folder.path / "runs" / "nothing")
    for content in ("", "[]", "[" * 100_000, "nan", "\x00"):
        file.write_text(content)
        assert str(file) in refusal(lambda: sweep.write_report(folder))


def test_a_hostile_plot_is_drawn_and_a_hostile_label_is_no_formula(folder: SweepFolder) -> None:
    def edit(record: Any) -> None:
        record["rows"][0]["settings"] = {"--data-path": "$\\frac{$"}
        record["rows"][1]["predicted"]["memory_bytes"] = [1e99, 0.0]

    change(folder.path / "sweep.json", edit)
    with bounds(1024):
        sweep.write_report(folder)
    assert (folder.path / "report.png").stat().st_size


def test_a_hostile_pipe_in_a_folder_does_not_block(folder: SweepFolder) -> None:
    os.mkfifo(folder.path / "report.csv")
    with pytest.raises(OSError):
        sweep.write_report(folder)
    (folder.path / "sweep.json").unlink()
    os.mkfifo(folder.path / "sweep.json")
    assert "sweep.json" in refusal(lambda: folder.begin(make_record(A)))
    os.mkfifo(folder.path / "runs" / "001-1.json")
    assert "001-1.json" in refusal(folder.results)


def test_hostile_lines_of_a_log_are_no_traceback() -> None:
    log = "\n".join(
        [
            "  stage 0 | resident 1.2.3 to 4.5.6 (rank 0)",
            f"  stage {'9' * 5000} | resident 1 to 2 (rank 0)",
            "bubble, % of the passes' time per pipeline rank: 1.2.3 . 5 --",
            "bubble, % of the passes' time per pipeline rank: 25 75",
        ]
    )
    result = read_result(A, 1, log, 0, 4)
    assert result["memory"] == [] and result["bubble"] == 0.5
