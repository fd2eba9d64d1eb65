"""Errors that the user can fix, and functions that end a program with such an error."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from megatron.torch_versions import missing_name

USER_ERROR_EXIT_CODE = 2
# Time that ranks other than 0 wait before they exit, in seconds, so that rank 0 can print the error.
_RANK_0_PRINTS_S = 5.0
# Numbers of errors that say only that a file cannot be accessed, and nothing about its content.
_ACCESS_ERRNOS = frozenset(
    {
        *(errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
        *(errno.EAGAIN, errno.EBUSY, errno.EUCLEAN, errno.EBADMSG, errno.ENOLCK),
        # These errors are from a network file system whose server does not answer.
        *(errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EHOSTDOWN, errno.ENOTCONN, errno.ESHUTDOWN),
        *(errno.ECOMM, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ECONNREFUSED),
        *(errno.ECONNRESET, errno.ECONNABORTED, errno.ENOLINK, errno.EPROTO),
    }
)


class UserError(Exception):
    """An error that the user can fix. The message names the value, what was expected, and what to change.

    The class is not derived from ValueError, because argparse catches ValueErrors and prints its own message.
    """


class ConfigError(UserError):
    """An invalid setting. The message names the flag to change."""


def printable(text: str) -> str:
    """Returns the text with escapes such as \\x1b for characters that could move a terminal's cursor or hide
    other text. Line breaks and tabs stay. Use it for names from files, hosts or the environment."""
    return "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode()
        for character in text
    )


def one_line(text: object, limit: int = 200) -> str:
    """Returns an error's text, or a value from a file, as one short printable line for an error message."""
    lines = str(text).strip().splitlines() or [type(text).__name__]
    line = printable(lines[0][: limit + 1])
    return line if len(line) <= limit else f"{line[:limit]}..."


def is_access_error(error: BaseException) -> bool:
    """Returns whether an error says only that a file cannot be accessed: an I/O error, a missing permission,
    too many open files, a full disk. Such an error says nothing about the content of the file."""
    return isinstance(error, OSError) and error.errno in _ACCESS_ERRNOS


@contextmanager
def stop_at_access_error(consequence: str = "") -> Iterator[None]:
    """Turns an access error in the block into a UserError. consequence: text that is appended to the
    message."""
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
    """Ends the program with exit code 2 on a UserError, an access error, or a file name that is too long. All
    ranks raise a UserError, and only rank 0 prints it (see `exit_with_error`). An access error may occur on
    only one rank, so this rank prints it. If the reader of stdout has ended, as in `TOOL | head`, the program
    ends without a message, as if SIGPIPE had killed it."""
    try:
        yield
        sys.stdout.flush()
    except UserError as error:
        exit_with_error(str(error), USER_ERROR_EXIT_CODE, env)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _is_stdout_closed():
            os._exit(128 + signal.SIGPIPE)
        if not is_access_error(error) and error.errno != errno.ENAMETOOLONG:
            raise
        exit_with_error(_access_sentence(error), USER_ERROR_EXIT_CODE, {})
    except (AttributeError, ImportError) as error:
        if (sentence := missing_name(error)) is None:
            raise
        exit_with_error(sentence, USER_ERROR_EXIT_CODE, env)


def _is_stdout_closed() -> bool:
    """Returns whether the reader of stdout has ended."""
    poll = select.poll()
    poll.register(1, 0)  # without events, only errors are reported
    return bool(poll.poll(0))


def print_error(text: str) -> None:
    """Prints an error on stderr, and writes it without a traceback to torch's error file."""
    print(printable(text), file=sys.stderr, flush=True)
    write_error_file(text)


def write_error_file(text: str, env: Mapping[str, str] = os.environ) -> None:
    """Writes an error to the file from which torch's launcher reads the error of this rank, so that the
    launcher's summary shows it as the root cause. The written text begins at the last line that begins with
    "error:". Does nothing without such a launcher."""
    path, last = (
        env.get("TORCHELASTIC_ERROR_FILE"),
        re.split(r"^(?=error: )", printable(text), flags=re.M)[-1],
    )
    cause = last if last.startswith("error: ") else last.rpartition("\n")[2]
    if not path or not cause:
        return
    # The launcher treats the error with the lowest time, in seconds, as the root cause. An error without a
    # file has the time at which the launcher noticed it.
    extra_info = {"py_callstack": cause, "timestamp": str(int(time.time()) - 1)}
    with suppress(OSError):
        # The launcher fails if the file is incomplete.
        Path(f"{path}.tmp").write_text(json.dumps({"message": {"message": cause, "extraInfo": extra_info}}))
        os.replace(f"{path}.tmp", path)


def exit_with_error(sentence: str, code: int, env: Mapping[str, str] = os.environ) -> NoReturn:
    """Ends this rank with an error that all ranks have. Only global rank 0 (environment variable RANK, 0 if
    unset or empty) prints the message."""
    if (env.get("RANK") or "0") == "0":
        print_error(f"error: {sentence}")
    else:
        # The launcher ends all other ranks as soon as one rank has exited: rank 0 must print first.
        time.sleep(_RANK_0_PRINTS_S)
    sys.exit(code)
