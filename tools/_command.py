"""Runs the command with the name of a script of this folder, from this checkout, whether or not the package
is installed."""

import os
import sys
from importlib import import_module
from pathlib import Path


def run(script: str) -> None:
    """Calls `main` of `megatron.commands.NAME` for the script NAME.py, and exits with its result. It replaces
    this folder on the search path, because the scripts must not hide packages such as `evaluate`."""
    folder = os.path.dirname(os.path.abspath(script))
    # With PYTHONSAFEPATH this folder is not on the search path.
    sys.path[:] = [os.path.dirname(folder), *(p for p in sys.path if os.path.abspath(p) != folder)]
    sys.exit(import_module(f"megatron.commands.{Path(script).stem}").main())
