"""The error of a wrong setting, and how a program ends on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

CONFIG_ERROR_EXIT_CODE = 2


class ConfigError(Exception):
    """What a user wrote cannot be run: one sentence with the value, what was expected, the flag to change.

    It is no ValueError on purpose: argparse catches those and puts its own words in place of the sentence.
    """


@contextmanager
def exit_on_config_error(env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """End the program with exit code 2 on a ConfigError.

    Every rank exits, so that the launcher sees no survivor; only global rank 0 (environment variable RANK, 0
    if unset) prints the sentence, so that it stands once in the log.
    """
    try:
        yield
    except ConfigError as error:
        if env.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(CONFIG_ERROR_EXIT_CODE)
