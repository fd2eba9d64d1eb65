"""A wrong setting ends every rank with exit code 2, and is printed by rank 0 only."""

from __future__ import annotations

import errno
import os

import pytest

from megatron.config import ConfigError, exit_on_config_error, limits


@pytest.mark.parametrize(("env", "printed"), [({}, True), ({"RANK": "0"}, True), ({"RANK": "3"}, False)])
def test_a_config_error_ends_with_code_2_and_one_line(
    env: dict[str, str],
    printed: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other ranks let rank 0 end first: a launcher ends it with them."""
    waited: list[float] = []
    monkeypatch.setattr("megatron.config.errors.time.sleep", waited.append)
    with pytest.raises(SystemExit) as caught, exit_on_config_error(env):
        raise ConfigError("--lr is 0: expected more")
    assert caught.value.code == 2 and bool(waited) is not printed
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == ("error: --lr is 0: expected more\n" if printed else "")


@pytest.mark.parametrize(
    "code, words",
    [
        (errno.EMFILE, "(Too many open files: raise the limit with ulimit -n)"),
        (errno.EACCES, "(Permission denied)"),
        (errno.ENAMETOOLONG, "(File name too long)"),
    ],
)
def test_a_file_that_cannot_be_accessed_ends_a_tool_with_code_2_and_one_line(
    code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, exit_on_config_error({}):
        raise OSError(code, os.strerror(code), "some/file")
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: some/file cannot be accessed now {words}\n"


@pytest.mark.parametrize("limit", [12, 60, -1])
def test_too_few_open_files_are_a_hostile_start(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = limits.resource.RLIM_INFINITY
    given = {limits.resource.RLIMIT_NOFILE: limit, limits.resource.RLIMIT_AS: unlimited}
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (given[kind], given[kind]))
    if limit < 0:  # no limit
        limits.check_limits()
        return
    with pytest.raises(ConfigError, match=f"ulimit -n {limit}: .* expected 256 at least: raise the limit"):
        limits.check_limits()


def test_too_little_virtual_memory_is_a_hostile_start(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {limits.resource.RLIMIT_NOFILE: 1024, limits.resource.RLIMIT_AS: 2 << 30}
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (given[kind], given[kind]))
    with pytest.raises(ConfigError, match="ulimit -v 2097152: .* 2.0 GiB .*, expected 8 GiB at least: raise"):
        limits.check_limits()


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), exit_on_config_error({}):
        raise KeyError("x")


def test_a_hostile_text_in_an_error_is_printed_with_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), exit_on_config_error({}):
        raise ConfigError("host \x1b[2J\udcff: expected a name")
    assert capsys.readouterr().err == "error: host \\x1b[2J\\udcff: expected a name\n"
