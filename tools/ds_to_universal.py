#!/usr/bin/env python
"""Turn a native checkpoint into a universal one: a file per parameter and moment, whole, in fp32.

    python tools/ds_to_universal.py --input_folder CKPT/global_step5 \\
        --output_folder CKPT/global_step5_universal

Resuming on another layout does not need it: --load opens native checkpoints on any. Interrupted, it goes on
where it was. A universal checkpoint is loaded with --load CKPT --universal_checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.config import ConfigError, exit_on_config_error
from megatron.config.tool_parser import ToolParser


def build_parser() -> ToolParser:
    """The flags, named as DeepSpeed's."""
    parser = ToolParser(__doc__)
    parser.add_argument("--input_folder", required=True, help="a native checkpoint, global_step<N>")
    parser.add_argument("--output_folder", required=True, help="the folder to make")
    parser.add_argument(
        "--num_extract_workers",
        type=int,
        default=1,
        help="processes that convert (default: 1); the larger of both is taken",
    )
    parser.add_argument("--num_merge_workers", type=int, default=1, help="the same")
    parser.add_argument(
        "--allow-drift",
        action="store_true",
        help="take the mean where copies of a parameter on tensor ranks differ",
    )
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise a ConfigError for what cannot work."""
    for name in ("num_extract_workers", "num_merge_workers"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} is {getattr(arguments, name)}, expected 1 or more")
    if not Path(arguments.input_folder).is_dir():
        raise ConfigError(f"--input_folder {arguments.input_folder}: there is no such folder")


def main(argv: Sequence[str] | None = None) -> None:
    """Converts, with a progress bar over the parameters; exits with code 2 for a user's mistake."""
    with exit_on_config_error():
        arguments = build_parser().parse_args(argv)
        check_arguments(arguments)
        # Imported only now: torch takes seconds, a wrong flag is answered at once.
        from megatron.checkpoint.universal import convert, parameter_names

        source, target = Path(arguments.input_folder), Path(arguments.output_folder)
        workers = max(arguments.num_extract_workers, arguments.num_merge_workers)
        names = parameter_names(source)
        with tqdm(total=len(names), unit="parameter", disable=None) as bar:
            for name in convert(source, target, workers, arguments.allow_drift):
                bar.set_postfix_str(name)
                bar.update()
        print(f"{target}: {len(names)} parameters")


if __name__ == "__main__":
    main()
