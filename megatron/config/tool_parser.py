"""The parsers of command lines, which report all mistakes in one error; checks of the tools' arguments, and
the exit of an interrupted tool."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megatron.config.mistakes import Mistakes, named_flags
from megatron.errors import ConfigError


class _Rejected(ConfigError):
    """What argparse rejects. argument: as argparse names it, "" if it names none. complaint: without it."""

    def __init__(self, sentence: str, message: str) -> None:
        super().__init__(sentence)
        prefix, _, rest = message.partition(": ")
        is_named = prefix.startswith("argument ")
        self.argument = prefix.removeprefix("argument ") if is_named else ""
        self.required = rest.split(", ") if prefix == "the following arguments are required" else []


class CollectingParser(argparse.ArgumentParser):
    """An argparse parser that raises one ConfigError with all mistakes."""

    def rejection(self, message: str) -> str:
        """Returns the sentence for a message of argparse."""
        return f"{message} (--help lists the flags)"

    def error(self, message: str) -> NoReturn:
        raise _Rejected(self.rejection(message), message)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        mistakes = Mistakes()
        parsed, _ = self.collect(sys.argv[1:] if args is None else args, mistakes)
        mistakes.raise_all()
        return parsed

    def collect(
        self, words: Sequence[str], mistakes: Mistakes, takes_unknown: bool = False
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses a command line and adds its mistakes to `mistakes`. A flag with an invalid value is left
        out.

        Returns the namespace and, with takes_unknown, the words of unknown flags, which are then no mistakes.
        """
        words, missing = list(words), dict[str, None]()
        while True:
            try:
                parsed, unknown = self.parse_known_args(words)
                break
            except _Rejected as rejected:
                actions = [action for action in self._actions if _name(action) == rejected.argument]
                absent = [action for action in self._actions if _name(action) in rejected.required]
                missing |= dict.fromkeys(map(_name, absent))
                if actions and actions[0].option_strings:
                    mistakes.add(str(rejected), actions[0].option_strings, is_cause=True)
                    words = without_flag(words, actions[0])
                elif absent:
                    for action in absent:
                        action.required = False
                else:
                    mistakes.add(str(rejected))
                    mistakes.raise_all()
        if not takes_unknown:
            mistakes_of_unknown(self, words, unknown, mistakes)
        absent_names = [name for name in missing if mistakes.unknown.isdisjoint(name.split("/"))]
        if absent_names:
            message = f"the following arguments are required: {', '.join(absent_names)}"
            mistakes.add(self.rejection(message), absent_names)
        return parsed, unknown


def _name(action: argparse.Action) -> str:
    """Returns the name of an argument in argparse's messages."""
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    return "/".join(action.option_strings) or metavar


def without_flag(words: Sequence[str], action: argparse.Action) -> list[str]:
    """Returns the words without a flag and its values."""
    limits = {None: 1, "?": 1, 0: 0}
    limit = action.nargs if isinstance(action.nargs, int) else limits.get(action.nargs, len(words))
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


def mistakes_of_unknown(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    unknown: Sequence[str],
    mistakes: Mistakes,
    answer: Callable[[str], str | None] = lambda name: None,
    hidden: Collection[str] = (),
) -> None:
    """Adds the mistakes of the words of a command line that a parser does not know. Words after an unknown
    flag may be its values. The value of a flag that a sentence recommends is unknown, unless the flag is
    given: the user may have meant this flag.

    answer: returns the sentence about a flag, or None to name the nearest flag. hidden: flags that are not
    named.
    """
    known = parser._option_string_actions.keys() - set(hidden)  # argparse has no public list
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    if unknown and not FLAG.match(unknown[0]):
        before = [word.partition("=")[0] for word in words[: words.index(unknown[0])] if FLAG.match(word)]
        sentence = f"unexpected value '{unknown[0]}': quote a value that contains spaces, or see --help"
        mistakes.add(sentence, before[-1:])  # the value of the flag before it may be incomplete
    for name in dict.fromkeys(word.split("=")[0] for word in unknown if FLAG.match(word)):
        sentence = answer(name) or _nearest(name, known)
        mistakes.add(sentence, named_flags(sentence) - given, is_cause=True)


def _nearest(name: str, known: Collection[str]) -> str:
    spelled = "--" + name.lstrip("-").replace("_", "-")
    nearest = difflib.get_close_matches(spelled, sorted(known), n=1, cutoff=_MIN_SIMILARITY)
    nearest = nearest or sorted(option for option in known if option.startswith(f"{spelled}-"))
    hint = f"did you mean {' or '.join(nearest)}?" if 1 <= len(nearest) <= _MAX_HINTS else "see --help"
    return f"unknown flag {name}: {hint}"


FLAG = re.compile("--?[A-Za-z]")
# One wrong letter in a flag of 5 or more letters stays above it; --batch-size and --micro-batch-size do not.
_MIN_SIMILARITY = 0.85
_MAX_HINTS = 3


class ToolParser(CollectingParser):
    """The parser of a tool.

    `description` is printed with its line breaks: it can be a tool's docstring. In an installation,
    `megatron-NAME` replaces `python tools/NAME.py` in it. Flags cannot be abbreviated, since a new flag would
    change the meaning of an abbreviation.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=re.sub(r"python (tools/\w+\.py)", _typed, description or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )


def typed_name(script: str) -> str:
    """Returns how the user started a script of the repository: by its path, or by an installed command."""
    command = os.path.basename(sys.argv[0])
    is_installed = command.startswith(_COMMAND)
    return _COMMAND + Path(script).stem.replace("_", "-") if is_installed else script


def _typed(command: re.Match[str]) -> str:
    name = typed_name(command[1])
    return command[0] if name == command[1] else name


def check_at_least_1(arguments: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError for an argument of these names that is set and below 1."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: expected at least 1")


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
    """Adds --universal_checkpoint. flag: names the folder with the checkpoints."""
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


_COMMAND = "megatron-"  # the commands of an installation begin with it
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Ends the program with exit code 128 + signal on SIGTERM and Ctrl-C, after the block's cleanup. It is
    for tools that write under temporary names, and works only in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for ignored in _SIGNALS:  # no second signal interrupts the cleanup
            signal.signal(ignored, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + (error.args[0] if error.args else signal.SIGINT))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
