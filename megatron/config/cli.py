"""The command line: flags made from the fields of the config sections, and answers to misspelt ones."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from megatron.config.checks.unused import remarks
from megatron.config.checks.validate import validate
from megatron.config.config import SECTIONS, Config
from megatron.config.deprecated import OLD_FLAGS
from megatron.config.errors import ConfigError
from megatron.config.fields import Flag, flag_of, option_name
from megatron.config.parsing.split import SPLIT_NAMES
from megatron.config.parsing.weighted_paths import read_groups_file

# Megatron's names and order of the groups of --help, and one of ours.
HELP_GROUPS = (
    "network size",
    "regularization",
    "training",
    "trouble",
    "initialization",
    "learning rate",
    "checkpointing",
    "mixed precision",
    "distributed",
    "validation",
    "data and dataloader",
    "logging",
)


@dataclass(frozen=True)
class CommandLine:
    """A parsed and validated command line. notes: what the user should read once, one sentence each."""

    config: Config
    notes: tuple[str, ...]


def read_command_line(argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> CommandLine:
    """Parse and validate argv (None: sys.argv[1:]); ConfigError for everything that cannot be run."""
    argv = list(sys.argv[1:] if argv is None else argv)
    given = _parse(argv)
    _take_launcher_settings(given.settings, env)
    _take_groups_files(given.settings)
    _require_all(given.settings)
    config = Config(**{name: kind(**_part_of(given.settings, name)) for name, kind in SECTIONS.items()})
    validate(config)
    return CommandLine(config, (*_legacy_notes(given.old), *given.repeated, *remarks(config)))


def parse_args(argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> Config:
    """The config of `read_command_line`, without the notes."""
    return read_command_line(argv, env).config


def legacy_flags_used(argv: Sequence[str] | None = None) -> tuple[str, ...]:
    """One sentence for each flag in argv that is accepted and has nothing left to do."""
    return _legacy_notes(_parse(list(sys.argv[1:] if argv is None else argv)).old)


def _legacy_notes(old: frozenset[str]) -> tuple[str, ...]:
    return tuple(
        f"{flag.name} has nothing left to do: {flag.reason}" for flag in OLD_FLAGS if flag.name in old
    )


def make_parser() -> argparse.ArgumentParser:
    """The parser; only flags that were given appear in its result, under 'section.field' or '--old-flag'."""
    parser = _Parser(
        prog="pretrain_gpt.py",
        usage="%(prog)s FLAGS",
        description="Train a GPT with tensor, pipeline and data parallelism.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
    )
    groups = {title: parser.add_argument_group(title) for title in HELP_GROUPS}
    for section, kind in SECTIONS.items():
        types = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            group = groups[flag_of(field).group or kind.group]
            _add_field(group, f"{section}.{field.name}", field, types[field.name])
    _add_old_flags(parser)
    return parser


class _Parser(argparse.ArgumentParser):
    """argparse says what is wrong by printing its usage and exiting; here it is a ConfigError."""

    def error(self, message: str) -> NoReturn:
        names, colon, complaint = message.removeprefix("argument ").partition(": ")
        if not colon:
            raise ConfigError(f"{message}: see --help")
        raise ConfigError(f"{names.split('/')[0]}: {complaint}; see --help")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


@dataclass(frozen=True)
class _Given:
    """What was given: settings by 'section.field', old flags by name, notes on repeated flags."""

    settings: dict[str, Any]
    old: frozenset[str]
    repeated: tuple[str, ...]


def _parse(argv: list[str]) -> _Given:
    parser = make_parser()
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(_unknown_argument(parser, unknown))
    values = vars(namespace)
    old = frozenset(flag.name for flag in OLD_FLAGS if flag.name in values)
    settings = {name: value for name, value in values.items() if name not in old and name != _REPEATED}
    return _Given(settings, old, tuple(values.get(_REPEATED, ())))


def _unknown_argument(parser: argparse.ArgumentParser, unknown: list[str]) -> str:
    word = unknown[0]
    if not word.startswith("-"):
        return f"'{word}' belongs to no flag: quote a value that holds spaces, or see --help"
    name = word.split("=")[0]
    nearest = difflib.get_close_matches(
        "--" + name.lstrip("-").replace("_", "-"), parser._option_string_actions, n=1
    )
    return f"{name} is no flag: " + (f"did you mean {nearest[0]}?" if nearest else "see --help")


_REPEATED = "(repeated)"


class _Store(argparse.Action):
    """Stores the converted value; of a flag that comes again the last value counts, and a note says so."""

    def __init__(self, *, convert: _Converter, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.convert = convert

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        value = self.convert(values)
        before = getattr(namespace, self.dest, value)
        if before != value:
            notes = getattr(namespace, _REPEATED, ())
            note = f"{option} is given more than once: the last value, {_shown(value)}, counts"
            setattr(namespace, _REPEATED, (*notes, note))
        setattr(namespace, self.dest, value)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class _Converter:
    """Makes the value of one field from the words on the command line."""

    option: str
    kind: type[Any]
    strip_quotes: bool

    def __call__(self, words: str | Sequence[str]) -> Any:
        if isinstance(words, str):
            return self._one(words)
        return tuple(self._one(word) for word in words)

    def _one(self, word: str) -> Any:
        if self.strip_quotes:
            word = word.strip("'\"")
        if not word:
            raise ConfigError(f"{self.option} is empty: give it a value (is a shell variable unset?)")
        if self.kind is str:
            return word
        try:
            return self.kind(word)
        except ValueError:
            expected = "a whole number" if self.kind is int else "a number"
            raise ConfigError(f"{self.option} is '{word}': expected {expected}") from None


def _switch(option: str, word: str) -> bool:
    """The value of a switch that old scripts give one: it is on."""
    if word.lower() not in ("1", "true"):
        raise ConfigError(f"{option} is '{word}': expected no value, or 1; leave the flag out to turn it off")
    return True


def _add_field(group: Any, dest: str, field: dataclasses.Field[Any], annotation: Any) -> None:
    description = flag_of(field)
    names = (option_name(field.name), *description.aliases)
    text = _help_text(field, description)
    kind = _value_type(annotation)
    if kind is bool and description.metavar is not None:
        group.add_argument(
            *names,
            dest=dest,
            action=_Store,
            convert=partial(_switch, names[0]),
            nargs="?",
            const="1",
            metavar=description.metavar,
            help=text,
        )
        return
    if kind is bool:
        group.add_argument(*names, dest=dest, action="store_true", default=argparse.SUPPRESS, help=text)
        return
    metavar = description.metavar or (
        "{" + ",".join(description.choices) + "}" if description.choices else None
    )
    group.add_argument(
        *names,
        dest=dest,
        action=_Store,
        convert=_Converter(names[0], kind, description.strip_quotes),
        nargs=description.nargs,
        metavar=metavar or {int: "N", float: "X", str: "TEXT"}[kind],
        help=text,
    )


def _value_type(annotation: Any) -> type[Any]:
    """The type of one value: of `int | None` and of `tuple[int, int, int] | None` it is int."""
    arguments = [part for part in typing.get_args(annotation) if part not in (type(None), Ellipsis)]
    return _value_type(arguments[0]) if arguments else annotation


def _help_text(field: dataclasses.Field[Any], description: Flag) -> str:
    text = description.help.replace("%", "%%")
    if description.derived is not None:
        return f"{text} (default: {description.derived})"
    if field.default is dataclasses.MISSING:
        return f"{text} (required)"
    if field.default is None or field.default is False or field.default == ():
        return text
    return f"{text} (default: {_shown(field.default)})"


def _add_old_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("old flags with nothing left to do (accepted and reported)")
    for old in OLD_FLAGS:
        if old.nargs == 0:
            group.add_argument(*old.names, dest=old.name, action="store_true", help=old.reason)
        else:
            group.add_argument(
                *old.names,
                dest=old.name,
                nargs=old.nargs,
                metavar=old.metavar,
                choices=old.choices,
                help=old.reason,
            )


def _take_launcher_settings(settings: dict[str, Any], env: Mapping[str, str]) -> None:
    """Fill in the world size and the local rank that the launcher left in the environment."""
    if "parallel.local_rank" not in settings and "LOCAL_RANK" in env:
        settings["parallel.local_rank"] = _launcher_number(env, "LOCAL_RANK")
    started = _launcher_number(env, "WORLD_SIZE") if "WORLD_SIZE" in env else 1
    planned = settings.setdefault("parallel.world_size", started)
    if planned != started and not settings.get("training.dry_run"):
        raise ConfigError(
            f"--world-size {planned} with {started} started process(es) (WORLD_SIZE): "
            "drop --world-size, or add --dry-run to plan for that many"
        )


def _take_groups_files(settings: dict[str, Any]) -> None:
    """Fill in the groups of weighted paths from the files that hold them; a dry run can do without the
    files."""
    for name in SPLIT_NAMES:
        groups = f"data.{name}_weighted_split_paths"
        option = option_name(f"{name}_weighted_split_paths_path")
        file = settings.get(f"{groups}_path")
        if file is None:
            continue
        if groups in settings:
            raise ConfigError(f"{option} {file} and {option.removesuffix('-path')} are both given: drop one")
        if os.path.exists(file) or not settings.get("training.dry_run"):
            settings[groups] = read_groups_file(option, file)


def _launcher_number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} is '{env[name]}': expected the whole number that a launcher "
            "sets"
        ) from None


def _require_all(settings: dict[str, Any]) -> None:
    missing = [
        f"{option_name(field.name)} ({flag_of(field).help.split(':')[0]})"
        for section, kind in SECTIONS.items()
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and f"{section}.{field.name}" not in settings
    ]
    if missing:
        raise ConfigError(f"missing: {', '.join(missing)}")


def _part_of(settings: dict[str, Any], section: str) -> dict[str, Any]:
    prefix = section + "."
    return {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}
