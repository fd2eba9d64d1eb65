"""A signal ends a tool after its cleanup."""

from __future__ import annotations

import signal

import pytest

from megatron.config.tool_parser import exit_on_interrupt


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
