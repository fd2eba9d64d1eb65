"""Runs the command that a script of this folder is named after, from this checkout, installed or not."""

import os
import sys
from importlib import import_module
from pathlib import Path


def run(script: str) -> None:
    """Calls `main` of `megatron.commands.NAME` for the script NAME.py, and exits with its result. This folder
    is replaced on the search path: its scripts must not hide packages such as `evaluate`."""
    folder = os.path.dirname(os.path.abspath(script))
    # With PYTHONSAFEPATH the folder is not on the path.
    sys.path[:] = [os.path.dirname(folder), *(p for p in sys.path if os.path.abspath(p) != folder)]
    sys.exit(import_module(f"megatron.commands.{Path(script).stem}").main())
