"""The parser of the command line, generated from the config sections."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.config.config import OPTIONS, SETTINGS, Setting
from megatron.config.fields import COMMON_FLAGS, Flag, value_text
from megatron.config.foreign_flags import IgnoredFlag, foreign_flags, has_foreign_flags, rewrite
from megatron.config.mistakes import Mistakes
from megatron.config.tool_parser import FLAG, CollectingParser, near_flags, typed_name, unknown_flag
from megatron.errors import ConfigError, one_line

# The groups of flags in --help: the common flags, then Megatron-LM's groups in Megatron-LM's order, and
# 'stability'.
HELP_GROUPS = (
    COMMON_FLAGS,
    "network size",
    "rotary embeddings",
    "attention variants",
    "latent attention",
    "mixture of experts",
    "multi-token prediction",
    "regularization",
    "training",
    "stability",
    "initialization",
    "learning rate",
    "checkpointing",
    "mixed precision",
    "distributed",
    "validation",
    "data and dataloader",
    "logging",
)


def make_parser() -> CollectingParser:
    """Returns the parser. A parsed command line has the given flags under 'section.field'."""
    parser = _Parser(
        prog=typed_name("pretrain_gpt.py"),
        usage="%(prog)s FLAGS",
        description="Trains a GPT with tensor, pipeline and data parallelism. Documentation: docs/README.md.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
    )
    groups = {title: parser.add_argument_group(title) for title in HELP_GROUPS}
    for name, setting in SETTINGS.items():
        _add_setting(groups[setting.group], name, setting)
    return parser


class _Parser(CollectingParser):
    """A parser that also knows the flags of other frameworks. It adds these flags only for a command line
    that has one, and for --help."""

    knows_foreign_flags = False

    def rejection(self, message: str) -> str:
        names, colon, complaint = message.removeprefix("argument ").partition(": ")
        option = names.split("/")[0]
        if complaint.startswith(option):  # of a `_Converter`
            return complaint
        return f"{option}: {complaint}; see --help" if colon else f"{message}: see --help"

    def unknown_flag(self, name: str) -> str:
        if (stands_for := foreign_flags().rewritten.get(name)) is not None:
            return f"{name} takes no value; it is read as {' '.join(stands_for)}"
        near = near_flags(name, self._option_string_actions.keys() - foreign_flags().ignored.keys())
        instead, family = foreign_flags().alternative(name)
        # A misspelt flag of this program may begin with the name of an unsupported family such as --moe-*.
        if instead and not (family and near and near[0].startswith(family)):
            return f"{name} is not supported: {instead}"
        return unknown_flag(name, near)

    def check_values(self, parsed: argparse.Namespace, mistakes: Mistakes) -> None:
        values = vars(parsed)
        for flag in self._ignored_in(values):
            value, name = values[flag.name], flag.name
            if flag.values is not None and value not in flag.values:
                instead = f"; {flag.otherwise}" if flag.otherwise else ""
                mistakes.add(f"{name} is '{value}': expected {' or '.join(flag.values)}{instead}")
            if flag.only_in_plans and not values.get("training.dry_run"):
                mistakes.add(f"{name} is not supported: {flag.reason}")
            if flag.only_without_experts and _may_have_experts(values):
                mistakes.add(f"{name} is not supported: {flag.otherwise}")

    def collect(self, words: Sequence[str], mistakes: Mistakes) -> argparse.Namespace:
        words, notes = rewrite(words)
        words = _join_values(words, _WITH_LISTS_ELSEWHERE)
        if has_foreign_flags(words):
            flags = foreign_flags().ignored.values()
            words = _join_values(words, {flag.name for flag in flags if flag.values is not None})
            if not self.knows_foreign_flags:
                self.knows_foreign_flags = True
                _add_ignored_flags(self)
        namespace = super().collect(words, mistakes)
        values = vars(namespace)
        ignored = self._ignored_in(values)
        for flag in ignored:
            del values[flag.name]
        values[NOTES] = (*(flag.note for flag in ignored), *values.get(NOTES, ()), *notes)
        return namespace

    def _ignored_in(self, values: Mapping[str, Any]) -> list[IgnoredFlag]:
        flags = foreign_flags().ignored.values() if self.knows_foreign_flags else ()
        return [flag for flag in flags if flag.name in values]


def _may_have_experts(settings: Mapping[str, Any]) -> bool:
    """Returns whether the given flags define a model with experts, or may take such a model from a
    checkpoint."""
    from_checkpoint = {"checkpoint.use_checkpoint_args", "checkpoint.load_huggingface"} & settings.keys()
    return bool(from_checkpoint) or settings.get("model.num_experts", 1) != 1


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _split_lines(self, text: str, width: int) -> list[str]:
        wrap = partial(textwrap.wrap, width=width, break_on_hyphens=False)  # flags stay on one line
        text, *choices = text.splitlines()
        return [*wrap(text), *(line for choice in choices for line in wrap(choice, subsequent_indent="    "))]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = partial(textwrap.wrap, width=width, break_on_hyphens=False, initial_indent=indent)
        lines = (wrap(line, subsequent_indent=f"{indent}    ") for line in text.splitlines())
        return "\n".join("\n".join(line) for line in lines)


_WITH_LISTS_ELSEWHERE = {option for option, name in OPTIONS.items() if SETTINGS[name].flag.several}


def _join_values(argv: Sequence[str], flags: Collection[str]) -> list[str]:
    """Returns the command line with each of `flags` joined with all words up to the next flag: '--flag=a b'.
    The error about surplus values then names this flag."""
    words: list[str] = []
    for word in argv:
        if words and word and not FLAG.match(word) and words[-1].partition("=")[0] in flags:
            words[-1] += (" " if "=" in words[-1] else "=") + word
        else:
            words.append(word)
    return words


NOTES = "(notes)"
"""Name under which a parsed command line has its notes."""


class _Store(argparse.Action):
    """An argparse action that stores the converted value. The last value of a repeated flag is used, with a
    note."""

    def __init__(self, *, convert: _Converter, choices: Iterable[str] | None = None, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.convert = convert
        if choices is not None:
            self.completer = lambda **_: choices  # argcomplete reads it; argparse would check `self.choices`

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        try:
            value = self.convert(values)
        except ConfigError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        before = getattr(namespace, self.dest, value)
        if before != value:
            notes = getattr(namespace, NOTES, ())
            note = f"{option} is given more than once: the last value, {value_text(value)}, is used"
            setattr(namespace, NOTES, (*notes, note))
        setattr(namespace, self.dest, value)


@dataclass(frozen=True)
class _Converter:
    """A function that converts the words of a command line to the value of one field."""

    option: str
    kind: type[Any]
    flag: Flag

    def __call__(self, words: str | Sequence[str]) -> Any:
        if isinstance(words, str):
            return self._one(words)
        return tuple(self._one(word) for word in words)

    def _one(self, word: str) -> Any:
        if self.flag.strip_quotes:
            word = word.strip("'\"")
        if not word:
            raise ConfigError(f"{self.option} is empty: give a value (is a shell variable unset?)")
        if self.flag.several and len(word.split()) > 1:
            raise ConfigError(
                f"{self.option} is '{one_line(word, 60)}': expected one value; {self.flag.several}"
            )
        if self.kind is str:
            return word
        try:
            return self.kind(word)
        except ValueError:
            expected = "an integer" if self.kind is int else "a number"
            raise ConfigError(f"{self.option} is '{word}': expected {expected}") from None


def _switch(option: str, word: str) -> bool:
    """Returns True for a switch. Old scripts set some switches with the value 1, which is accepted."""
    if word.lower() not in ("1", "true"):
        raise ConfigError(f"{option} is '{word}': expected no value, or 1; remove the flag to turn it off")
    return True


def _add_setting(group: Any, dest: str, setting: Setting) -> None:
    flag, names, kind = setting.flag, setting.options, setting.kind
    text = _help_text(setting)
    how: dict[str, Any] = {"action": "store_true", "default": argparse.SUPPRESS}
    if kind is bool and flag.metavar is not None:
        convert = partial(_switch, names[0])
        how = {"action": _Store, "convert": convert, "nargs": "?", "const": "1", "metavar": flag.metavar}
    elif kind is not bool:
        metavar = flag.metavar or ("{" + ",".join(flag.choices) + "}" if flag.choices else None)
        how = {
            "action": _Store,
            "convert": _Converter(names[0], kind, flag),
            "choices": () if kind in (int, float) else flag.choices,
            "nargs": flag.nargs,
            "metavar": metavar or {int: "N", float: "X", str: "TEXT"}[kind],
        }
    group.add_argument(*names, dest=dest, help=text, **how)


def _help_text(setting: Setting) -> str:
    text, *choices = setting.flag.help.split("\n")
    if setting.flag.registry is not None:
        choices = setting.flag.registry.describe()
    default = default_text(setting)
    if default:
        text += f" ({default})" if default == "required" else f" (default: {default})"
    return "\n  ".join([text, *choices]).replace("%", "%%")


def default_text(setting: Setting) -> str:
    """Returns the default of a flag as shown to users: "required", or "" for a flag that is off."""
    if setting.flag.derived is not None:
        return setting.flag.derived
    if setting.is_required:
        return "required"
    is_off = setting.default is None or setting.default is False or setting.default == ()
    return "" if is_off else value_text(setting.default)


def _add_ignored_flags(parser: argparse.ArgumentParser) -> None:
    flags, by_reason = foreign_flags().ignored.values(), dict[str, list[str]]()
    for flag in flags:
        word = flag.name + (
            " {" + ",".join(flag.values) + "}" if flag.values else " VALUE" * (flag.nargs != 0)
        )
        by_reason.setdefault(flag.reason, []).append(word)
    lines = "\n".join(f"{', '.join(words)}: {reason}" for reason, words in by_reason.items())
    group = parser.add_argument_group("flags of other frameworks (accepted and ignored)", lines)
    for flag in flags:
        how: dict[str, Any] = {"nargs": flag.nargs} if flag.nargs != 0 else {"action": "store_true"}
        group.add_argument(flag.name, dest=flag.name, help=argparse.SUPPRESS, **how)
