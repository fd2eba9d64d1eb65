"""Converts a native checkpoint to a universal one, with one fp32 file per parameter and optimizer moment.

    python tools/ds_to_universal.py --input_folder CKPT/global_step5 \\
        --output_folder CKPT/global_step5_universal

A run that resumes on a different layout does not need the conversion, because --load reads native checkpoints
on any layout. Load a universal checkpoint with --load CKPT --universal_checkpoint. To continue an interrupted
conversion, run the command again. Several tasks of one command (srun --nodes=4 python
tools/ds_to_universal.py) share the parameters. They need no GPU, but a shared file system with locks. ZeRO-1
checkpoints of any program that uses DeepSpeed can be converted if they contain universal_checkpoint_info.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.conversion.source import open_source
from megatron.checkpoint.formats.universal_writer import UniversalWriter
from megatron.commands.convert_checkpoint import convert_in_tasks, task_of
from megatron.config.tool_parser import ToolParser, at_least_1, check_folder
from megatron.errors import exit_on_user_error, printable


def build_parser() -> ToolParser:
    """Returns the parser: the flags of DeepSpeed's tool, and the flags for replicas and digests."""
    parser = ToolParser(__doc__)
    parser.add_argument("--input_folder", required=True, help="native checkpoint, a global_step<N> folder")
    parser.add_argument("--output_folder", required=True, help="folder to write")
    parser.add_argument(
        "--num_extract_workers",
        type=at_least_1,
        default=4,
        help="number of threads (default: 4). Each thread extracts and merges, so the larger value of this "
        "flag and --num_merge_workers is used",
    )
    parser.add_argument(
        "--num_merge_workers",
        type=at_least_1,
        default=2,
        help="number of threads, see --num_extract_workers (default: 2)",
    )
    parser.add_argument(
        "--keep_temp_folder", action="store_true", help="ignored: the conversion writes no temporary slices"
    )
    parser.add_argument(
        "--no_strict",
        action="store_true",
        help="if a conversion rule matches no parameter, print a warning (without the flag: stop)",
    )
    parser.add_argument(
        "--inject_missing_state",
        action="store_true",
        help="derive the conversion rules from run.json. Old checkpoints of this repository store no rules "
        "and need this flag",
    )
    parser.add_argument(
        "--allow-replica-mismatch",
        "--allow-drift",  # the old spelling
        action="store_true",
        help="if the replicas of a parameter on tensor-parallel ranks differ, use their mean and print the "
        "difference",
    )
    digests = parser.add_mutually_exclusive_group()
    digests.add_argument(
        "--no-verify-digests",
        action="store_true",
        help="do not compare the copied data with the digests of the checkpoint",
    )
    digests.add_argument(
        "--verify-digests",
        action="store_true",
        help="deprecated and ignored: digests are verified by default",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Converts and shows a progress bar. On a user's mistake, prints one sentence and exits with code 2."""
    rank, _ = task_of(os.environ)
    print_once = print if rank == 0 else lambda _: None
    with exit_on_user_error({"RANK": str(rank)}):
        arguments = build_parser().parse_args(argv)
        check_folder("--input_folder", arguments.input_folder)
        if arguments.keep_temp_folder:
            print_once("note: --keep_temp_folder is ignored: the conversion writes no temporary slices")
        source = open_source(
            Path(arguments.input_folder),
            not arguments.no_strict,
            arguments.inject_missing_state,
            lambda text: print_once(printable(f"warning: {text}")),
        )
        if arguments.verify_digests:
            print_once("note: --verify-digests is deprecated and ignored: digests are verified by default")
        if source.checkpoint.is_external:
            print_once(f"note: {source.folder} has no run.json with digests: its files are not verified")
        workers = max(arguments.num_extract_workers, arguments.num_merge_workers)
        verify, allow = not arguments.no_verify_digests, arguments.allow_replica_mismatch
        target = Path(arguments.output_folder)
        for line in convert_in_tasks(
            source, UniversalWriter, target, workers, verify, allow_replica_mismatch=allow
        ):
            print(printable(line))


if __name__ == "__main__":
    main()
