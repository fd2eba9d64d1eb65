"""Trains a GPT-2 tokenizer (byte-level BPE) on jsonl or plain text files.

    python tools/train_tokenizer.py --input text.jsonl --vocab-size 32768 --output-dir tokenizer

The example writes tokenizer/vocab.json and tokenizer/merges.txt, for the flags --vocab-file and --merge-file.
The vocabulary includes all 256 bytes, so that the tokenizer can encode any text, and the end-of-document
token <|endoftext|> (id 0).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

from megatron.config.tool_parser import ToolParser, at_least_1
from megatron.data.batch_encoder import parse_line
from megatron.data.text_files import MAX_LINE_BYTES, find_files, read_batches
from megatron.errors import UserError, exit_on_user_error
from megatron.tokenizer.gpt2_bpe import END_OF_TEXT

BYTE_SYMBOLS = 256
MIN_VOCAB_SIZE = BYTE_SYMBOLS + 1  # all bytes and <|endoftext|>


def build_parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="files as for preprocess_data.py; a file whose name contains neither .jsonl nor .parquet is "
        "plain text",
    )
    parser.add_argument("--json-key", default="text", help="JSON key of the text in jsonl files")
    parser.add_argument(
        "--vocab-size", type=int, required=True, help="number of tokens, including <|endoftext|>"
    )
    parser.add_argument("--output-dir", required=True, help="folder for vocab.json and merges.txt")
    parser.add_argument(
        "--min-frequency",
        type=at_least_1,
        default=2,
        help="merge only pairs that occur at least N times",
        metavar="N",
    )
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    if arguments.vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"--vocab-size is {arguments.vocab_size}, expected at least {MIN_VOCAB_SIZE} "
            f"for the {BYTE_SYMBOLS} bytes and {END_OF_TEXT}"
        )
    arguments.input = find_files(arguments.input)


def read_texts(path: str, json_key: str) -> Iterator[str]:
    """Yields the documents of a jsonl file, or parts of a text file. Raises UserError that names an invalid
    line."""
    is_jsonl = ".jsonl" in os.path.basename(path) or path.endswith(".parquet")
    for batch in read_batches([path], [json_key]):
        if not is_jsonl:
            for number, line in enumerate(batch.lines, batch.first_line):
                if len(line) > MAX_LINE_BYTES:
                    raise UserError(f"--input {path}, line {number}: longer than {MAX_LINE_BYTES:,} bytes")
            yield b"".join(batch.lines).decode(errors="replace")
            continue
        for number, line in enumerate(batch.lines, batch.first_line):
            if not line.strip():
                continue
            fields = parse_line(line, [json_key])
            if isinstance(fields, str):
                raise UserError(
                    f"--input {path}, line {number}: {fields} (--json-key sets the key of the text)"
                )
            yield fields[0]


@exit_on_user_error()
def main(argv: Sequence[str] | None = None) -> None:
    arguments = build_parser().parse_args(argv)
    check_arguments(arguments)
    start = time.monotonic()
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        (text for path in arguments.input for text in read_texts(path, arguments.json_key)),
        vocab_size=arguments.vocab_size,
        min_frequency=arguments.min_frequency,
        special_tokens=[END_OF_TEXT],
        show_progress=sys.stdout.isatty(),
    )
    size = tokenizer.get_vocab_size()
    folder = Path(arguments.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_model(str(folder))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"--output-dir {folder}: cannot write to the folder ({error})") from error
    if size < arguments.vocab_size:
        print(
            f"the text has enough pairs for only {size:,} tokens, not {arguments.vocab_size:,}",
            file=sys.stderr,
        )
    print(f"wrote {folder / 'vocab.json'} and merges.txt: {size:,} tokens, {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
