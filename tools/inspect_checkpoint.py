#!/usr/bin/env python
"""Tell what is in a checkpoint, or how two of them differ.

    python tools/inspect_checkpoint.py checkpoints
    python tools/inspect_checkpoint.py checkpoints/global_step300 other/global_step300 --json

A folder with checkpoints gives a row for each, and the newest complete one in full; a global_stepN folder
that one. Sizes of files are compared with what was written; with --verify the digests too, of the one that is
shown in full. Two folders are compared: settings, and the largest difference of each parameter's fp32 values
and moments, whatever their layouts, one native and one universal too. The exit code is 1 if something is
damaged or missing, and 2 for a file that is meant to do harm: nothing of it is run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.config import ConfigError, LoggingConfig, exit_on_config_error
from megatron.config.tool_parser import ToolParser

DAMAGED_EXIT_CODE = 1


def build_parser() -> ToolParser:
    """The flags."""
    parser = ToolParser(__doc__)
    parser.add_argument(
        "folders", nargs="+", metavar="FOLDER", help="with checkpoints, or a global_stepN folder; one or two"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with every parameter by name")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read all of the checkpoint that is shown in full, and compare the digests",
    )
    return parser


def show_one(folder: Path, as_json: bool, verify: bool) -> bool:
    """Prints what is in `folder`; returns whether all is well."""
    from megatron.checkpoint.report.inspect import inspect_folder
    from megatron.checkpoint.report.tables import overview_text

    overview = inspect_folder(folder, verify)
    _print(overview, as_json, overview_text)
    return overview.is_intact


def show_two(folders: Sequence[Path], as_json: bool) -> None:
    """Prints how the two checkpoints differ."""
    from megatron.checkpoint.reading import read_checkpoint
    from megatron.checkpoint.report.compare import compare_checkpoints
    from megatron.checkpoint.report.tables import comparison_text

    one, other = (read_checkpoint(folder, allow_external=True) for folder in folders)
    comparison = compare_checkpoints(one, other)
    _print(comparison, as_json, comparison_text)


def _print(report: Any, as_json: bool, as_text: Callable[[Any], str]) -> None:
    print(json.dumps(asdict(report), indent=2) if as_json else as_text(report))


def run(argv: Sequence[str] | None) -> int:
    """Do the work, return the exit code; ConfigError for a user's mistake."""
    arguments = build_parser().parse_args(argv)
    folders = [Path(folder) for folder in arguments.folders]
    if len(folders) > 2:
        raise ConfigError(f"{len(folders)} folders are given: expected one to describe, or two to compare")
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder")
    if arguments.verify and len(folders) == 2:
        raise ConfigError("--verify goes with one folder: two are compared tensor by tensor")

    from megatron.cluster.processes import configure_logging

    configure_logging(LoggingConfig())
    if len(folders) == 2:
        show_two(folders, arguments.json)
        return 0
    return 0 if show_one(folders[0], arguments.json, arguments.verify) else DAMAGED_EXIT_CODE


def main(argv: Sequence[str] | None = None) -> int:
    """Exits with code 2, and one sentence, for a user's mistake."""
    with exit_on_config_error():
        return run(argv)


if __name__ == "__main__":
    sys.exit(main())
