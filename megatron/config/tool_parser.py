"""The command line of the tools: parser, checks of arguments, and the exit of an interrupted tool."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megatron.errors import ConfigError


class ToolParser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError.

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

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the flags)")


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
