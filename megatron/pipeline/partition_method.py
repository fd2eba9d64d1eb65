"""The syntax of `--partition-method`.

    uniform | parameters | memory | time | profile
    type:REGEX[@first|@last][:WEIGHT] | ...     also spelled weighted_type:
    layout:Et*3|(tt|)*29,t|L                     Megatron-LM's pipeline layout strings
    stages:5,6*10,5                              transformer layers per stage; E+5 and 5+L are explicit ends

The methods are implemented in `megatron.pipeline.methods`.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from fractions import Fraction

from megatron.config.registries import PARTITION_METHODS
from megatron.errors import ConfigError

EXAMPLES = {
    "type": "type:embed:2|transformer:1",
    "layout": "layout:Et*3|(tt|)*29,t|L",
    "stages": "stages:5,6*10,5",
}
# Methods without an argument.
WORDS = tuple(name for name in PARTITION_METHODS if name not in EXAMPLES)
# Larger than the number of layers of any pipeline, so that a mistake such as (t*999)*9999 is an error and
# does not exhaust the memory.
_MAX_LAYERS = 100_000
_MAX_DEPTH = 100

_WEIGHT = re.compile(r"[0-9]{1,15}(\.[0-9]{0,15})?|\.[0-9]{1,15}")
_PLACE = re.compile(r"(?P<pattern>.*)@(?P<place>first|last)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Alternative:
    """A part `REGEX[@first|@last][:WEIGHT]`: the weight of all layers whose class or function name matches
    REGEX."""

    text: str
    pattern: str
    weight: Fraction
    place: str = ""
    """'first' or 'last' if only the first or last matching layer has the weight; '' if all have it."""


@dataclass(frozen=True)
class StageContent:
    """The content of one stage in an explicit layout."""

    embedding: bool = False
    transformer_layers: int = 0
    head: bool = False


@dataclass(frozen=True)
class PartitionMethod:
    """The parsed flag. alternatives: set only for the kind 'type'. stages: set only for the kinds 'layout'
    and 'stages'."""

    text: str
    kind: str
    """The name of the method in PARTITION_METHODS."""
    alternatives: tuple[Alternative, ...] = ()
    stages: tuple[StageContent, ...] = ()


def parse_partition_method(text: str) -> PartitionMethod:
    """Parses the flag's value. Raises ConfigError that names the invalid part and shows an example."""
    kind, colon, rest = text.partition(":")
    kind = kind.strip().lower()
    if not colon and kind in WORDS:
        return PartitionMethod(text, kind)
    if colon and kind in ("type", "weighted_type"):
        alternatives = tuple(_alternative(text, part) for part in _split_outside_brackets(rest, "|"))
        return PartitionMethod(text, "type", alternatives=alternatives)
    if colon and kind == "layout":
        return PartitionMethod(text, "layout", stages=_with_ends(text, _layout(text, rest), "layout"))
    if colon and kind == "stages":
        return PartitionMethod(text, "stages", stages=_with_ends(text, _stages(text, rest), "stages"))
    raise ConfigError(
        f"--partition-method is '{text}': expected {', '.join(WORDS)}, or one such as "
        + ", ".join(EXAMPLES.values())
    )


def _error(text: str, problem: str, example: str) -> ConfigError:
    return ConfigError(f"--partition-method {text}: {problem}, as in {EXAMPLES[example]}")


# --- type: ---


def _alternative(text: str, part: str) -> Alternative:
    pattern, *weights = _split_outside_brackets(part, ":")
    if len(weights) > 1:
        raise _error(text, f"'{part}' has more than one weight; expected REGEX:WEIGHT", "type")
    weight = weights[0].strip() if weights else "1"
    if not _WEIGHT.fullmatch(weight):
        raise _error(text, f"the weight '{weight}' of '{part}' is not a non-negative number", "type")
    pattern, place = pattern.strip(), ""
    if placed := _PLACE.fullmatch(pattern):
        pattern, place = placed["pattern"], placed["place"].lower()
    if not pattern or _PLACE.fullmatch(pattern):
        raise _error(text, f"'{part}' has no pattern; expected a part of a layer's name", "type")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # re warns, for example about [[a]
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        raise _error(text, f"'{pattern}' is not a valid regular expression ({error})", "type") from error
    return Alternative(part.strip(), pattern, Fraction(weight), place)


