"""The argument parser of the tools."""

from __future__ import annotations

import argparse
from typing import NoReturn

from megatron.config.errors import ConfigError


class ToolParser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError.

    `description` is printed with its line breaks, so that it can be a tool's docstring. Flags cannot be
    abbreviated: a new flag would change the meaning of an abbreviation.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the flags)")
