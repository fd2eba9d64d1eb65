#!/usr/bin/env python
"""Train a byte-level BPE, as GPT-2's, on jsonl or plain text files.

    python tools/train_tokenizer.py --input text.jsonl --vocab-size 32768 --output-dir tokenizer

writes tokenizer/vocab.json and tokenizer/merges.txt, for --vocab-file and --merge-file. The vocabulary has
all 256 bytes, so that any text can be written in it, and <|endoftext|> (id 0), which ends a document.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tokenizers import ByteLevelBPETokenizer

from megatron.config import ConfigError, exit_on_config_error
from megatron.config.tool_parser import ToolParser
from megatron.data.preprocessing import MAX_LINE_BYTES, parse_line, read_batches
from megatron.tokenizer.gpt2_bpe import END_OF_TEXT

BYTE_SYMBOLS = 256
SMALLEST_VOCABULARY = BYTE_SYMBOLS + 1  # the bytes and <|endoftext|>


def build_parser() -> ToolParser:
    """The flags."""
    parser = ToolParser(__doc__)
    parser.add_argument(
        "--input", nargs="+", required=True, help="files, plain or .gz; jsonl where the name has .jsonl"
    )
    parser.add_argument(
        "--json-key", default="text", help="key whose text is taken from jsonl (default: text)"
    )
    parser.add_argument("--vocab-size", type=int, required=True, help="tokens, <|endoftext|> included")
    parser.add_argument("--output-dir", required=True, help="folder for vocab.json and merges.txt")
    parser.add_argument(
        "--min-frequency", type=int, default=2, help="rarer pairs are not merged (default: 2)"
    )
    return parser


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise a ConfigError for what would fail only after the work has begun."""
    if arguments.vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"--vocab-size is {arguments.vocab_size}, expected at least {SMALLEST_VOCABULARY}: "
            f"the {BYTE_SYMBOLS} bytes and {END_OF_TEXT}"
        )
    if arguments.min_frequency < 1:
        raise ConfigError(f"--min-frequency is {arguments.min_frequency}, expected 1 or more")
    for path in arguments.input:
        if not os.path.isfile(path):
            raise ConfigError(f"--input {path}: no such file")
        if not os.access(path, os.R_OK):
            raise ConfigError(f"--input {path}: the file cannot be read by this user")


def read_texts(path: str, json_key: str) -> Iterator[str]:
    """The documents of a jsonl file, or pieces of a text file; ConfigError names a bad line."""
    is_jsonl = ".jsonl" in os.path.basename(path)
    for batch in read_batches([path]):
        if not is_jsonl:
            for number, line in enumerate(batch.lines, batch.first_line):
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"--input {path}, line {number}: longer than {MAX_LINE_BYTES:,} bytes")
            yield b"".join(batch.lines).decode(errors="replace")
            continue
        for number, line in enumerate(batch.lines, batch.first_line):
            if not line.strip():
                continue
            fields = parse_line(line, [json_key])
            if isinstance(fields, str):
                raise ConfigError(
                    f"--input {path}, line {number}: {fields} (--json-key names the text's key)"
                )
            yield fields[0]


def run(argv: Sequence[str] | None) -> None:
    """Do the work; ConfigError for a user's mistake."""
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
    except Exception as error:  # the library raises bare Exception for a folder that it cannot write to
        raise ConfigError(f"--output-dir {folder} cannot be written to ({error})") from error
    if size < arguments.vocab_size:
        print(f"the text has pairs for {size:,} tokens only, not {arguments.vocab_size:,}", file=sys.stderr)
    print(f"wrote {folder / 'vocab.json'} and merges.txt: {size:,} tokens, {time.monotonic() - start:.1f} s")


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with code 2, and one sentence, for a user's mistake."""
    with exit_on_config_error():
        run(argv)


if __name__ == "__main__":
    main()
