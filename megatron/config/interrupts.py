"""The end of a tool that is interrupted: its cleanup runs, for SIGTERM as for Ctrl-C."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Ends the program with exit code 128 + signal on SIGTERM and Ctrl-C, after the cleanup of the block. For
    tools that write under temporary names. Only for the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for ignored in _SIGNALS:  # a second signal, of either kind, does not interrupt the cleanup
            signal.signal(ignored, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + (error.args[0] if error.args else signal.SIGINT))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
