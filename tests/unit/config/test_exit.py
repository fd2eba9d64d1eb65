"""A wrong setting or a signal ends a program with an exit code and one line."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from megatron.cluster import launch
from megatron.config import ConfigError
from megatron.config.tool_parser import exit_on_interrupt
from megatron.errors import UserError, exit_on_user_error


@pytest.mark.parametrize(("env", "printed"), [({}, True), ({"RANK": "0"}, True), ({"RANK": "3"}, False)])
def test_a_config_error_ends_with_code_2_and_one_line(
    env: dict[str, str],
    printed: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only rank 0 prints. The other ranks wait, so that a launcher does not end rank 0 before it has
    printed."""
    waited: list[float] = []
    monkeypatch.setattr("megatron.errors.time.sleep", waited.append)
    with pytest.raises(SystemExit) as caught, exit_on_user_error(env):
        raise ConfigError("--lr is 0: expected more")
    assert caught.value.code == 2 and bool(waited) is not printed
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == ("error: --lr is 0: expected more\n" if printed else "")


@pytest.mark.parametrize(
    "code, words",
    [
        (errno.EMFILE, " now (Too many open files: raise the limit with ulimit -n)"),
        (errno.EACCES, " now (Permission denied)"),
        (errno.ENAMETOOLONG, " (File name too long)"),
    ],
)
@pytest.mark.parametrize("env", [{}, {"RANK": "3"}])
def test_a_file_that_cannot_be_accessed_ends_a_tool_with_code_2_and_one_line_on_each_rank(
    env: dict[str, str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, exit_on_user_error(env):
        raise OSError(code, os.strerror(code), "some/file")
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: some/file cannot be accessed{words}\n"


def set_limits(patch: pytest.MonkeyPatch, files: tuple[int, int], space: int) -> list[tuple[int, int]]:
    """Sets the limits that the start of a program finds. Returns the list of limits of open files that the
    program sets."""
    given = {launch.resource.RLIMIT_NOFILE: files, launch.resource.RLIMIT_AS: (space, space)}
    changes: list[tuple[int, int]] = []
    patch.setattr(launch.resource, "getrlimit", given.__getitem__)
    patch.setattr(launch.resource, "setrlimit", lambda kind, new: changes.append(new))
    return changes


@pytest.mark.parametrize("limit", [12, 60])
def test_too_few_open_files_are_a_hostile_start(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, (limit, limit), -1)
    with pytest.raises(
        UserError, match=f"ulimit -Hn {limit}: .* Expected at least 256: start the run in a shell"
    ):
        launch.check_limits()


@pytest.mark.parametrize(
    ("given", "changes"),
    [((12, 4096), [(4096, 4096)]), ((200, -1), [(-1, -1)]), ((1024, 4096), []), ((-1, -1), [])],
)
def test_a_low_soft_limit_of_open_files_becomes_the_hard_one(
    given: tuple[int, int], changes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set_limits(monkeypatch, given, 2 << 30)
    launch.check_limits()
    assert found == changes


def test_too_little_virtual_memory_is_a_hostile_start(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, (1024, 1024), 1 << 30)
    with pytest.raises(UserError, match="ulimit -v 1048576: .* 1.0 GiB .* Expected at least 2 GiB: raise"):
        launch.check_limits()


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), exit_on_user_error({}):
        raise KeyError("x")


def test_a_hostile_text_in_an_error_is_printed_with_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), exit_on_user_error({}):
        raise ConfigError("host \x1b[2J\udcff: expected a name")
    assert capsys.readouterr().err == "error: host \\x1b[2J\\udcff: expected a name\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_of_stdout_that_ends_early_gets_no_traceback(unbuffered: str) -> None:
    """A buffered line fails when the program ends, an unbuffered line at once."""
    program = "with exit_on_user_error():\n    sys.stdin.read()\n    print(1)"
    tool = subprocess.Popen(
        [sys.executable, "-c", f"import sys\nfrom megatron.errors import exit_on_user_error\n{program}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert tool.stdin and tool.stdout and tool.stderr
    tool.stdout.close()
    tool.stdin.close()
    assert tool.stderr.read() == b"" and tool.wait() == 128 + signal.SIGPIPE


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_interrupt_the_cleanup(
    first: signal.Signals, second: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before, cleaned = signal.getsignal(first), []
    with pytest.raises(SystemExit) as ended, exit_on_interrupt():
        try:
            signal.raise_signal(first)
        finally:
            signal.raise_signal(second)
            cleaned.append("temporary file")
    assert ended.value.code == 128 + first and cleaned
    assert capsys.readouterr().err == "interrupted\n" and signal.getsignal(first) is before
