"""Tokenizes jsonl text into the .bin and .idx files that training reads.

    python tools/preprocess_data.py --input text.jsonl --output-prefix data/text \\
        --vocab-file vocab.json --merge-file merges.txt --append-eod --workers 2

The example writes data/text_text_document.bin and .idx. Train with --data-path data/text_text_document.

If the output prefix ends with /, it is a folder, and each input gets its own files in it. --shard divides the
inputs among processes:

    python tools/preprocess_data.py --input 'corpus/*.jsonl.zst' --output-prefix tokens/ --shard 0/4 ...

If you run the command again, it keeps existing files that were made from equal inputs with equal settings.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from tqdm import tqdm

from megatron.config.mistakes import Mistakes
from megatron.config.tool_parser import ToolParser, at_least_1, check_output_prefix, exit_on_interrupt
from megatron.data.preprocessing import Progress, preprocess
from megatron.data.text_files import files_of_shard, find_files, parse_shard, size_of
from megatron.errors import UserError, exit_on_user_error
from megatron.object_store.store import is_url
from megatron.text_table import first_few
from megatron.tokenizer.backends import BACKENDS
from megatron.tokenizer.flags import add_parse_special_flag, add_tokenizer_flags

SKIPPED_LINES_SHOWN = 5


def build_parser() -> ToolParser:
    """Returns the parser, with the flags of Megatron-LM's tool."""
    parser = ToolParser(__doc__)
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="inputs, which are read in this order: jsonl files (plain, .gz, .zst) and .parquet files, "
        "patterns such as 'corpus/*.jsonl', folders, their URLs such as 's3://bucket/corpus/*.jsonl.zst', - "
        "(standard input), or @LIST, a file with one input per line",
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="JSON keys of the texts (default: text); each key becomes a pair of files\n"
        "messages: chats, which are lists of objects with role and content; only the assistant's messages "
        "count in the loss\n"
        "prompt completion: one pair of files, in which only completions count in the loss",
    )
    group.add_argument(
        "--skip-bad-lines",
        action="store_true",
        help="skip and count invalid lines (without the flag, an invalid line is an error)",
    )
    group.add_argument(
        "--shard",
        metavar="I/N",
        help="tokenize only shard I, from 0 to N - 1, of the inputs, which are distributed by bytes; "
        "'slurm': the shard of this task of an array job",
    )
    group = add_tokenizer_flags(parser)
    group.add_argument(
        "--append-eod", action="store_true", help="end each document with the end-of-document token"
    )
    add_parse_special_flag(group, "texts")
    group.add_argument(
        "--tokenizer-backend",
        choices=BACKENDS,
        default="auto",
        help="library that tokenizes\n"
        "gigatoken: this package, which is many times faster; texts of each file are tokenized with the "
        "tokenizer's own library, too, and compared\n"
        "words: the tokenizer's own library with a table of words, for byte-level BPE; texts are compared "
        "as for gigatoken\n"
        "reference: only the tokenizer's own library; a line takes up to 130 times its size in memory\n"
        "auto: the first of these backends that is installed and supports the tokenizer (default)",
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="write PREFIX_KEY_document.bin and .idx. If the prefix ends with /, it is a folder that gets "
        "such files for each input",
    )
    group.add_argument("--dataset-impl", default="mmap", choices=["mmap"], help="format of the files")
    group = parser.add_argument_group("execution")
    group.add_argument("--workers", type=at_least_1, default=1, help="number of processes that tokenize")
    group.add_argument(
        "--log-interval",
        type=at_least_1,
        default=10000,
        help="number of input lines between two progress lines",
    )
    return parser


