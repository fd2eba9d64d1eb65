"""Runs the command of a tool from the tool's checkout, whether the package is installed or not."""

import os
import sys
from importlib import import_module
from typing import NoReturn


def run(tool: str) -> NoReturn:
    """Runs `megatron.commands.NAME`. tool: path of tools/NAME.py."""
    folder, file = os.path.split(os.path.abspath(tool))
    sys.path[0] = os.path.dirname(folder)
    sys.exit(import_module(f"megatron.commands.{file.removesuffix('.py')}").main())
