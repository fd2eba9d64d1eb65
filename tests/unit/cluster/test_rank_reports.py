"""What a rank leaves behind about its end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron.cluster.rank_reports import ExitStatus, RankReport, read_reports


def test_a_rank_that_is_killed_leaves_a_report_without_an_end(tmp_path: Path) -> None:
    report = RankReport(str(tmp_path), "3")
    report.note(stage=1)
    (read,) = read_reports(tmp_path)
    assert (read["rank"], read["pid"], read["stage"]) == (3, os.getpid(), 1) and "end" not in read


def test_the_first_end_counts(tmp_path: Path) -> None:
    report = RankReport(str(tmp_path), "0")
    report.set_iteration(7)
    assert report.end(ExitStatus.FAILED, "first") and report.end(ExitStatus.HANG, "second")
    (read,) = read_reports(tmp_path)
    assert (read["end"], read["text"], read["iteration"]) == ("failed", "first", 7)


def test_of_a_long_text_the_end_is_kept(tmp_path: Path) -> None:
    RankReport(str(tmp_path), "0").end(ExitStatus.FAILED, "ä\n" * 20_000 + "the sentence")
    (read,) = read_reports(tmp_path)
    assert read["text"].endswith("ä\nthe sentence")


def test_an_end_needs_no_more_space_on_the_disk_than_the_start(tmp_path: Path) -> None:
    report = RankReport(str(tmp_path), "0")
    size = (tmp_path / "rank-0.json").stat().st_size
    report.end(ExitStatus.FAILED, "x" * 10_000)
    assert (tmp_path / "rank-0.json").stat().st_size == size


def test_a_report_that_cannot_be_written_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert not RankReport(str(tmp_path / "file" / "reports"), "0").end(ExitStatus.FAILED)
    report = RankReport(str(tmp_path), "0")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert not report.end(ExitStatus.FAILED)


def test_without_a_folder_nothing_is_kept() -> None:
    report = RankReport(None, "0")
    assert not report.end(ExitStatus.FAILED) and not report.is_enabled and not report.stop_requested()
