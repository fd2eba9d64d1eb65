"""Verifies and summarizes .bin/.idx pairs, and finds samples of a run in them.

    python tools/verify_dataset.py data/text_text_document
    python tools/verify_dataset.py data/text_text_document data/code_text_document --html data.html
    python tools/verify_dataset.py --sample 81920 --data-path 0.3 A 0.7 B --seq-length 2048 ...

The tool checks the header, sizes, offsets and document boundaries of the .idx file and the length of the .bin
file. If the pair has a vocabulary record, the tool also checks that every token id is in the vocabulary, and
that the SHA-256 of the .bin file is the recorded one. It reads both files completely. The exit code is 2 if a
data set is damaged; the error names the file.

--html writes a page for a browser with the lengths of documents, tokens and duplicates per data set, and the
beginnings of documents. With the flags of the tokenizer, the page has decoded texts and bytes per token.

--sample I takes the flags of a run (all flags of pretrain_gpt.py are accepted) and prints the data set, the
documents and their tokens that make up sample I of the run, and its text if the flags name a tokenizer. The
tool builds the index files of the data set if the run has not built them yet.
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron.arguments import read_command_line
from megatron.checkpoint.lineage.start import check_load_folder
from megatron.checkpoint.selection import planned_length
from megatron.config import Config
from megatron.config.config import settings_of_section
from megatron.config.flag_parser import make_parser
from megatron.config.foreign_flags import rewrite
from megatron.config.mistakes import Mistakes
from megatron.config.tool_parser import FLAG, ToolParser
from megatron.data.flags import SPLIT_NAMES
from megatron.data.gpt_dataset import find_sample, requested_groups
from megatron.data.indexed_dataset import LOSS_MASK_KEY, IndexedDataset, check_loss_mask, data_path
from megatron.data.statistics import dataset_statistics
from megatron.engine.deepspeed_config import with_curriculum
from megatron.errors import USER_ERROR_EXIT_CODE, ConfigError, UserError, exit_on_user_error, printable
from megatron.planner.command import check_batch_size, without_settings
from megatron.planner.page import write_page
from megatron.text_table import format_table
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.flags import add_tokenizer_flags, tokenizer_settings
from megatron.tokenizer.vocabulary_record import check_record, read_record, record_path, vocabulary_digest

BLOCK_TOKENS = 1 << 24
# Flags that a run needs and that do not change its data. The user's flags come after them.
_DEFAULT_FLAGS = (
    *("--dry-run", "--num-layers", "1", "--hidden-size", "64", "--num-attention-heads", "1", "--lr", "1"),
    *("--position-embedding-type", "rotary", "--micro-batch-size", "1"),
)


class VerifyParser(ToolParser):
    """The parser of this tool. With --sample, `run` in its result is the configuration of the run."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        words = list(sys.argv[1:] if args is None else args)
        if "--help" not in words and any(word.partition("=")[0] == "--sample" for word in words):
            own = ToolParser(None)
            _add_sample_flags(own)
            mistakes = Mistakes()
            sampled, run = own.collect_known(words, mistakes)
            if run and not FLAG.match(run[0]):
                raise ConfigError(
                    f"PREFIX {run[0]} with --sample: a sample is of the data sets of a run. Remove {run[0]} "
                    "and set the flags of the run (--data-path, --seq-length, ...), or remove --sample"
                )
            make_parser().collect(run, mistakes)
            sampled.run = sampled_run(run, mistakes)
            return sampled
        return super().parse_args(words, namespace)

    def check_values(self, parsed: argparse.Namespace, mistakes: Mistakes) -> None:
        if parsed.subset != "train":
            mistakes.add(f"--subset {parsed.subset} is for --sample: set --sample, or remove it")
        if not parsed.prefixes:
            mistakes.add("no data set: give its prefix, or --sample with the flags of a run")
        if parsed.html is None and tokenizer_settings(parsed):
            mistakes.add("the flags of the tokenizer are for --html and --sample: set --html, or remove them")


def _add_sample_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sample",
        type=int,
        metavar="I",
        help="number of a sample of the run, counted from 0; needs the flags of the run",
    )
    parser.add_argument(
        "--subset", choices=SPLIT_NAMES, default="train", help="split whose samples --sample counts"
    )


def build_parser() -> ToolParser:
    parser = VerifyParser(__doc__)
    parser.add_argument("prefixes", nargs="*", metavar="PREFIX", help="data sets, without .bin and .idx")
    parser.add_argument(
        "--html", metavar="FILE", help="write a page with statistics and examples to this file"
    )
    _add_sample_flags(parser)
    add_tokenizer_flags(parser, "tokenizer, for the texts in --html")
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


def verify_loss_mask(dataset: IndexedDataset, record: dict[str, Any]) -> str | None:
    """Reads the loss mask and returns its summary; None without a loss mask. Raises UserError that names the
    damaged file."""
    check_loss_mask(dataset, record)
    if (mask := dataset.loss_mask) is None:
        return None
    _, largest, digest = read_tokens(mask)
    path = data_path(mask.prefix)
    if largest > 1:
        raise UserError(f"{path}: damaged, it has the number {largest}, expected 0 or 1")
    check_digest(path, digest, record.get(LOSS_MASK_KEY), dataset.prefix)
    counted = np.count_nonzero(np.memmap(path, mode="r", dtype=mask.dtype))
    return f"loss mask   {counted:,} tokens count in the loss"


