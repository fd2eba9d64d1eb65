"""The argument parser of the tools, and a check of their input files."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import NoReturn

from megatron.errors import ConfigError


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


def check_input_files(paths: Iterable[str]) -> None:
    """Raises ConfigError for a file of --input that does not exist, or cannot be read or decompressed."""
    for path in paths:
        if not os.path.isfile(path):
            raise ConfigError(f"--input {path}: the file does not exist")
        if not os.access(path, os.R_OK):
            raise ConfigError(f"--input {path}: this user cannot read the file")
        if path.endswith((".zst", ".xz", ".bz2", ".zip", ".parquet")):
            raise ConfigError(f"--input {path}: only plain and .gz files can be read, decompress it first")
