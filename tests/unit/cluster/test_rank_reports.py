"""Rank reports. A launch deletes the reports of earlier launches whose processes were all killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from megatron.child_processes import is_running
from megatron.cluster import rank_reports
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


# A launcher whose child, a rank, writes its report and waits. The folder's name contains the parent's id.
RANK = """
import sys
from megatron.cluster.rank_reports import RankReport
print(RankReport.from_environment().folder, flush=True)
sys.stdin.read()
"""
LAUNCHER = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"
VARIABLES = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ("RANK_REPORTS", "SLURM", "TORCHELASTIC")
    return (
        {k: v for k, v in os.environ.items() if not k.startswith(names)}
        | VARIABLES
        | {"TMPDIR": str(tmp_path)}
    )


def start(env: dict[str, str]) -> tuple[subprocess.Popen[str], Path]:
    """Starts a launcher in its own session. Returns the launcher and the folder of its rank."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK],
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def kill(process: subprocess.Popen[str], folder: Path) -> None:
    """Sends SIGKILL to the launcher and its rank, as a kernel or a scheduler does."""
    (report,) = read_reports(folder)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    while is_running(report["pid"]):
        time.sleep(0.01)


def age(folder: Path) -> None:
    before = time.time() - 2 * rank_reports._DEAD_AFTER_S
    for path in (*folder.iterdir(), folder):
        os.utime(path, (before, before))


def test_only_folders_of_dead_starts_are_deleted(env: dict[str, str], tmp_path: Path) -> None:
    (dead, dead_folder), (recent, recent_folder), (living, living_folder) = (start(env) for _ in range(3))
    assert len({dead_folder, recent_folder, living_folder}) == 3
    kill(dead, dead_folder)
    kill(recent, recent_folder)
    elsewhere = dead_folder.with_name(dead_folder.name.rpartition("@")[0] + "@another-node")
    elsewhere.mkdir()
    for folder in (dead_folder, living_folder, elsewhere):
        age(folder)
    own = RankReport.from_environment(env).folder
    assert own is not None
    assert {path for path in own.parent.iterdir()} == {recent_folder, living_folder, elsewhere, own}
    kill(living, living_folder)
    age(living_folder)
    RankReport.from_environment(env | {"MASTER_PORT": "29501"})
    assert not living_folder.exists() and recent_folder.exists() and own.exists()


def test_a_rank_that_has_survived_its_launcher_keeps_its_folder(env: dict[str, str]) -> None:
    launcher, folder = start(env)
    launcher.kill()
    launcher.wait()
    age(folder)
    RankReport.from_environment(env)
    assert folder.exists()
    kill(launcher, folder)
