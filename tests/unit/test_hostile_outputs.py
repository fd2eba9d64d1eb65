"""Files are never written through a link, and a device or a pipe is never replaced by a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.rank_reports import FAILED_FILE, RankReport
from megatron.errors import UserError
from megatron.files import open_own, write_atomically, write_json
from megatron.planner.page import write_page
from megatron.planner.plots import new_figure
from megatron.planner.sweep.folder import SweepFolder
from megatron.training.metrics import open_log
from tests.end_to_end.command import ROOT


def end_with_lock(path: Path) -> None:
    report = RankReport(str(path.parent), "0")
    with report.folder_lock():
        report.end(ExitStatus.FAILED)


def hold_sweep(path: Path) -> None:
    with SweepFolder(path.parent).lock():
        pass


def draw(path: Path) -> None:
    with new_figure(path, 1):
        pass


WRITERS: dict[str, Callable[[Path], object]] = {
    "rank-0.json": lambda path: RankReport(str(path.parent), "0"),
    "rank-0.stacks": lambda path: RankReport(str(path.parent), "0"),
    FAILED_FILE: lambda path: RankReport(str(path.parent), "0").end(ExitStatus.FAILED),
    "lock": end_with_lock,
    "sweep/lock": hold_sweep,
    "report.png": draw,
    "page.html": lambda path: write_page(path, "plan", "", {}),
    "data.json": lambda path: write_json(path, {}),
    "data.json.tmp": lambda path: write_json(path.with_suffix(""), {}),
    "run.log": lambda path: open_log(str(path)).close(),
}


LINKS = {"symbolic": os.symlink, "hard": os.link}


# A log with several hard links is appended to, so that pair is not a case.
@pytest.mark.parametrize(
    ("name", "link"),
    [(name, link) for name in WRITERS for link in LINKS if (name, link) != ("run.log", "hard")],
)
def test_a_link_in_the_place_of_an_output_does_not_change_its_target(
    name: str, link: str, tmp_path: Path
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "shared" / name
    victim.write_text("mine")
    os.utime(victim, (1, 1))
    path.parent.mkdir(parents=True)
    LINKS[link](victim, path)
    try:
        WRITERS[name](path)
    except (OSError, UserError) as error:
        assert "link" in str(error)
    assert victim.read_text() == "mine" and victim.stat().st_mtime == 1


def test_files_of_a_folder_that_was_copied_by_hard_links_are_written(tmp_path: Path) -> None:
    """A kill has left a temporary file, and `cp -al run run.bak` has copied the folder by hard links."""
    for name in ("latest.tmp", "log", "rank.json"):
        (tmp_path / name).write_text("old")
        os.link(tmp_path / name, tmp_path / f"{name}.bak")
    write_atomically(tmp_path / "latest", "new")
    os.close(open_own(tmp_path / "rank.json"))
    open_log(str(tmp_path / "log")).close()
    assert (tmp_path / "latest").read_text() == "new" and (tmp_path / "rank.json").read_text() == ""
    assert [path.read_text() for path in sorted(tmp_path.glob("*.bak"))] == ["old", "old", "old"]


def test_a_dangling_link_creates_no_file(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="it is a symbolic link"):
        open_own(tmp_path / "log")
    assert not (tmp_path / "victim").exists()


def test_a_pipe_is_written_directly_and_one_without_a_reader_does_not_block(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError) as caught:
        write_json(pipe, {})
    assert caught.value.filename == str(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        open_own(pipe)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        write_json(pipe, {"a": 1})
        assert json.load(reader) == {"a": 1}
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]


def test_a_device_is_written_directly(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.symlink_to("/dev/full")  # a link: a defect must not replace the machine's own device
    with pytest.raises(UserError, match=r"--html .*full cannot be written \(No space left on device\)"):
        write_page(full, "plan", "", {})
    with pytest.raises(OSError) as caught:
        write_json(full, {})
    assert caught.value.filename == str(full)
    assert full.is_char_device() and os.listdir(tmp_path) == ["full"]


def test_the_standard_output_in_a_file_keeps_its_order(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from megatron.files import write_atomically; print('before');"
        "write_atomically(Path('/dev/stdout'), 'between\\n'); print('after')"
    )
    with open(tmp_path / "out", "w") as out:
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "before\nbetween\nafter\n"


def test_a_text_with_undecodable_bytes_is_written(tmp_path: Path) -> None:
    write_atomically(tmp_path / "report.md", os.fsdecode(b"run-\xff"))
    assert (tmp_path / "report.md").read_text() == "run-\\udcff"
