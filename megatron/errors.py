"""Errors that the user can mend, and the exit of a program on them."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

USER_ERROR_EXIT_CODE = 2
# Seconds in which rank 0 prints an error that another rank has found first.
_RANK_0_PRINTS_S = 5.0
# What an OSError can say about the access to a file, rather than about the file itself.
_OF_ACCESS = frozenset(
    {
        *(errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
        *(errno.EAGAIN, errno.EBUSY, errno.EUCLEAN, errno.EBADMSG, errno.ENOLCK),
        # A network file system whose server does not answer.
        *(errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EHOSTDOWN, errno.ENOTCONN, errno.ESHUTDOWN),
        *(errno.ECOMM, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ECONNREFUSED),
        *(errno.ECONNRESET, errno.ECONNABORTED, errno.ENOLINK, errno.EPROTO),
    }
)


class UserError(Exception):
    """What the user can mend: a setting, a file, a disk. One sentence: the value, what was expected, and what
    to change.

    Deliberately not a ValueError, which argparse catches and replaces by its own message.
    """


class ConfigError(UserError):
    """An invalid setting; the sentence names the flag to change."""


def printable(text: str) -> str:
    """The text with escapes, as \\x1b, for characters that could move a terminal's cursor or hide other text.
    Line breaks and tabs stay. For texts with names from files, hosts or the environment."""
    return "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def one_line(text: object, limit: int = 200) -> str:
    """Another error, or a value from a file, for an error message: one line, short, printable."""
    lines = str(text).strip().splitlines() or [type(text).__name__]
    line = printable(lines[0][: limit + 1])
    return line if len(line) <= limit else f"{line[:limit]}..."


def is_access_error(error: BaseException) -> bool:
    """Whether an error only says that a file cannot be read or written: an I/O error, a missing permission,
    too many open files, a full disk. It says nothing about the file's content."""
    return isinstance(error, OSError) and error.errno in _OF_ACCESS


@contextmanager
def stop_at_access_error(consequence: str = "") -> Iterator[None]:
    """Raises UserError for an error of access in the block. consequence: the end of its sentence."""
    try:
        yield
    except OSError as error:
        if not is_access_error(error):
            raise
        raise UserError(_access_sentence(error) + consequence) from error


def _access_sentence(error: OSError) -> str:
    name = "a file" if error.filename is None else error.filename
    is_limit = error.errno in (errno.EMFILE, errno.ENFILE)
    remedy = ": raise the limit with ulimit -n" if is_limit else ""
    now = " now" if is_access_error(error) else ""
    return f"{name} cannot be accessed{now} ({error.strerror}{remedy})"


@contextmanager
def exit_on_user_error(env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Ends the program with exit code 2 on a UserError, an error of access or too long a name. Every rank
    exits, see `exit_with_error`. Only the rank that has an error of access knows it, and prints it."""
    try:
        yield
    except UserError as error:
        exit_with_error(str(error), USER_ERROR_EXIT_CODE, env)
    except OSError as error:
        if not is_access_error(error) and error.errno != errno.ENAMETOOLONG:
            raise
        exit_with_error(_access_sentence(error), USER_ERROR_EXIT_CODE, {})


def exit_with_error(sentence: str, code: int, env: Mapping[str, str] = os.environ) -> NoReturn:
    """Ends this rank with an error that rank 0 has too, or is sent. Only global rank 0 (environment variable
    RANK, 0 if unset or empty) prints the sentence."""
    if (env.get("RANK") or "0") == "0":
        print(printable(f"error: {sentence}"), file=sys.stderr, flush=True)
    else:
        # The launcher ends rank 0 as soon as this rank has ended, and all others as soon as rank 0 has.
        time.sleep(_RANK_0_PRINTS_S)
    sys.exit(code)
