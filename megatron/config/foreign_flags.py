"""Reads the flags of other frameworks from foreign_flags.json, only if a command line has an unknown flag or
a DeepSpeed file.

Such a flag is accepted and ignored, replaced by flags of this program, or rejected with the alternative.
docs/migration.md lists all of them. The description of each flag of this program has the values that other
frameworks spell differently (`Flag.spellings`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron.config.config import OPTIONS, SETTINGS
from megatron.config.tool_parser import FLAG


@dataclass(frozen=True)
class IgnoredFlag:
    """A flag that is accepted and has no effect. nargs: as in argparse; 0 for a flag without a value."""

    name: str
    reason: str
    """Why the flag has no effect."""
    nargs: int | str | None = 0
    values: tuple[str, ...] | None = None
    """The values that are accepted; None if all values are."""
    otherwise: str = ""
    """The alternative that the error names for a value that is not accepted, or for a model with experts."""
    only_in_plans: bool = False
    """Whether a run rejects the flag, because it would change the losses. A dry run accepts it."""
    only_without_experts: bool = False
    """Whether a model with experts rejects the flag."""
    is_deprecated: bool = False
    """Whether earlier versions of this program had the flag."""

    @property
    def has_conditions(self) -> bool:
        """Returns whether the flag is rejected with some values or other flags."""
        return bool(self.values or self.only_in_plans or self.only_without_experts)

    @property
    def note(self) -> str:
        """Returns the note in the log of a run with this flag."""
        return f"{self.name} is {'deprecated and ' * self.is_deprecated}ignored: {self.reason}"


@dataclass(frozen=True)
class ForeignFlags:
    """The content of foreign_flags.json.

    ignored: name of a flag -> the flag. rewritten: name of a flag -> words that replace it; a value after the
    flag follows the last word. unsupported: name of a flag, or beginning of names with '*' -> the
    alternative. deepspeed_keys: key of DeepSpeed's file that is rejected -> the alternative.
    """

    ignored: Mapping[str, IgnoredFlag]
    rewritten: Mapping[str, tuple[str, ...]]
    unsupported: Mapping[str, str]
    deepspeed_keys: Mapping[str, str]

    def alternative(self, name: str) -> tuple[str | None, str]:
        """Returns (alternative, beginning of the name) for an unsupported flag. The alternative is None for a
        flag that is in no table. The beginning is "" unless only the beginning of the flag's name is in the
        table."""
        spelled = "--" + name.lstrip("-").replace("_", "-")
        if spelled in self.unsupported:
            return self.unsupported[spelled], ""
        begins = [key for key in self.unsupported if key[-1] == "*" and spelled.startswith(key[:-1])]
        family = max(begins, key=len, default="")
        return self.unsupported.get(family), family.rstrip("*")


@cache
def foreign_flags() -> ForeignFlags:
    """Returns the flags of other frameworks."""
    table = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    ignored = []
    for how in table["ignored"]:
        names, values = _words(how.pop("flags")), how.pop("values", None)
        accepted = None if values is None else tuple(values.split())
        ignored += [IgnoredFlag(name, values=accepted, **how) for name in names]
    return ForeignFlags(
        {flag.name: flag for flag in ignored},
        {name: tuple(words.split()) for name, words in table["rewritten"].items()},
        {name: instead for instead, names in table["unsupported"].items() for name in _words(names)},
        table["deepspeed_keys"],
    )


def _words(lines: Sequence[str]) -> list[str]:
    return " ".join(lines).split()


def has_foreign_flags(words: Sequence[str]) -> bool:
    """Returns whether a command line has flags that this program does not have."""
    return any(FLAG.match(word) and word.partition("=")[0] not in OPTIONS for word in words)


def rewrite(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words of a command line with flags and values of other frameworks replaced, and a note for
    each replacement. A flag with an impossible value is not replaced, so that the parser rejects it."""
    words, notes = _with_own_values(words)
    if not has_foreign_flags(words):
        return words, notes
    given = {word.partition("=")[0] for word in words}
    if "--swiglu" in words and "--ffn-hidden-size" not in given:
        words += _swiglu_size(words)
    result: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        stands_for = foreign_flags().rewritten.get(name)
        if stands_for is None or (equals and not stands_for[-1].startswith("--")):
            result.append(word)
        elif stands_for[-1].startswith("--"):
            result += [*stands_for[:-1], stands_for[-1] + equals + value]
            notes.append(f"{name} is read as {' '.join(stands_for)}")
        elif stands_for[0] in given:
            notes.append(f"{name} is ignored: {stands_for[0]} is given")
        else:
            result += stands_for
            notes.append(f"{name} is read as {' '.join(stands_for)}")
    return result, list(dict.fromkeys(notes))


def _with_own_values(words: Sequence[str]) -> tuple[list[str], list[str]]:
    result, notes, flag = list[str](), list[str](), ""
    for word in words:
        name, equals, value = word.partition("=") if word.startswith("--") else (flag, "", word)
        spellings = SETTINGS[OPTIONS[name]].flag.spellings if name in OPTIONS else {}
        if (instead := spellings.get(value)) is not None:
            notes.append(f"{name} {value} is read as {name} {instead}")
            word = f"{name}={instead}" if equals else instead
        result.append(word)
        flag = word if word.startswith("--") else ""
    if any("HuggingFaceTokenizer" in note for note in notes):  # its tokenizer model is a folder or a name
        given = result
        result = [re.sub("^--tokenizer-model(?==|$)", "--tokenizer-name-or-path", word) for word in given]
        notes += ["--tokenizer-model is read as --tokenizer-name-or-path"] * (result != given)
    return result, notes


def _swiglu_size(words: Sequence[str]) -> list[str]:
    """Returns --ffn-hidden-size with the default of Megatron-LM's and Microsoft's --swiglu: 8/3 of the hidden
    size, rounded down to a multiple of 64; [] if the hidden size is not given as a number."""
    sizes = re.findall(r"(?<!\S)--hidden-size[ =](\d+)(?!\S)", " ".join(words))
    return ["--ffn-hidden-size", str(int((4 * int(sizes[-1]) * 2 / 3) / 64) * 64)] if sizes else []