def check_digest(path: str, digest: str, expected: Any, prefix: str) -> None:
    """Raises UserError unless the SHA-256 of a file is `expected`, from the record of `prefix`. expected:
    None to accept any digest."""
    if expected not in (None, digest):
        raise UserError(
            f"{path}: damaged or replaced, its SHA-256 is {digest[:12]}, expected {str(expected)[:12]} by "
            f"{record_path(prefix)}"
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
        check_digest(data_path(prefix), digest, record.get("bin_sha256"), prefix)
        lines.append(
            f"vocabulary  {record['tokenizer_type']}, {record['vocab_size']:,} tokens, SHA-256 "
            f"{record['vocabulary_sha256'][:12]}"
        )
        if isinstance(record.get("eod"), int):
            lines.append(
                f"            {ends_of_documents(dataset, record['eod']):,} documents end with the "
                f"end-of-document token, {record['eod']:,}"
            )
    if mask := verify_loss_mask(dataset, record or {}):
        lines.append(mask)
    return "\n".join(lines)


def report(prefix: str) -> bool:
    """Prints the summary or the error of a data set; returns whether it is intact."""
    try:
        print(verify(prefix), flush=True)
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr, flush=True)
        return False
    return True


def sampled_run(words: Sequence[str], mistakes: Mistakes) -> Config:
    """Returns the configuration of the run with these flags, with a small model on one process, because
    neither the model nor the layout changes the order of the samples. mistakes: mistakes that were found
    before. Raises ConfigError with all mistakes."""
    words = rewrite(words)[0]
    with mistakes.collect():
        check_batch_size(words)
    dropped = {setting.name for setting in (*settings_of_section("model"), *settings_of_section("parallel"))}
    kept = without_settings(words, dropped - {"model.seq_length", "parallel.zero_stage"})
    return with_curriculum(
        read_command_line([*_DEFAULT_FLAGS, *kept], {}, reads_files=False, mistakes=mistakes).config
    )


def sample_report(i: int, subset: str, config: Config) -> Iterator[str]:
    """Yields a text about sample i of the run, or one text for each weighted group of the subset. Raises
    UserError for a sample outside the run."""
    data, seq_length = config.data, config.model.seq_length
    length, checkpoint, origin = planned_length(config)
    if checkpoint is None:
        check_load_folder(config)
    if config.checkpoint.load is not None:
        yield f"--load {origin}"
    # The training data of a run may begin at a later sample.
    number = i - data.data_first_sample if subset == "train" else i
    groups = requested_groups(data, seq_length, length.samples_per_split(config))[SPLIT_NAMES.index(subset)]
    if not groups:
        raise UserError(f"--sample {i} --subset {subset}: a run with these flags reads no {subset} data")
    has_tokenizer = data.tokenizer_type is not None
    tokenizer = build_tokenizer(data, config.model.vocab_size) if has_tokenizer else None
    for group, num_samples in groups:
        if not 0 <= number < num_samples:
            raise UserError(
                f"--sample {i}: the run reads {num_samples:,} samples of {group.name}, expected "
                f"{i - number} to {i - number + num_samples - 1}"
            )
        found = find_sample(data, group, num_samples, seq_length, config.training.seed, number)
        dataset, plan = found.dataset.dataset, found.plan
        epoch = found.number * seq_length // plan.tokens_per_epoch + 1
        yield (
            f"sample {i:,} of {group.name} is sample {found.number:,} of {dataset.prefix}, in epoch "
            f"{epoch} of {plan.num_epochs}"
        )
        rows = [["document", "tokens", "of"]]
        for document, start, end in found.dataset.parts(found.number):
            if end > start:
                rows.append([f"{document:,}", f"[{start:,}, {end:,})", f"{dataset.sizes[document]:,}"])
        yield format_table(rows, left_align=())
        if (mask := found.dataset.sample(found.number).loss_mask) is not None:
            yield f"{np.count_nonzero(mask[1:]):,} of {seq_length:,} tokens count in the loss"
        if tokenizer is not None:
            yield f"text\n{tokenizer.detokenize(found.dataset[found.number].tolist())}"


def write_statistics(prefixes: Sequence[str], arguments: argparse.Namespace, words: Sequence[str]) -> None:
    """Writes the page of --html about intact data sets. words: words of the command line. Raises UserError
    for a tokenizer that did not make the data, and for a file that cannot be written."""
    tokenizer: Tokenizer | None = None
    if tokenizer_settings(arguments):
        tokenizer = build_tokenizer(arguments)
        digest = vocabulary_digest(tokenizer)
        for prefix in prefixes:
            check_record(prefix, "PREFIX", digest)
    data = dataset_statistics(
        [IndexedDataset(prefix, "PREFIX", verify=False) for prefix in prefixes], tokenizer
    )
    command = shlex.join(["tools/verify_dataset.py", *words])
    write_page(Path(arguments.html), "data", command, data)
    print(f"page        {arguments.html}")


def main(argv: Sequence[str] | None = None) -> None:
    """Verifies all data sets, or finds a sample. Exits with code 2 if a data set is damaged."""
    with exit_on_user_error():
        arguments = build_parser().parse_args(argv)
        if arguments.sample is not None:
            for text in sample_report(arguments.sample, arguments.subset, arguments.run):
                print(printable(text))
            return
    intact = [prefix for prefix in arguments.prefixes if report(prefix)]
    with exit_on_user_error():
        if arguments.html is not None and intact:
            write_statistics(intact, arguments, sys.argv[1:] if argv is None else argv)
    if len(intact) < len(arguments.prefixes):
        sys.exit(USER_ERROR_EXIT_CODE)


if __name__ == "__main__":
    main()
