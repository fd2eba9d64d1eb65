"""Blends of token files: --data-path, and the groups of the --*-weighted-split-paths flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from megatron.errors import ConfigError

GROUP_FORM = "'NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX, ...'"
_MAX_FILE_BYTES = 1 << 23


@dataclass(frozen=True)
class WeightedPath:
    """The documents of one prefix between the fractions `start` and `end`, with their weight in a blend."""

    weight: Fraction
    prefix: str
    start: float = 0.0
    end: float = 1.0


@dataclass(frozen=True)
class PathGroup:
    """A blend, and the name under which it is logged."""

    name: str
    paths: tuple[WeightedPath, ...]


def parse_data_path(words: Sequence[str]) -> tuple[WeightedPath, ...]:
    """Parse one prefix, or alternating weights and prefixes: ('0.3', 'A', '0.7', 'B'). Raises ConfigError."""
    if len(words) == 1:
        return (WeightedPath(Fraction(1), words[0]),)
    form = "expected one prefix, or alternating weights and prefixes, such as 0.3 A 0.7 B"
    if not words or len(words) % 2:
        raise ConfigError(f"--data-path has {len(words)} values: {form}")
    return tuple(
        WeightedPath(_weight(weight, f"--data-path {' '.join(words)}", form), prefix)
        for weight, prefix in zip(words[::2], words[1::2], strict=True)
    )


def parse_groups(option: str, texts: Sequence[str]) -> tuple[PathGroup, ...]:
    """Parse the groups of one flag, each in the form GROUP_FORM. ConfigError quotes an invalid group."""
    groups = tuple(_parse_group(option, text) for text in texts)
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{option} has {names.count(name)} groups named '{name}': give each its own name"
            )
    return groups


def read_groups_file(option: str, file: str) -> tuple[str, ...]:
    """The groups in a file, each in double quotes, unparsed. ConfigError if the file cannot be read."""
    path = Path(file)
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES):
            raise ConfigError(
                f"{option}: {file} is not a regular file of {_MAX_FILE_BYTES:,} bytes at most: correct it"
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{option}: there is no file {file}: correct the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {file} cannot be read ({error})") from None
    try:
        groups = tuple(shlex.split(text))
    except ValueError:
        groups = ()  # unbalanced quotes
    if not groups:
        raise ConfigError(
            f"{option}: {file} contains {_shortened(text.strip())}: expected groups, each in double "
            f"quotes, in the form {GROUP_FORM[1:-1]}"
        )
    return groups


def _parse_group(option: str, text: str) -> PathGroup:
    where = f"{option} {_shortened(text)}"
    name, colon, paths = text.partition(":")
    name = name.strip()
    if not colon or not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(
            f"{where}: expected {GROUP_FORM}, with a name of letters, digits, '_', '-' and '.', in one "
            "pair of quotes"
        )
    return PathGroup(name, tuple(_parse_path(where, path.strip()) for path in paths.split(",")))


def _parse_path(where: str, text: str) -> WeightedPath:
    words = text.split()
    form = "expected WEIGHT START:END PREFIX, separated by commas"
    if len(words) != 3:
        raise ConfigError(f"{where}: '{text}' has {len(words)} words, {form}")
    weight = _weight(words[0], f"{where}: '{text}'", form)
    try:
        start, end = (float(bound) for bound in words[1].split(":"))
    except ValueError:
        start, end = 0.0, 0.0
    if not 0 <= start < end <= 1:
        raise ConfigError(
            f"{where}: the range '{words[1]}' of {words[2]}: expected START:END, fractions of its documents "
            "from 0 to 1 with START below END, such as 0:0.95"
        )
    return WeightedPath(weight, words[2], start, end)


def _weight(word: str, where: str, form: str) -> Fraction:
    try:
        weight = Fraction(word)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{where}: the weight '{word}' is not a number, {form}") from None
    if weight <= 0:
        raise ConfigError(f"{where}: the weight {word} is not above 0: omit data that is not used")
    return weight


def _shortened(text: str) -> str:
    """The text in quotes, truncated if it is long (a blend of 50 languages)."""
    return f"'{text}'" if len(text) <= 120 else f"'{text[:117]}...'"