def check_arguments(arguments: argparse.Namespace, mistakes: Mistakes) -> None:
    """Finds the input files and makes the output folder. Raises ConfigError with all mistakes."""
    prefix, words, shard = arguments.output_prefix or "", arguments.input or (), None
    if is_url(prefix):
        mistakes.add(
            f"--output-prefix {prefix}: expected a path, training maps token files into memory: copy them "
            "to the store afterwards"
        )
    elif not prefix.endswith("/"):
        with mistakes.collect():
            check_output_prefix(prefix)
        if arguments.shard is not None:
            mistakes.add(
                f"--shard {arguments.shard}: the shards would all write {prefix}_*: give a folder, "
                f"--output-prefix {prefix}/"
            )
    with mistakes.collect():
        arguments.input = find_files(words)
    if arguments.shard is not None:
        with mistakes.collect():
            shard = parse_shard(arguments.shard, os.environ)
    mistakes.raise_all()
    if shard is not None:
        arguments.input = files_of_shard(arguments.input, *shard)
    if prefix.endswith("/"):
        try:
            os.makedirs(prefix, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output-prefix {prefix}: cannot make the folder ({error.strerror})") from error


@contextmanager
def progress_report(inputs: Sequence[str], log_interval: int) -> Iterator[Callable[[Progress], None]]:
    """Yields a function that shows the progress. On a terminal it draws a bar, without a total if an input is
    compressed. Otherwise it prints a line every `log_interval` input lines."""
    start, next_line = time.monotonic(), log_interval

    def print_line(progress: Progress) -> None:
        nonlocal next_line
        if progress.lines >= next_line:
            next_line = progress.lines + log_interval
            print(f"processed {progress.lines:,} documents, {speed(progress, start)}", flush=True)

    if not sys.stdout.isatty():
        yield print_line
        return
    compressed = any(path.endswith((".gz", ".zst", ".parquet")) for path in inputs)
    with tqdm(
        total=None if compressed else sum(map(size_of, inputs)),
        desc="tokenizing",
        unit="B",
        unit_scale=True,
        file=sys.stdout,
        dynamic_ncols=True,
        bar_format="{desc}: |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    ) as bar:

        def move_bar(progress: Progress) -> None:
            bar.set_postfix_str(speed(progress, start), refresh=False)
            bar.update(progress.input_bytes - bar.n)

        yield move_bar


def speed(progress: Progress, start: float) -> str:
    """Returns a text with the throughput since `start`: input in MB/s, and documents per second."""
    seconds = max(time.monotonic() - start, 1e-9)
    return f"{progress.input_bytes / 1e6 / seconds:.2f} MB/s, {progress.lines / seconds:,.0f} docs/s"


@exit_on_interrupt()
@exit_on_user_error()
def main(argv: Sequence[str] | None = None) -> None:
    mistakes = Mistakes()
    arguments = build_parser().collect(sys.argv[1:] if argv is None else argv, mistakes)
    check_arguments(arguments, mistakes)
    start = time.monotonic()
    with progress_report(arguments.input, arguments.log_interval) as report:
        progress = preprocess(
            arguments.input,
            arguments.output_prefix,
            arguments.json_keys,
            arguments,
            append_eod=arguments.append_eod,
            workers=arguments.workers,
            skip_bad_lines=arguments.skip_bad_lines,
            backend=arguments.tokenizer_backend,
            parse_special=arguments.parse_special_tokens,
            report=report,
            note=partial(tqdm.write, file=sys.stdout),
        )
    if progress.skipped:
        print(f"skipped {len(progress.skipped):,} of {progress.lines:,} lines:", file=sys.stderr)
        for bad_line in progress.skipped[:SKIPPED_LINES_SHOWN]:
            print(f"  {bad_line}", file=sys.stderr)
        if len(progress.skipped) > SKIPPED_LINES_SHOWN:
            print("  ...", file=sys.stderr)
    for key, dropped in progress.empty_documents.items():
        if dropped:
            print(f"dropped {dropped:,} documents without tokens under the key '{key}'", file=sys.stderr)
    kind = "are ordinary text (--parse-special-tokens: their ids)"
    if arguments.parse_special_tokens:
        kind = "became their ids (--parse-special-tokens)"
    for counts, result in (
        (progress.special_tokens, kind),
        (progress.indivisible_tokens, "became their ids where the tokenizer's model has them as words"),
    ):
        if counts:
            named = first_few(f"{count:,} of {token}" for token, count in counts.most_common())
            print(f"{counts.total():,} special tokens in the texts {result}: {named}", file=sys.stderr)
    print(f"took {time.monotonic() - start:.1f} s, {speed(progress, start)}")


if __name__ == "__main__":
    main()
