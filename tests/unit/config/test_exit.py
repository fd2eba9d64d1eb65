"""A wrong setting ends every rank with exit code 2, and is printed by rank 0 only."""

from __future__ import annotations

import pytest

from megatron.config import ConfigError, exit_on_config_error


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


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), exit_on_config_error({}):
        raise KeyError("x")


def test_a_hostile_text_in_an_error_is_printed_with_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), exit_on_config_error({}):
        raise ConfigError("host \x1b[2J\udcff: expected a name")
    assert capsys.readouterr().err == "error: host \\x1b[2J\\udcff: expected a name\n"
