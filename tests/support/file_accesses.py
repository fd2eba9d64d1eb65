"""Counts the interpreter's requests to the file system during a block of a test: opens, lists, stats."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock


@dataclass
class Accesses:
    """Number of accesses to a folder and to paths inside it. opened: file name -> how often the file was
    opened."""

    folder: str
    opened: Counter[str] = field(default_factory=Counter)
    listed: int = 0
    stats: int = 0

    def _is_inside(self, path: object) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.folder)

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """Counts an audit event of the interpreter."""
        if event == "open" and self._is_inside(arguments[0]):
            self.opened[os.path.basename(str(arguments[0]))] += 1
        elif event in ("os.listdir", "os.scandir") and self._is_inside(arguments[0]):
            self.listed += 1


_ACTIVE: list[Accesses] = []


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    for accesses in _ACTIVE:
        accesses.audit(event, arguments)


@contextmanager
def file_accesses(folder: Path) -> Iterator[Accesses]:
    """Counts how often the block accesses the folder and paths inside it."""
    if not getattr(sys, "_counts_file_accesses", False):  # audit hooks stay forever
        sys.addaudithook(_audit)
        sys._counts_file_accesses = True  # type: ignore[attr-defined]
    accesses = Accesses(str(folder))

    def counting(function):
        def counted(path, *args, **kwargs):
            accesses.stats += accesses._is_inside(path)
            return function(path, *args, **kwargs)

        return counted

    _ACTIVE.append(accesses)
    try:
        with mock.patch("os.stat", counting(os.stat)), mock.patch("os.lstat", counting(os.lstat)):
            yield accesses
    finally:
        _ACTIVE.remove(accesses)
