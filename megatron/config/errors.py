"""The error for invalid settings, and the exit of a program on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

CONFIG_ERROR_EXIT_CODE = 2


class ConfigError(Exception):
    """An invalid setting: one sentence with the value, the expected value, and the flag to change.

    Deliberately not a ValueError, which argparse catches and replaces by its own message.
    """


@contextmanager
def exit_on_config_error(env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """End the program with exit code 2 on a ConfigError.

    Every rank exits; only global rank 0 (environment variable RANK, 0 if unset or empty) prints the message.
    """
    try:
        yield
    except ConfigError as error:
        if (env.get("RANK") or "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(CONFIG_ERROR_EXIT_CODE)