def _split_outside_brackets(text: str, separator: str) -> list[str]:
    """Splits at the separators that are neither escaped nor inside brackets of a regular expression."""
    parts, current, depth, in_set, escaped = [], "", 0, False, False
    for character in text:
        if character == separator and depth == 0 and not in_set and not escaped:
            parts.append(current)
            current = ""
            continue
        if not escaped:
            if in_set:
                in_set = character != "]"
            else:
                in_set = character == "["
                depth += (character == "(") - (character == ")")
        escaped = character == "\\" and not escaped
        current += character
    return [*parts, current]


# --- layout: ---


def _layout(text: str, rest: str) -> list[StageContent]:
    if rest.count("(") > _MAX_DEPTH:
        raise _error(text, f"more than {_MAX_DEPTH} brackets", "layout")
    letters, end = _expand(text, rest, 0)
    if end < len(rest):
        raise _error(text, f"unmatched ')' at position {end + 1}", "layout")
    stages = letters.split("|")
    for letter, what in (("E", "embedding"), ("L", "head")):
        if letters.count(letter) != 1:
            raise _error(text, f"{letters.count(letter)} x {letter}, expected one (the {what})", "layout")
    if not re.fullmatch("Et*L", letters.replace("|", "")):
        raise _error(text, "expected E before every t, and L after them", "layout")
    return [StageContent("E" in stage, stage.count("t"), "L" in stage) for stage in stages]


def _expand(text: str, rest: str, start: int) -> tuple[str, int]:
    """Returns (letters with repeats expanded, position of the end). The end is a ')' or the end of the
    text."""
    letters, position = "", start
    while position < len(rest) and rest[position] != ")":
        character = rest[position]
        if character == "(":
            item, position = _expand(text, rest, position + 1)
            if position == len(rest):
                raise _error(text, "unmatched '('", "layout")
        elif character in "EtL|":
            item = character
        elif character in ", ":
            item = ""
        else:
            if character == "*":
                raise _error(text, f"'*' at position {position + 1} has nothing to repeat", "layout")
            raise _error(
                text,
                f"'{character}' at position {position + 1}: expected E t L | ( ) * or a number",
                "layout",
            )
        position += 1
        if repeat := re.compile(r"\*([0-9]{0,9})").match(rest, position):
            if not repeat[1]:
                raise _error(text, f"'*' at position {position + 1} needs a number", "layout")
            position = repeat.end()
            if len(item) * int(repeat[1]) > _MAX_LAYERS:
                raise _error(text, f"'{repeat[0]}' makes more than {_MAX_LAYERS:,} layers", "layout")
            item *= int(repeat[1])
        letters += item
    return letters, position


# --- stages: ---

_STAGE_ENTRY = re.compile(
    r"(?:(?P<embedding>E)(?: *\+ *(?=[0-9L])|$|(?= *\*)))?(?P<layers>[0-9]{1,9})?"
    r"(?:(?:(?<=[0-9]) *\+ *)?(?<![0-9])(?P<head>L))?(?: *\* *(?P<times>[0-9]{1,9}))?"
)


def _stages(text: str, rest: str) -> list[StageContent]:
    stages: list[StageContent] = []
    for entry in rest.split(","):
        read = _STAGE_ENTRY.fullmatch(entry.strip())
        if read is None or not (read["embedding"] or read["layers"] or read["head"]):
            raise _error(text, f"'{entry}': expected a number of layers, E+5, 5+L, E, L or 6*10", "stages")
        times = 1 if read["times"] is None else int(read["times"])
        if times == 0:
            raise _error(text, f"'{entry}' repeats a stage 0 times", "stages")
        content = StageContent(bool(read["embedding"]), int(read["layers"] or 0), bool(read["head"]))
        if len(stages) + times > _MAX_LAYERS:
            raise _error(text, f"'{entry}' makes more than {_MAX_LAYERS:,} stages", "stages")
        stages += [content] * times
    return stages


def _with_ends(text: str, stages: list[StageContent], example: str) -> tuple[StageContent, ...]:
    """Returns the stages with the embedding on the first and the head on the last one, even if E and L are
    missing."""
    if any(stage.embedding for stage in stages[1:]):
        raise _error(text, "the embedding E can only be on the first stage", example)
    if any(stage.head for stage in stages[:-1]):
        raise _error(text, "the head L can only be on the last stage", example)
    stages[0] = replace(stages[0], embedding=True)
    stages[-1] = replace(stages[-1], head=True)
    return tuple(stages)
