"""Parsers of command lines that report all mistakes in one error, checks of the tools' arguments, and the
exit of an interrupted tool."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from megatron.config.mistakes import Mistakes, named_flags
from megatron.errors import ConfigError, one_line


class _Rejected(ConfigError):
    """An argument that argparse rejects. argument: name of the argument in argparse's message; "" if the
    message names none. complaint: the message without this name."""

    def __init__(self, sentence: str, message: str) -> None:
        super().__init__(sentence)
        prefix, _, rest = message.partition(": ")
        is_named = prefix.startswith("argument ")
        self.argument = prefix.removeprefix("argument ") if is_named else ""
        self.required = rest.split(", ") if prefix == "the following arguments are required" else []


class CollectingParser(argparse.ArgumentParser):
    """An argparse parser that raises one ConfigError with all mistakes. A flag with an invalid value is
    missing in its result."""

    def rejection(self, message: str) -> str:
        """Returns the sentence for a message of argparse. A message that begins with "is ", such as from
        `at_least_1`, follows the flag's name."""
        name, _, complaint = message.removeprefix("argument ").partition(": ")
        if complaint.startswith("is "):
            return f"{name.split('/')[0]} {complaint}"
        return f"{message} (--help lists the flags)"

    def unknown_flag(self, name: str) -> str:
        """Returns the sentence about an unknown flag."""
        # argparse has no public list of its flags.
        return unknown_flag(name, near_flags(name, self._option_string_actions))

    def check_values(self, parsed: argparse.Namespace, mistakes: Mistakes) -> None:
        """Adds to `mistakes` the mistakes in values that argparse accepts."""

    def parse_known(self, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Calls argparse's parser, which raises `_Rejected`."""
        return self.parse_known_args(words)

    def error(self, message: str) -> NoReturn:
        raise _Rejected(self.rejection(message), message)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        mistakes = Mistakes()
        parsed = self.collect(sys.argv[1:] if args is None else args, mistakes)
        mistakes.raise_all()
        return parsed

    def collect(self, words: Sequence[str], mistakes: Mistakes) -> argparse.Namespace:
        """Parses a command line, and adds its mistakes to `mistakes`.

        Words after an unknown flag may be its values. If a sentence recommends a flag, the user may have
        meant this flag, so its value is unknown unless the flag is given, too.
        """
        parsed, unknown, missing = self._parse(words, mistakes)
        self.check_values(parsed, mistakes)
        if unknown and not FLAG.match(unknown[0]):
            place = len(words)
            for word in reversed(unknown):  # a flag before them may have an equal word as value
                place = max(index for index in range(place) if words[index] == word)
            before = [word.partition("=")[0] for word in words[:place] if FLAG.match(word)]
            sentence = f"unexpected value '{unknown[0]}': quote a value that contains spaces, or see --help"
            mistakes.add(sentence, before[-1:])  # the flag before it may have an incomplete value
        given = {word.partition("=")[0].replace("_", "-") for word in words}
        for name in dict.fromkeys(word.partition("=")[0] for word in unknown if FLAG.match(word)):
            sentence = self.unknown_flag(name)
            mistakes.add(sentence, named_flags(sentence) - given, is_cause=True)
        self._add_missing(missing, mistakes)
        return parsed

    def collect_known(self, words: Sequence[str], mistakes: Mistakes) -> tuple[argparse.Namespace, list[str]]:
        """Behaves like `collect`, but returns the words of unknown flags instead of adding them to the
        mistakes."""
        parsed, unknown, missing = self._parse(words, mistakes)
        self._add_missing(missing, mistakes)
        return parsed, unknown

    def _parse(
        self, words: Sequence[str], mistakes: Mistakes
    ) -> tuple[argparse.Namespace, list[str], list[str]]:
        """Returns the namespace, the unknown words, and the names of the missing arguments."""
        missing: list[str] = []
        while True:
            try:
                return (*self.parse_known(list(words)), missing)
            except _Rejected as rejected:
                absent = [action for action in self._actions if _name(action) in rejected.required]
                wrong = [action for action in self._actions if _name(action) == rejected.argument]
                if absent:
                    missing += map(_name, absent)
                    for action in absent:
                        action.required = False
                elif wrong and len(rest := _without_flag(words, wrong[0])) < len(words):
                    mistakes.add(str(rejected), wrong[0].option_strings, is_cause=True)
                    words = rest
                else:
                    mistakes.add(str(rejected))
                    mistakes.raise_all()
                    raise

    def _add_missing(self, names: Sequence[str], mistakes: Mistakes) -> None:
        absent = [name for name in names if mistakes.unknown.isdisjoint(name.split("/"))]
        if absent:
            sentence = self.rejection(f"the following arguments are required: {', '.join(absent)}")
            mistakes.add(sentence, absent)


def _name(action: argparse.Action) -> str:
    """Returns the name of an argument in argparse's messages."""
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    return "/".join(action.option_strings) or metavar


def _without_flag(words: Sequence[str], action: argparse.Action) -> list[str]:
    """Returns the words without a flag and its values."""
    limit = len(words)  # limit of the number of values; nargs * and + have none
    if action.nargs in (None, "?") or isinstance(action.nargs, int):
        limit = action.nargs if isinstance(action.nargs, int) else 1
    kept, values = list[str](), 0
    for word in words:
        if FLAG.match(word):
            name, equals, _ = word.partition("=")
            values = 0
            if name in action.option_strings:
                values = 0 if equals else limit
                continue
        elif values > 0:
            values -= 1
            continue
        kept.append(word)
    return kept


def near_flags(name: str, known: Iterable[str]) -> list[str]:
    """Returns the known flags that a user who typed the unknown flag `name` may have meant."""
    spelled = "--" + name.lstrip("-").replace("_", "-")
    near = difflib.get_close_matches(spelled, sorted(known), n=1, cutoff=_MIN_SIMILARITY)
    near = near or sorted(option for option in known if option.startswith(f"{spelled}-"))
    return near if len(near) <= _MAX_HINTS else []


def unknown_flag(name: str, near: Sequence[str]) -> str:
    """Returns the sentence about an unknown flag."""
    return f"unknown flag {name}: " + (f"did you mean {' or '.join(near)}?" if near else "see --help")


FLAG = re.compile("--?[A-Za-z]")
# Minimum similarity of a flag that is suggested. A flag of 5 or more letters with one wrong letter is above
# it; the pair --batch-size and --micro-batch-size is below it.
_MIN_SIMILARITY = 0.85
_MAX_HINTS = 3


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Adds the default to the help of a flag, unless the help explains it or the default is empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_empty = action.default is None or action.default is False or action.default in ("", [])
        is_explained = "(default" in (action.help or "")
        return action.help if is_empty or is_explained else super()._get_help_string(action)

    def _split_lines(self, text: str, width: int) -> list[str]:
        # Each line of the text begins a new line, and flags are not broken at a hyphen.
        wrapped = (textwrap.wrap(line, width, break_on_hyphens=False) for line in text.splitlines())
        return [line for lines in wrapped for line in lines]


class ToolParser(CollectingParser):
    """The parser of a tool.

    `description` is printed with its line breaks, so it can be the docstring of a tool. In an installation,
    `megatron-NAME` replaces `python tools/NAME.py` in the description. Flags cannot be abbreviated, because a
    new flag would change the meaning of an abbreviation.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=re.sub(r"python (tools/\w+\.py)", _typed, description or ""),
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """Adds a flag. A flag with underscores, as in DeepSpeed's tools, may also be typed with dashes."""
        dashed = (name.replace("_", "-") for name in names if name.startswith("--"))
        return super().add_argument(*dict.fromkeys((*names, *dashed)), **settings)


def typed_name(script: str) -> str:
    """Returns how the user typed the name of this program: the path of a script, or an installed command."""
    command = os.path.basename(sys.argv[0])
    is_installed = command.startswith(_COMMAND)
    return _COMMAND + Path(script).stem.replace("_", "-") if is_installed else script


def _typed(command: re.Match[str]) -> str:
    name = typed_name(command[1])
    return command[0] if name == command[1] else name


def at_least_1(word: str) -> int:
    """Converts the value of a flag to an integer of at least 1. For the argument `type` of a flag."""
    if not re.fullmatch("[+-]?[0-9]{1,18}", word):
        raise argparse.ArgumentTypeError(f"is '{one_line(word, 60)}': expected an integer")
    if (number := int(word)) < 1:
        raise argparse.ArgumentTypeError(f"is {number}: expected at least 1")
    return number


def check_folder(flag: str, path: str) -> None:
    """Raises ConfigError if the path that a flag names is not a folder."""
    if not os.path.isdir(path):
        raise ConfigError(f"{flag} {path}: there is no such folder")


def check_output_prefix(prefix: str) -> None:
    """Raises ConfigError if the folder of --output-prefix does not exist."""
    folder = os.path.dirname(os.path.abspath(prefix))
    if not os.path.isdir(folder):
        raise ConfigError(f"--output-prefix {prefix}: the folder {folder} does not exist")


def add_universal_flag(parser: argparse._ActionsContainer, flag: str) -> None:
    """Adds --universal_checkpoint. flag: flag that names the folder with the checkpoints."""
    parser.add_argument(
        "--universal_checkpoint",
        "--universal-checkpoint",
        action="store_true",
        help=f"use the newest universal checkpoint of {flag}, even if it also has native ones",
    )


def add_verify_digests_flag(parser: argparse._ActionsContainer) -> None:
    """Adds --no-verify-digests, for tools that load the weights of a checkpoint."""
    parser.add_argument(
        "--no-verify-digests",
        action="store_true",
        help="do not compare the weights with the checkpoint's digests",
    )


_COMMAND = "megatron-"  # commands of an installation begin with it
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def exit_on_interrupt(message: str = "interrupted") -> Iterator[None]:
    """Ends the program with exit code 128 + signal on SIGTERM and Ctrl-C, after the block's cleanup. It is
    for tools that write under temporary names or run other processes, and works only in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for ignored in _SIGNALS:  # no second signal interrupts the cleanup
            signal.signal(ignored, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    except KeyboardInterrupt as error:
        print(message, file=sys.stderr)
        sys.exit(128 + (error.args[0] if error.args else signal.SIGINT))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
