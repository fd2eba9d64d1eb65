#!/usr/bin/env python
"""Turn a native checkpoint into a universal one: a file per parameter and moment, whole, in fp32.

    python tools/ds_to_universal.py --input_folder CKPT/global_step5 \\
        --output_folder CKPT/global_step5_universal

Resuming on another layout does not need it: --load opens native checkpoints on any. Interrupted, it goes on
where it was. A universal checkpoint is loaded with --load CKPT --universal_checkpoint. Checkpoints of other
programs that use DeepSpeed's ZeRO-1 are converted too, if they hold universal_checkpoint_info.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.checkpoint.convert.source import Source, open_source
from megatron.checkpoint.convert.to_universal import convert
from megatron.checkpoint.integrity.verify import verify_files
from megatron.config import ConfigError, exit_on_config_error
from megatron.config.tool_parser import ToolParser


def build_parser() -> ToolParser:
    """The flags, named as DeepSpeed's, and three more."""
    parser = ToolParser(__doc__)
    parser.add_argument("--input_folder", required=True, help="a native checkpoint, global_step<N>")
    parser.add_argument("--output_folder", required=True, help="the folder to make")
    parser.add_argument(
        "--num_extract_workers",
        type=int,
        default=4,
        help="threads that convert (default: 4); reading and merging are one: the larger number is taken",
    )
    parser.add_argument("--num_merge_workers", type=int, default=2, help="the same (default: 2)")
    parser.add_argument(
        "--keep_temp_folder",
        action="store_true",
        help="changes nothing: there are no temporary slices to keep",
    )
    parser.add_argument(
        "--no_strict",
        action="store_true",
        help="warn of a rule that matches no parameter, instead of refusing",
    )
    parser.add_argument(
        "--inject_missing_state",
        action="store_true",
        help="derive the rules from run.json where a checkpoint of this repo is so old that it stores none",
    )
    parser.add_argument(
        "--allow-replica-mismatch",
        "--allow-drift",  # the old spelling
        action="store_true",
        help="take the mean where copies of a parameter on tensor ranks differ, and tell by how much",
    )
    digests = parser.add_mutually_exclusive_group()
    digests.add_argument(
        "--no-verify-digests",
        action="store_true",
        help="do not first read all files and compare them with their digests",
    )
    digests.add_argument(
        "--verify-digests", action="store_true", help="deprecated and ignored: digests are verified"
    )
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise a ConfigError for what cannot work."""
    for name in ("num_extract_workers", "num_merge_workers"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} is {getattr(arguments, name)}, expected 1 or more")
    folder = Path(arguments.input_folder)
    if not folder.is_dir():
        raise ConfigError(f"--input_folder {folder}: there is no such folder")


def main(argv: Sequence[str] | None = None) -> None:
    """Converts, with a progress bar over the parameters; exits with code 2 for a user's mistake."""
    with exit_on_config_error():
        arguments = build_parser().parse_args(argv)
        check_arguments(arguments)
        workers = max(arguments.num_extract_workers, arguments.num_merge_workers)
        if arguments.keep_temp_folder:
            print("note: --keep_temp_folder changes nothing: no temporary slices are written")
        source = open_source(
            Path(arguments.input_folder), not arguments.no_strict, arguments.inject_missing_state
        )
        for warning in source.warnings:
            print(f"warning: {warning}")
        if arguments.verify_digests:
            print("note: --verify-digests is deprecated and ignored: digests are verified by default")
        if source.run is None:
            print(f"note: {source.folder} has no run.json: there are no digests to compare its files with")
        elif not arguments.no_verify_digests:
            verify_digests(source, workers)
        target = Path(arguments.output_folder)
        mismatches = {}
        with tqdm(total=len(source.plans), unit="parameter", disable=None) as bar:
            try:
                for parameter in convert(source, target, workers, arguments.allow_replica_mismatch):
                    bar.set_postfix_str(parameter.name)
                    bar.update()
                    mismatches[parameter.name] = parameter.mismatch
            except OSError as error:
                raise ConfigError(
                    f"the conversion has stopped ({error}): once that is mended the same command goes on"
                ) from error
        for name, mismatch in mismatches.items():
            if mismatch:
                print(
                    f"{name}: replicas on tensor ranks differed by up to {mismatch:.2e}; their mean is used"
                )
        finished = len(source.plans) - len(mismatches)
        before = f", {finished} of them by an interrupted conversion before" if finished else ""
        print(f"{target}: {len(source.plans)} parameters{before}")


def verify_digests(source: Source, workers: int) -> None:
    """Reads all files of the source, with a progress bar; ConfigError names those that are damaged."""
    damages = []
    with tqdm(total=len(source.run["files"]), unit="file", disable=None) as bar:
        for damage in verify_files(source.folder, source.run["files"], workers):
            bar.update()
            damages += [damage] if damage else []
    if damages:
        raise ConfigError(f"checkpoint {source.folder}: {'; '.join(damages)}: convert an older checkpoint")


if __name__ == "__main__":
    main()
