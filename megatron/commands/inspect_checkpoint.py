"""Describes a checkpoint, or compares two checkpoints.

    python tools/inspect_checkpoint.py checkpoints
    python tools/inspect_checkpoint.py checkpoints/global_step300 other/global_step300 --json

For a folder with checkpoints, the tool prints a row per checkpoint and describes the newest complete one. For
a global_stepN folder, it describes that checkpoint. It compares the sizes of files with the recorded sizes.
With --verify it also reads all files of the described checkpoint and compares their digests and checksums.
For two folders, it prints the settings that differ and the largest difference of each parameter's fp32 values
and optimizer moments; layouts and formats (native, universal) may differ. The exit code is 2 if a file is
damaged, missing or malicious. Code in a pickle is never executed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.config import LoggingConfig
from megatron.config.tool_parser import ToolParser, check_folder
from megatron.errors import USER_ERROR_EXIT_CODE, UserError, exit_on_user_error, printable


def build_parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER",
        help="one or two folders with checkpoints, or global_stepN folders",
    )
    parser.add_argument("--json", action="store_true", help="print JSON with every parameter")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read all files of the described checkpoint, and compare them with their digests and checksums",
    )
    return parser


def show_one(folder: Path, as_json: bool, verify: bool) -> bool:
    """Describes the checkpoint in `folder`; returns whether it is intact."""
    # The import is late, because torch takes seconds to import.
    from megatron.checkpoint.inspect import inspect_folder
    from megatron.checkpoint.report import overview_text

    overview = inspect_folder(folder, verify)
    _print(overview, as_json, overview_text)
    return overview.is_intact


def show_two(folders: Sequence[Path], as_json: bool) -> None:
    """Prints how two checkpoints differ."""
    # The import is late, because torch and DeepSpeed take seconds to import.
    from megatron.checkpoint.reading import read_checkpoint
    from megatron.checkpoint.report import compare_checkpoints, comparison_text

    one, other = (read_checkpoint(folder, allow_external=True) for folder in folders)
    comparison = compare_checkpoints(one, other)
    _print(comparison, as_json, comparison_text)


def _print(report: Any, as_json: bool, as_text: Callable[[Any], str]) -> None:
    print(json.dumps(asdict(report), indent=2) if as_json else printable(as_text(report)))


@exit_on_user_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns the exit code."""
    arguments = build_parser().parse_args(argv)
    folders = [Path(folder) for folder in arguments.folders]
    if len(folders) > 2:
        raise UserError(f"got {len(folders)} folders, expected one to describe or two to compare")
    for folder in folders:
        check_folder("FOLDER", str(folder))
    if arguments.verify and len(folders) == 2:
        raise UserError(
            "--verify needs one folder, got two: a comparison reads all tensors anyway; remove the flag"
        )

    # The import is late, because torch takes seconds to import.
    from megatron.cluster.processes import configure_logging

    configure_logging(LoggingConfig())
    if len(folders) == 2:
        show_two(folders, arguments.json)
        return 0
    return 0 if show_one(folders[0], arguments.json, arguments.verify) else USER_ERROR_EXIT_CODE


if __name__ == "__main__":
    sys.exit(main())
