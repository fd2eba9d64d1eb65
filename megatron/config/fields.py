"""The description of a command-line flag in a dataclass field, and the base class of the config sections.

A section uses `flag(default, help=...)` instead of `dataclasses.field`. The function stores metadata, from
which flag_parser.py generates the parser. Bounds and choices are checked whenever a section is constructed,
not only by the parser.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.registry import Registry
from megatron.errors import ConfigError

# Title of the first help group.
COMMON_FLAGS = "flags that most runs set"
_METADATA_KEY = "flag"
# Metavars of flags that are paths, and the maximum lengths of paths in bytes: Linux's limits minus the length
# of a suffix.
_PATHS = ("FOLDER", "FILE", "PREFIX")
_LONGEST_NAME, _LONGEST_PATH = 240, 4000


@dataclass(frozen=True)
class Flag:
    """What the command line and the checks know about a field in addition to its name, type and default.

    help: what the flag does; lines after the first one describe its choices. group: title of the group in
    --help (None: the section's `group`). derived: text about a default that the section's `derive` computes
    from other fields; the field of a constructed section is then never None. at_least, above, at_most, below:
    bounds of the number, or of each number of a tuple.

    choices: the possible values. registry: registry whose choices --help describes (default: `choices`, if
    they are a Registry). spellings: value in another framework -> this program's value. rejected: value in
    another framework -> the alternative. several: end of the error about more than one value, for a flag that
    takes several values in another framework.

    Rules between this field and other settings use conditions: 'section.field', 'section.field=value', or
    several of these with '|' between them. 'section.field' holds if the setting is not at its default (see
    `config.rules`). needs: conditions without which the flag is rejected -> reason, or "". excludes:
    conditions with which the flag is rejected -> reason. The error ends with a remedy, unless the reason has
    one. used_with: the flag has an effect only if one of these conditions holds. unused_with: the flag has no
    effect if one of these conditions holds.

    changes_model: whether the value determines the function that the weights compute, or their shapes (None:
    the section's `changes_model`). A run then rejects checkpoints with a different value, and an export to
    Hugging Face rejects a value that the architecture cannot express. summary: text for one-line summaries of
    the model, with {} for the value; it is used if the value is not the default. summarizes_default: whether
    the summaries have the default, too.

    changes_layer_time (for fields of ModelConfig): whether the time of a layer depends on the value. A run
    then rejects a --partition-profile that was measured with a different value.
    """

    help: str
    _: dataclasses.KW_ONLY
    group: str | None = None
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] | Registry | None = None
    registry: Registry | None = None
    spellings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rejected: Mapping[str, str] = dataclasses.field(default_factory=dict)
    several: str = ""
    metavar: str | tuple[str, ...] | None = None
    nargs: int | str | None = None
    derived: str | None = None
    strip_quotes: bool = False
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    needs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    excludes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    used_with: tuple[str, ...] = ()
    unused_with: tuple[str, ...] = ()
    changes_model: bool | None = None
    summary: str | None = None
    summarizes_default: bool = False
    changes_layer_time: bool = True

    def __post_init__(self) -> None:
        if self.registry is None and isinstance(self.choices, Registry):
            object.__setattr__(self, "registry", self.choices)


def flag(default: Any = dataclasses.MISSING, **description: Any) -> Any:
    """Returns a dataclass field that is a flag. Without a default the flag is required. description: fields
    of `Flag`."""
    metadata = Flag(**description)
    default = None if metadata.derived is not None else default
    return dataclasses.field(default=default, metadata={_METADATA_KEY: metadata})


def flag_of(field: dataclasses.Field[Any]) -> Flag:
    """Returns the metadata that `flag` stored in a field."""
    description: Flag = field.metadata[_METADATA_KEY]
    return description


def option_name(field_name: str) -> str:
    """Returns the flag of a field: `num_layers` -> `--num-layers`."""
    return "--" + field_name.replace("_", "-")


def value_text(value: Any) -> str:
    """Returns a value as it is written on the command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def setting_option(setting: str) -> str:
    """Returns the flag of a 'section.field'."""
    return option_name(setting.partition(".")[2])


class InvalidSettings(ConfigError):
    """The error of a section with invalid values. mistakes: field -> sentence."""

    def __init__(self, mistakes: Mapping[str, str]) -> None:
        super().__init__(next(iter(mistakes.values())))
        self.mistakes = mistakes


@dataclass(frozen=True, kw_only=True)
class Section:
    """Base class of the config sections. Its constructor checks bounds and choices, then computes derived
    defaults."""

    group: ClassVar[str]
    changes_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        mistakes: dict[str, str] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and (found := _mistake(field, value)) is not None:
                mistakes[field.name] = found
        if not mistakes:
            for name, value in self.derive().items():
                if isinstance(value, ConfigError):
                    mistakes[name] = str(value)
                object.__setattr__(self, name, value)
        if mistakes:
            raise InvalidSettings(mistakes)

    def chosen_settings(self) -> set[str]:
        """Returns the fields that the chosen values list in `Choice.settings`: these fields have an
        effect."""
        return {name for registry, value in self.choices_made() for name in registry[value].settings}

    def unused_fields(self) -> set[str]:
        """Returns the fields that have no effect with the values of the section, by `Choice.settings` of
        choices that are not chosen, and by `Flag.unused_with`."""
        unused = {name for registry, value in self.choices_made() for name in registry.unused_settings(value)}
        for field in dataclasses.fields(self):
            if any(self.holds(condition) for condition in flag_of(field).unused_with):
                unused.add(field.name)
        return unused

    def holds(self, condition: str) -> bool:
        """Returns whether a condition of `Flag` (without '|') holds. Returns False for a field of a different
        section. 'section.field': the value is neither the default nor off. 'section.field=value': the setting
        has this value."""
        name, equals, wanted = condition.partition(".")[2].partition("=")
        field = self.__dataclass_fields__.get(name)
        if field is None:
            return False
        value = getattr(self, name)
        return str(value) == wanted if equals else value not in (None, False, (), field.default)

    def choices_made(self) -> Iterator[tuple[Registry[Any], str]]:
        """Yields the registries of the section's settings, each with the chosen name."""
        for field in dataclasses.fields(self):
            choices, value = flag_of(field).choices, getattr(self, field.name)
            if isinstance(choices, Registry) and value is not None:
                yield choices, value

    def derive(self) -> dict[str, Any]:
        """Returns field -> derived default, or the ConfigError of a field whose default cannot be derived.
        The constructor calls it once."""
        return {}


def _mistake(field: dataclasses.Field[Any], value: Any) -> str | None:
    """Returns why a field cannot have this value; None if it can."""
    choices = flag_of(field).choices
    for one in value if isinstance(value, tuple) else (value,):
        if isinstance(one, str) and (instead := flag_of(field).rejected.get(one)):
            return f"{option_name(field.name)} {one} is not supported: {instead}"
        if choices is not None and one not in choices:
            return f"{option_name(field.name)} is '{one}': expected one of {', '.join(choices)}"
    return _wrong_bounds(field, value) or _too_long_path(field, value)


def _too_long_path(field: dataclasses.Field[Any], value: Any) -> str | None:
    """Returns a sentence if a path is too long; None if it is not. System calls would report this only later,
    with various errors."""
    if flag_of(field).metavar not in _PATHS:
        return None
    for path in value if isinstance(value, tuple) else (value,):
        names = [os.fsencode(name) for name in str(path).split("/")]
        if max(map(len, names)) > _LONGEST_NAME or sum(map(len, names)) + len(names) > _LONGEST_PATH:
            return (
                f"{option_name(field.name)} {str(path)[:40]}... is too long: expected names of at most "
                f"{_LONGEST_NAME} bytes, and {_LONGEST_PATH:,} in all: set a shorter path"
            )
    return None


def bounds_of(description: Flag) -> Iterator[tuple[str, str, float, Callable[[Any, Any], bool]]]:
    """Yields (words, sign, bound, function that compares a number with the bound) for each bound of a
    flag."""
    for words, sign, bound, holds in (
        ("at least", "≥", description.at_least, operator.ge),
        ("more than", ">", description.above, operator.gt),
        ("at most", "≤", description.at_most, operator.le),
        ("less than", "<", description.below, operator.lt),
    ):
        if bound is not None:
            yield words, sign, bound, holds


def _wrong_bounds(field: dataclasses.Field[Any], value: Any) -> str | None:
    description = flag_of(field)
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            continue
        if not math.isfinite(number):
            return f"{option_name(field.name)} is {number}: expected a finite number"
        for words, _, bound, holds in bounds_of(description):
            if not holds(number, bound):
                remedy = " or remove it" * (field.default is not dataclasses.MISSING)
                sentence = f"{option_name(field.name)} is {number}: expected {words} {bound}"
                return f"{sentence}; set such a number{remedy}"
    return None
