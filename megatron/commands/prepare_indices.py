"""Builds the index files of a run's sample order before its job, on a machine without GPUs.

    python tools/prepare_indices.py --world-size 384 --data-path tokens/a_text_document --train-iters 1000 ...
    python tools/prepare_indices.py --script examples/slurm/tr11-176B-ml.slurm

The tool accepts all flags of pretrain_gpt.py: pass the flags of the run. --script executes an sbatch script
under your user, with DRY_RUN=1, and uses the flags and the number of processes that the script prints.

The tool verifies the token files, builds and verifies the indices of all data sets and splits, and writes a
stamp with the size and the time of change of each file. The start of a run trusts the stamp, and neither
reads nor builds indices. After a failure, run the command again. In an array job, --shard distributes the
data sets over the jobs:

    python tools/prepare_indices.py --shard slurm --world-size 384 --data-path ...
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from megatron.arguments import read_command_line
from megatron.arguments.data_checks import check_index_memory, host_memory_bytes
from megatron.checkpoint.selection import planned_length
from megatron.config import ConfigError
from megatron.config.tool_parser import at_least_1, exit_on_interrupt
from megatron.data.flags import token_file_prefixes
from megatron.data.gpt_dataset import prepare_index_files
from megatron.data.splits import verify_token_files
from megatron.data.text_files import parse_shard
from megatron.errors import UserError, exit_on_user_error, printable
from megatron.planner.command import RunFlagsParser, check_batch_size, run_flags


def build_parser() -> RunFlagsParser:
    parser = RunFlagsParser(__doc__)
    parser.add_argument(
        "--script",
        metavar="FILE",
        help="use the flags of this sbatch script; the tool executes the script under your user, with "
        "DRY_RUN=1",
    )
    parser.add_argument(
        "--threads",
        type=at_least_1,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="number of indices that are built at a time (default: the number of CPUs); each needs up to 32 "
        "bytes per sample",
    )
    parser.add_argument(
        "--shard",
        default="0/1",
        metavar="I/N",
        help="prepare only shard I, from 0 to N - 1, of the data sets, which are distributed by the size of "
        "their .idx files; 'slurm': the shard of this task of an array job",
    )
    return parser


@exit_on_interrupt()
@exit_on_user_error()
def main(argv: Sequence[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    with arguments.mistakes.collect():
        shard = parse_shard(arguments.shard, os.environ)
    words = run_flags(arguments.training, arguments.script, None)
    with arguments.mistakes.collect():
        check_batch_size(words, "parallel.world_size")
    config = read_command_line(words, {}, mistakes=arguments.mistakes).config
    if config.data.mock_data:
        raise ConfigError("--mock-data: mock data have no indices, so there is nothing to prepare")
    if not token_file_prefixes(config.data):
        raise ConfigError("--data-path is missing: set it as in the run")
    start = time.monotonic()
    stamp = verify_token_files(config.data, shard)
    length, _, origin = planned_length(config)
    if config.checkpoint.load is not None:
        print(printable(f"--load      {origin}"))
    check_index_memory(config, length, host_memory_bytes())
    samples = length.samples_per_split(config)
    where = (config.data, config.model.seq_length, config.training.seed, samples)
    found, built = prepare_index_files(*where, stamp, arguments.threads, reads_back=True)
    if not stamp.write():
        raise UserError(f"{stamp.path} cannot be written: set --data-cache-path to a different folder")
    print(
        printable(
            f"{len({prefix for _, prefix in stamp.prefixes}):,} data set(s), {found:,} indices: {built:,} "
            f"built, {found - built:,} kept; took {time.monotonic() - start:.1f} s; {stamp.path}"
        )
    )


if __name__ == "__main__":
    main()
