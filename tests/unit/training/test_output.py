"""A failing console, log file or curve writer does not end the run."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from megatron.arguments import parse_args
from megatron.config import LoggingConfig
from megatron.errors import UserError
from megatron.training.metrics import MetricsLogger
from megatron.training.run import make_output_folders
from tests.unit.config.command_lines import SMALL
from tests.unit.training.test_metrics import THROUGHPUT, record


class ClosedTerminal(io.StringIO):
    """A stream that fails from its second line on, like the terminal of a session that has ended."""

    def write(self, text: str) -> int:
        if self.getvalue():
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


class FullDisk:
    def __init__(self) -> None:
        self.calls = 0

    def write(self, values: object, state: object, when: float) -> None:
        self.calls += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise AssertionError("used after it had failed")

    close = flush


def test_a_closed_terminal_is_noted_in_the_log_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    console = ClosedTerminal()
    logger = MetricsLogger(LoggingConfig(log_interval=1, log_path=str(log)), THROUGHPUT, stream=console)
    for text in ("one", "two", "three"):
        logger.print(text)
    logger.close()
    assert console.getvalue() == "one\n"
    warning = (
        "WARNING: the console cannot be written ([Errno 5] Input/output error); the run continues without it"
    )
    assert log.read_text().splitlines() == ["one", "two", warning, "three"]


def test_a_full_disk_under_the_log_file_is_noted_on_the_console() -> None:
    console = io.StringIO()
    logger = MetricsLogger(LoggingConfig(log_interval=1, log_path="/dev/full"), THROUGHPUT, stream=console)
    logger.print("one")
    logger.print("two")
    logger.close()
    lines = console.getvalue().splitlines()
    assert (lines[0], *lines[2:]) == ("one", "two")
    assert lines[1].startswith("WARNING: --log-path /dev/full cannot be written ([Errno 28]")


@pytest.mark.parametrize("log_path", [None, "/dev/full"])
def test_a_writer_that_fails_is_not_used_again(log_path: str | None) -> None:
    console, writer = io.StringIO(), FullDisk()
    logging = LoggingConfig(log_interval=1, log_path=log_path)
    logger = MetricsLogger(logging, THROUGHPUT, stream=console, writers=[writer])
    logger.log_step(record(1))
    logger.log_step(record(2))
    logger.close()
    assert writer.calls == 1
    assert console.getvalue().count("FullDisk failed ([Errno 28] No space left on device)") == 1


def test_hostile_text_from_hosts_and_files_reaches_no_terminal_raw(tmp_path: Path) -> None:
    console = io.StringIO()
    logger = MetricsLogger(
        LoggingConfig(log_interval=1, log_path=str(tmp_path / "log")), THROUGHPUT, stream=console
    )
    logger.print("node \x1b]0;title\x07\nsecond line")
    logger.close()
    assert console.getvalue() == (tmp_path / "log").read_text() == "node \\x1b]0;title\\x07\nsecond line\n"


def test_a_hostile_pipe_as_the_log_is_refused_before_the_run(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    for path in (tmp_path / "log", tmp_path / "link"):
        config = parse_args([*SMALL, "--log-path", str(path)], {})
        with pytest.raises(UserError, match=f"--log-path {path} cannot be written"):
            make_output_folders(config)
    assert not (tmp_path / "victim").exists()


def test_the_reader_of_a_pipe_as_the_log_sees_no_end_before_the_run(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    config = parse_args([*SMALL, "--log-path", str(tmp_path / "log")], {})
    with os.fdopen(os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)) as reader:
        make_output_folders(config)
        with pytest.raises(BlockingIOError):  # at an end os.read returns nothing
            os.read(reader.fileno(), 1)
        logger = MetricsLogger(config.logging, THROUGHPUT, stream=io.StringIO())
        logger.print("one")
        assert reader.readline() == "one\n"
        logger.close()
