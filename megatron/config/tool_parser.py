"""The argument parser of the tools."""

from __future__ import annotations

import argparse
from typing import NoReturn

from megatron.config.errors import ConfigError


class ToolParser(argparse.ArgumentParser):
    """An argparse parser whose errors are ConfigErrors, so that they are printed like all others.

    `description` is printed with its line breaks, so a tool's docstring can serve. Flags are not abbreviated:
    a new one would change what an abbreviation means.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the flags)")
