"""Collects the mistakes of a command line and reports them in one error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.errors import ConfigError, UserError

# Line break that aligns the lines of an error with its first line, which begins with "error: ".
_LINE_BREAK = "\n       "
_FLAG_NAME = re.compile(r"--[A-Za-z][\w-]*")


def named_flags(sentence: str) -> set[str]:
    """Returns the flags that a sentence names, with '-' for '_'."""
    return {name.replace("_", "-") for name in _FLAG_NAME.findall(sentence)}


class Mistakes:
    """The mistakes that were found. Each mistake is a sentence. There are no duplicates.

    The value of an invalid or missing flag is unknown. A further sentence that names such a flag is left out,
    because it may be a consequence of the first mistake.
    """

    def __init__(self) -> None:
        self.unknown: set[str] = set()
        """Flags whose values are unknown, with '-' for '_'."""
        self._sentences: dict[str, None] = {}

    def add(self, sentence: str, flags: Iterable[str] = (), is_cause: bool = False) -> None:
        """Adds a mistake, or several mistakes from the text of an error. flags: flags whose values are
        unknown from now on. is_cause: whether the mistake does not depend on the values of the flags that the
        sentence names."""
        for line in sentence.split(_LINE_BREAK):
            if is_cause or self.unknown.isdisjoint(named_flags(line)):
                self._sentences[line] = None
        self.unknown |= {flag.replace("_", "-") for flag in flags}

    def extend(self, sentences: Iterable[str]) -> None:
        """Adds several mistakes."""
        for sentence in sentences:
            self.add(sentence)

    @contextmanager
    def collect(self, flags: Iterable[str] = ()) -> Iterator[None]:
        """Adds the mistake of a UserError that the block raises. flags: see `add`."""
        try:
            yield
        except UserError as error:
            self.add(str(error), flags)

    def raise_all(self) -> None:
        """Raises a ConfigError with a line per mistake, if there is one."""
        if self._sentences:
            raise ConfigError(_LINE_BREAK.join(self._sentences))


def mistakes_of_call(function: Callable[..., Any], *arguments: Any) -> Iterator[str]:
    """Calls a function, and yields the sentence of the ConfigError that it raises, if any."""
    try:
        function(*arguments)
    except ConfigError as error:
        yield str(error)


def indivisible(flag: str, value: int, by_flag: str, divisor: int) -> Iterator[str]:
    """Yields a sentence if the value of a flag is not divisible by the value of another."""
    if value % divisor:
        yield f"{flag} {value} is not divisible by {by_flag} {divisor}: change one of them"


def raise_first(sentences: Iterable[str]) -> None:
    """Raises a ConfigError with the first sentence, if there is one."""
    for sentence in sentences:
        raise ConfigError(sentence)
