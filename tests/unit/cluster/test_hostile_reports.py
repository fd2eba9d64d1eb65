"""Rank reports that no rank wrote: the diagnosis skips and names them, in bounded time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.cluster.diagnosis import diagnose
from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.rank_reports import RankReport, read_report, read_reports
from megatron.errors import printable
from tests.end_to_end.command import ROOT
from tests.unit.hostile import HOSTILE_VALUES, bounds

REPORT: dict[str, Any] = {
    "rank": 1,
    "host": "n1",
    "pid": 2**30,
    "stage": 0,
    "iteration": 7,
    "saved_iteration": 5,
    "load_to_resume": "runs",
    "signal": "SIGTERM",
    "ended": 10.0,
    "text": "error: damaged",
    "place": "forward",
    "stopped": [1],
    "first": True,
    "first_rank": 1,
    "on_all_ranks": False,
}


@pytest.mark.parametrize("end", list(ExitStatus))
def test_a_fact_of_another_type_makes_no_traceback(end: ExitStatus, tmp_path: Path) -> None:
    RankReport(str(tmp_path), "0", "n0").end(ExitStatus.FAILED, "error: x")
    facts = {**REPORT, "end": end}
    for name in facts:
        for value in [*HOSTILE_VALUES, {"x": 1}, ["a"], 10**400]:
            (tmp_path / "rank-1.json").write_text(json.dumps({**facts, name: value}))
            reports = read_reports(tmp_path)
            for processes in (1, 2, 3):
                assert isinstance(diagnose(reports, processes).text, str)
                diagnose(reports[1:], processes)
        (tmp_path / "rank-1.json").write_text(
            json.dumps({key: fact for key, fact in facts.items() if key != name})
        )
        diagnose(read_reports(tmp_path), 2)


@pytest.mark.parametrize("content", ["", "[]", "1", '{"rank": 1', "[" * 100_000, "\x00", '{"rank":' * 5000])
def test_a_file_that_is_not_a_report_is_skipped(content: str, tmp_path: Path) -> None:
    (tmp_path / "rank-1.json").write_text(content)
    assert read_reports(tmp_path) == []


def test_a_pipe_a_device_and_an_endless_file_are_not_reports(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0.json")
    (tmp_path / "rank-1.json").symlink_to("/dev/zero")
    (tmp_path / "rank-2.json").touch()
    os.truncate(tmp_path / "rank-2.json", 1 << 40)
    with bounds():
        assert read_reports(tmp_path) == []
        assert not RankReport(str(tmp_path), "0").is_enabled
        RankReport(str(tmp_path), "3").end(ExitStatus.FAILED, "error: x")
        (tmp_path / "rank-3.stacks").unlink()
        os.mkfifo(tmp_path / "rank-3.stacks")
        report = read_report(tmp_path / "rank-3.json")
    assert report is not None and report["stacks"] == ""


def typed_diagnosis(folder: Path, processes: int) -> subprocess.CompletedProcess[str]:
    words = ["-m", "megatron.cluster.diagnosis", str(folder), "--processes", str(processes)]
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)


def test_the_diagnosis_names_what_it_cannot_read_and_prints_no_escape_sequence(tmp_path: Path) -> None:
    (tmp_path / "rank-1.json").write_text("[]")
    RankReport(str(tmp_path), "0", "n\x1b]0;title\x07").end(ExitStatus.FAILED, "error: \x1b[2Jx\r\udcff")
    run = typed_diagnosis(tmp_path, 2)
    assert (run.returncode, run.stdout) == (1, "")
    note, error = run.stderr.splitlines()
    assert note == f"note: rank-1.json in {tmp_path} cannot be read as reports of a rank"
    assert error.startswith(r"error: rank 0 on n\x1b]0;title\x07") and error.endswith(r"\x1b[2Jx\r\udcff")


def test_an_impossible_number_of_processes_is_refused(tmp_path: Path) -> None:
    with bounds(cpu_s=20.0):
        run = typed_diagnosis(tmp_path, 10**9)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].endswith("--processes 1000000000: expected 1 to 100,000")


def test_a_printable_text_keeps_lines_and_letters() -> None:
    assert printable("Größe\t1\n") == "Größe\t1\n"
    assert printable("\x1b[31m\x9b\u202e\r\x00") == r"\x1b[31m\x9b\u202e\r\x00"
