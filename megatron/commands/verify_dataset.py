"""Verifies and summarizes .bin/.idx pairs.

    python tools/verify_dataset.py data/text_text_document

The tool checks the header, sizes, offsets and document boundaries of the .idx file and the length of the .bin
file. If the pair has a vocabulary record, it also checks that every token id is in the vocabulary, and the
SHA-256 of the .bin file. Both files
are read completely. The exit code is 2 if a data set is damaged; the error names the file.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron.config.tool_parser import ToolParser
from megatron.data.indexed_dataset import IndexedDataset, data_path
from megatron.errors import USER_ERROR_EXIT_CODE, UserError, exit_on_user_error, printable
from megatron.tokenizer.vocabulary_record import read_record, record_path

BLOCK_TOKENS = 1 << 24


def build_parser() -> ToolParser:
    """Returns the parser of the command line."""
    parser = ToolParser(__doc__)
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="data set, without .bin and .idx")
    return parser


def read_tokens(dataset: IndexedDataset) -> tuple[int, int, str]:
    """Returns the smallest and the largest token id, and the SHA-256 of the .bin file. Reads the file, with a
    progress bar on a terminal."""
    tokens = np.memmap(data_path(dataset.prefix), mode="r", dtype=dataset.dtype)
    smallest, largest, digest = int(tokens[0]), int(tokens[0]), hashlib.sha256()
    with tqdm(total=len(tokens), unit="token", unit_scale=True, disable=None) as bar:
        for start in range(0, len(tokens), BLOCK_TOKENS):
            block = tokens[start : start + BLOCK_TOKENS]
            smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
            digest.update(block.data)
            bar.update(len(block))
    return smallest, largest, digest.hexdigest()


def check_token_range(dataset: IndexedDataset, smallest: int, largest: int, record: dict[str, Any]) -> None:
    """Raises UserError if a token id is outside the recorded vocabulary."""
    size = record["vocab_size"]
    if not isinstance(size, int) or size < 1:
        raise UserError(
            f"{record_path(dataset.prefix)}: damaged, vocab_size is {size!r}, expected a number above 0"
        )
    if smallest < 0 or largest >= size:
        raise UserError(
            f"{data_path(dataset.prefix)}: damaged, it has token ids {smallest:,} to {largest:,}, expected 0 "
            f"to {size - 1:,} by {record_path(dataset.prefix)}"
        )


def ends_of_documents(dataset: IndexedDataset, eod: int) -> int:
    """Returns the number of documents that end with the token `eod`."""
    tokens = np.memmap(data_path(dataset.prefix), mode="r", dtype=dataset.dtype)
    ends = dataset.pointers[:] // dataset.dtype.itemsize + dataset.sizes
    return int(np.count_nonzero(tokens[ends[dataset.sizes > 0] - 1] == eod))


def verify(prefix: str) -> str:
    """Verifies a data set and returns its summary. Raises UserError that names the damaged file."""
    dataset = IndexedDataset(prefix, "PREFIX")
    record = read_record(prefix)
    smallest, largest, digest = read_tokens(dataset)
    if smallest < 0:
        raise UserError(f"{data_path(prefix)}: damaged, it has the negative token id {smallest:,}")
    sizes = dataset.sizes
    lines = [
        f"{prefix}: intact",
        f"documents   {len(dataset):,}, of {sizes.min():,} to {sizes.max():,} tokens, "
        f"{dataset.num_tokens / len(dataset):,.1f} on average; {np.count_nonzero(sizes == 0):,} empty",
        f"tokens      {dataset.num_tokens:,} of type {dataset.dtype}, ids {smallest:,} to {largest:,}",
    ]
    if record is None:
        lines.append("vocabulary  no record: the ids were not compared with a vocabulary")
    else:
        check_token_range(dataset, smallest, largest, record)
        if record.get("bin_sha256", digest) != digest:
            raise UserError(
                f"{data_path(prefix)}: damaged or replaced, its SHA-256 is {digest[:12]}, expected "
                f"{str(record['bin_sha256'])[:12]} by {record_path(prefix)}"
            )
        lines.append(
            f"vocabulary  {record['tokenizer_type']}, {record['vocab_size']:,} tokens, SHA-256 "
            f"{record['vocabulary_sha256'][:12]}"
        )
        if isinstance(record.get("eod"), int):
            lines.append(
                f"            {ends_of_documents(dataset, record['eod']):,} documents end with the "
                f"end-of-document token, {record['eod']:,}"
            )
    return "\n".join(lines)


def report(prefix: str) -> bool:
    """Prints the summary or the error of a data set; returns whether it is intact."""
    try:
        print(verify(prefix), flush=True)
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr, flush=True)
        return False
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Verifies all data sets. Exits with code 2 if one is damaged, or for a user's mistake."""
    with exit_on_user_error():
        prefixes = build_parser().parse_args(argv).prefixes
    if not all([report(prefix) for prefix in prefixes]):
        sys.exit(USER_ERROR_EXIT_CODE)


if __name__ == "__main__":
    main()
