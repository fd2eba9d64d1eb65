"""Outputs that a run outlives: a closed terminal or a full disk must not end it before it has saved."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from megatron.config.errors import printable
from megatron.files import open_own, open_stream
from megatron.training.logging.writers import Writer


def open_log(path: str) -> TextIO:
    """Opens the file of --log-path to append to it, or a device or a pipe. OSError for a link."""
    stream = open_stream(Path(path))
    return os.fdopen(open_own(path, os.O_APPEND) if stream is None else stream, "w")


class Output:
    """A text stream to which nothing more is written once it has failed. `problem`: why, one sentence."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self._name, self._stream = name, stream
        self.problem: str | None = None

    def write(self, text: str) -> int:
        """Writes and flushes; returns the number of characters, as streams do."""
        if self.problem is None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Nothing is left to do after `write`; for tqdm."""

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The descriptor of the stream, whose width tqdm asks for."""
        return self._stream.fileno()

    def close(self) -> None:
        """Closes the stream."""
        if self.problem is None:
            try:
                self._stream.close()
            except OSError as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.problem = f"WARNING: {self._name} cannot be written ({error}); the run continues without it"
        if self._stream is sys.stdout:
            # What is buffered cannot be written either: without this the exit code would be Python's 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Outputs:
    """The console, the log file and the writers of curves of a run. The failure of one is printed once, on
    the others."""

    def __init__(self, console: Output, log: Output | None, writers: Sequence[Writer]) -> None:
        self.console = console
        self._texts = [console, *([] if log is None else [log])]
        self._writers = list(writers)

    @property
    def has_writers(self) -> bool:
        """Whether anything writes curves."""
        return bool(self._writers)

    def print(self, text: str, print_to_console: Callable[[str], object] | None = None) -> None:
        """Writes a line. print_to_console: called instead of the console's own write."""
        text = printable(text)
        sound = [output for output in self._texts if output.problem is None]
        for output in sound:
            if output is self.console and print_to_console is not None:
                print_to_console(text)
            else:
                output.write(text + "\n")
        for output in sound:
            if output.problem is not None:
                self.print(output.problem, print_to_console)

    def each_writer(self, use: Callable[[Writer], None]) -> None:
        """Calls `use` with every writer; one that fails is not used again."""
        for writer in list(self._writers):
            try:
                use(writer)
            except OSError as error:
                self._writers.remove(writer)
                name = type(writer).__name__
                self.print(f"WARNING: {name} failed ({error}); the run continues without it")

    def close(self) -> None:
        """Closes the writers and the log file. May be called twice."""
        self.each_writer(lambda writer: writer.close())
        self._writers.clear()
        for output in self._texts:
            if output is not self.console:
                output.close()
        self._texts = [self.console]
