"""Rank reports."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.rank_reports import RankReport, read_reports


def test_report_has_no_end_until_the_rank_ends(tmp_path: Path) -> None:
    report = RankReport(str(tmp_path), "3")
    report.note(stage=1)
    (read,) = read_reports(tmp_path)
    assert (read["rank"], read["pid"], read["stage"]) == (3, os.getpid(), 1) and "end" not in read


def test_only_the_first_end_is_kept(tmp_path: Path) -> None:
    report = RankReport(str(tmp_path), "0")
    report.set_iteration(7)
    assert report.end(ExitStatus.FAILED, "first") and report.end(ExitStatus.HANG, "second")
    (read,) = read_reports(tmp_path)
    assert (read["end"], read["text"], read["iteration"]) == ("failed", "first", 7)


def test_long_text_is_truncated_at_its_start(tmp_path: Path) -> None:
    RankReport(str(tmp_path), "0").end(ExitStatus.FAILED, "ä\n" * 20_000 + "the sentence")
    (read,) = read_reports(tmp_path)
    assert read["text"].endswith("ä\nthe sentence")


def test_file_size_does_not_grow(tmp_path: Path) -> None:
    report = RankReport(str(tmp_path), "0")
    size = (tmp_path / "rank-0.json").stat().st_size
    report.end(ExitStatus.FAILED, "x" * 10_000)
    assert (tmp_path / "rank-0.json").stat().st_size == size


def test_unwritable_report_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert not RankReport(str(tmp_path / "file" / "reports"), "0").end(ExitStatus.FAILED)
    report = RankReport(str(tmp_path), "0")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert not report.end(ExitStatus.FAILED)


def test_without_a_folder_nothing_is_written() -> None:
    report = RankReport(None, "0")
    assert not report.end(ExitStatus.FAILED) and not report.is_enabled and not report.stop_requested()
