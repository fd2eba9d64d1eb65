"""The command line of the tools: its parser, a check of input files, and the end of an interrupted tool."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from megatron.errors import ConfigError


class ToolParser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError.

    `description` is printed with its line breaks, so that it can be a tool's docstring. Flags cannot be
    abbreviated: a new flag would change the meaning of an abbreviation.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the flags)")


def check_input_files(paths: Iterable[str]) -> None:
    """Raises ConfigError for a file of --input that does not exist, or cannot be read or decompressed."""
    for path in paths:
        if not os.path.isfile(path):
            raise ConfigError(f"--input {path}: the file does not exist")
        if not os.access(path, os.R_OK):
            raise ConfigError(f"--input {path}: this user cannot read the file")
        if path.endswith((".zst", ".xz", ".bz2", ".zip", ".parquet")):
            raise ConfigError(f"--input {path}: only plain and .gz files can be read, decompress it first")


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
