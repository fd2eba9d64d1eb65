"""Errors of access, such as an I/O error of a network file system: they say nothing about a checkpoint's
content, so a read is repeated and then stops the program. Only a file that was read counts as damaged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from megatron.config.errors import is_access_error

# Delays between attempts: a network file system may recover, or show a new file to other nodes, only after
# some seconds.
RETRY_DELAYS_S = (0.1, 0.4, 1.0, 3.0, 6.0)
# The end of the sentence for an error of access.
MAY_BE_INTACT = ": the checkpoint may be intact, so no older one is used; repair the access, then start again"

T = TypeVar("T")


def read_with_retries(
    path: Path, read: Callable[[], T], retry_delays_s: Sequence[float] = RETRY_DELAYS_S
) -> T:
    """Returns read(), which reads `path`. After an error of access it is called again for about ten seconds;
    then the OSError is raised with the path. Any other error is raised at once."""
    for delay_s in (*retry_delays_s, None):
        try:
            return read()
        except OSError as error:
            if not is_access_error(error):
                raise
            if delay_s is None:
                raise OSError(error.errno, error.strerror, str(path)) from error
        time.sleep(delay_s)
    raise AssertionError("the last attempt returns or raises")
