"""Merges several .bin/.idx pairs into one pair, in the order of --input.

    python tools/merge_datasets.py --input data/part1_text_document data/part2_text_document \\
        --output-prefix data/all_text_document

The tool concatenates the bytes of the .bin files and tokenizes nothing again. All inputs must have the same
type of token ids and, if they have vocabulary records, the same vocabulary. To train on several data sets
with weights, list them in --data-path instead.
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
from collections.abc import Sequence

from tqdm import tqdm

from megatron.config.tool_parser import ToolParser, check_output_prefix, exit_on_interrupt
from megatron.data.dataset_builder import IndexedDatasetBuilder, write_errors
from megatron.data.indexed_dataset import IndexedDataset, check_loss_mask, data_path, index_path
from megatron.errors import UserError, exit_on_user_error
from megatron.tokenizer.vocabulary_record import (
    PARSE_SPECIAL_KEY,
    common_digest,
    copy_record,
    read_record,
    record_path,
    remove_record,
)


def build_parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="data sets to merge, without .bin and .idx, or patterns such as 'tokens/*_text_document'. The "
        "data sets of a pattern, except the output, are merged in alphabetical order",
    )
    parser.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="path of the merged data set, without .bin and .idx",
    )
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    output = arguments.output_prefix
    arguments.input = [prefix for word in arguments.input for prefix in _prefixes_of(word, output)]
    if len(arguments.input) < 2:
        raise UserError(f"--input has 1 data set, {arguments.input[0]}: expected at least 2")
    if os.path.realpath(data_path(output)) in [os.path.realpath(data_path(x)) for x in arguments.input]:
        raise UserError(f"--output-prefix {output} is one of the inputs: choose another name")
    check_output_prefix(output)


def _prefixes_of(word: str, output: str) -> list[str]:
    """Returns the data sets that a word of --input names. Raises UserError if there are none."""
    if os.path.isdir(word) and not os.path.exists(index_path(word)):
        pattern = os.path.join(glob.escape(word), "*")
        count = len(glob.glob(index_path(pattern)))
        raise UserError(
            f"--input {word} is a folder with {count} data sets: expected data sets without .bin and .idx; "
            + (f"set '{pattern}' for all of them" if count > 1 else "name at least 2")
        )
    if not glob.has_magic(word) or os.path.exists(index_path(word)):
        return [word]
    found = sorted(path.removesuffix(".idx") for path in glob.glob(index_path(word)))
    own = os.path.realpath(output)
    if not (others := [prefix for prefix in found if os.path.realpath(prefix) != own]):
        raise UserError(f"--input {word}: no data set matches the pattern")
    return others


def merge(inputs: Sequence[str], output: str) -> list[str]:
    """Writes the merged data set, and returns notes for the user. After an error, no file is left."""
    datasets = [IndexedDataset(prefix, "--input") for prefix in inputs]
    common_digest([("--input", prefix) for prefix in inputs])
    records = {prefix: read_record(prefix) for prefix in inputs}
    unrecorded = [prefix for prefix, record in records.items() if record is None]
    parsed = {record.get(PARSE_SPECIAL_KEY) for record in records.values() if record is not None}
    choice = {PARSE_SPECIAL_KEY: True in parsed} if parsed in ({True}, {False}) else {}

    def write_record(digests: dict[str, str]) -> None:
        with write_errors(record_path(output)):
            if unrecorded:
                remove_record(output)
            else:
                copy_record(inputs[0], output, {**choice, **digests})

    num_bytes = sum(os.path.getsize(data_path(prefix)) for prefix in inputs)
    has_mask = [dataset.loss_mask is not None for dataset in datasets]
    if any(has_mask) and not all(has_mask):
        raise UserError(
            f"--input {inputs[has_mask.index(True)]} has a loss mask, {inputs[has_mask.index(False)]} has "
            "none: merge only data of one kind; a run can blend both (--data-path)"
        )
    for dataset in datasets:
        check_loss_mask(dataset, records[dataset.prefix] or {})
    with (
        IndexedDatasetBuilder(output, datasets[0].dtype, all(has_mask)) as builder,
        tqdm(total=num_bytes, unit="B", unit_scale=True, disable=None) as bar,
    ):
        for dataset in datasets:
            builder.add_dataset(dataset, bar.update)
        builder.finalize(write_record)
    notes = [f"no vocabulary record is written, since {unrecorded[0]} has none"] if unrecorded else []
    if len(parsed) > 1:
        notes.append(
            "special tokens in texts became ids in some of the data sets (--parse-special-tokens, or made by "
            "an older version), and ordinary text in others"
        )
    return notes


@exit_on_interrupt()
@exit_on_user_error()
def main(argv: Sequence[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    check_arguments(arguments)
    notes = merge(arguments.input, arguments.output_prefix)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    merged = IndexedDataset(arguments.output_prefix, "--output-prefix")
    print(
        f"{arguments.output_prefix}: {len(merged):,} documents, {merged.num_tokens:,} tokens (.bin and .idx)"
    )


if __name__ == "__main__":
    main()
