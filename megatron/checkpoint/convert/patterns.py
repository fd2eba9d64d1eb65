r"""Patterns of parameter names that come from a file, matched in bounded time.

Megatron programs write regular expressions, but use only a small part of the syntax: literal characters, `.`,
`\d`, `\w`, `[0-9]`, escaped punctuation, each alone or with `+` or `*`, and `^` and `$`. Only that part is
accepted. Matching tracks all positions at once, while Python's `re` may take exponential time.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from megatron.checkpoint.integrity.names import shown
from megatron.files import HostileFileError

_MAX_LENGTH = 300
_TOKEN = re.compile(r"(?P<kind>\\[dw]|\\[^A-Za-z0-9]|\[0-9\]|[A-Za-z0-9_.-])(?P<repeat>[+*]?)")
_CLASSES = {r"\d": "[0-9]", "[0-9]": "[0-9]", r"\w": "[A-Za-z0-9_]", ".": "."}


def check_pattern(pattern: object, source: Path) -> None:
    """Raises HostileFileError that names the file `source`, unless `matches` accepts the pattern."""
    if not isinstance(pattern, str) or _parsed(pattern) is None:
        raise HostileFileError(
            f"{source} has the pattern {shown(pattern)}, expected names of parameters with . \\d+ \\w+ "
            f"[0-9]+ ^ and $, of at most {_MAX_LENGTH} characters"
        )


def matches(pattern: str, name: str) -> bool:
    """Whether the name begins with what the pattern describes; the whole name if the pattern ends with $."""
    parsed = _parsed(pattern)
    if parsed is None:
        raise ValueError(f"pattern {shown(pattern)} is not one that can be matched")
    tokens, to_end = parsed
    places = {0}
    for allowed, repeat in tokens:
        if repeat:
            reached = set(places) if repeat == "*" else set()
            for place, character in enumerate(name):
                if (place in places or place in reached) and allowed.fullmatch(character):
                    reached.add(place + 1)
        else:
            reached = {place + 1 for place in places if allowed.fullmatch(name[place : place + 1])}
        places = reached
        if not places:
            return False
    return len(name) in places if to_end else True


@lru_cache(maxsize=4096)
def _parsed(pattern: str) -> tuple[list[tuple[re.Pattern[str], str]], bool] | None:
    """([(allowed character, repeat)], whether the name must end there); None for an unsupported pattern."""
    if len(pattern) > _MAX_LENGTH:
        return None
    to_end = pattern.endswith("$") and not pattern.endswith("\\$")
    rest = pattern.removeprefix("^")
    rest = rest[:-1] if to_end else rest
    tokens, place = [], 0
    while place < len(rest):
        token = _TOKEN.match(rest, place)
        if token is None:
            return None
        kind = token["kind"]
        one = _CLASSES.get(kind) or re.escape(kind[-1])
        tokens.append((re.compile(one), token["repeat"]))
        place = token.end()
    return tokens, to_end
