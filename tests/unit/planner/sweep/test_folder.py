"""Tests the folder of a sweep: order of the runs, resume, extension, rejected folders."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from megatron.errors import UserError
from megatron.planner.sweep import folder as module
from megatron.planner.sweep.folder import SweepFolder
from tests.unit.planner.sweep.made import make_record, make_result, make_row

A, B, C = make_row(0, "memory"), make_row(1, "time"), make_row(2, "uniform")


def keys(tasks: list) -> list[tuple[int, int]]:
    return [(row.index, repeat) for row, repeat in tasks]


def test_repeats_are_interleaved_and_refused_rows_are_left_out() -> None:
    refused = make_row(1, "time", refused="too few layers")
    assert keys(list(make_record(A, refused, C).tasks())) == [(0, 1), (2, 1), (0, 2), (2, 2)]


def test_a_sweep_continues_after_its_last_result(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "sweep")
    record = folder.begin(make_record(A, B))
    folder.write_result(make_result(A, 1, 1.0, [2.0]))
    (tmp_path / "sweep" / "runs" / "001-1.log").write_text("a run that was killed has a log and no result")
    again = folder.begin(make_record(A, B))
    assert again == record
    assert keys(folder.pending(again)) == [(1, 1), (0, 2), (1, 2)]


def test_a_row_that_failed_is_run_again_on_request_only(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    record = folder.begin(make_record(A, B))
    folder.write_result(make_result(A, 1, 1.0, [], status="out of memory", reason="x", step_s=None))
    assert keys(folder.pending(record)) == [(1, 1), (1, 2)]
    assert keys(folder.pending(record, retry_failed=True)) == [(0, 1), (1, 1), (0, 2), (1, 2)]


def test_new_values_and_more_repeats_extend_a_sweep(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    folder.begin(make_record(A, B, repeat=1))
    # The second command numbers its rows differently. The rows keep the numbers of the folder.
    record = folder.begin(make_record(make_row(0, "uniform"), make_row(1, "time"), repeat=2))
    methods = [(row.index, row.settings["--partition-method"]) for row in record.rows]
    assert methods == [(0, "memory"), (1, "time"), (2, "uniform")]
    assert record.repeat == 2
    assert folder.read() == record


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"base": ["--lr", "2e-3"]}, "a different base command \\(--lr 1e-3; now --lr 2e-3\\)"),
        ({"steps": 5}, "a different --steps \\(4; now 5\\)"),
        ({"script": "a.slurm"}, "a different --sbatch"),
    ],
)
def test_another_sweep_in_the_folder_is_refused(changes: dict, expected: str, tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    folder.begin(make_record(A))
    before = (tmp_path / "sweep.json").read_text()
    with pytest.raises(UserError, match=expected):
        folder.begin(make_record(A, **changes))
    assert (tmp_path / "sweep.json").read_text() == before


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "has no sweep.json"),
        ('{"format": 9}', "format 9"),
    ],
)
def test_a_folder_without_a_readable_record_is_refused(
    content: str | None, expected: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(UserError, match=expected):
        SweepFolder(tmp_path).read()


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_WAIT_FOR_LOCK_S", 0.0)
    other = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="another sweep"), SweepFolder(tmp_path).lock():
        pass
    os.close(other)
    with SweepFolder(tmp_path).lock():
        pass
