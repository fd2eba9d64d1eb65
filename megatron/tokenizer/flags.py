"""The tokenizer's flags, for the tools; `pretrain_gpt.py` has the same ones from `DataConfig`."""

from __future__ import annotations

import argparse

from megatron.tokenizer.factory import TOKENIZER_TYPES


def add_tokenizer_flags(parser: argparse.ArgumentParser, title: str = "tokenizer") -> argparse._ArgumentGroup:
    """Add the group of flags to `parser`, whose result then satisfies `TokenizerFlags`; return the group."""
    group = parser.add_argument_group(title)
    group.add_argument(
        "--tokenizer-type", choices=TOKENIZER_TYPES, help="default: the one that the files fit"
    )
    group.add_argument("--vocab-file", help="GPT-2's vocab.json")
    group.add_argument("--merge-file", help="GPT-2's merges.txt")
    group.add_argument("--tokenizer-name-or-path", help="folder of a Hugging Face tokenizer")
    group.add_argument("--tokenizer-model", help="SentencePiece .model file")
    return group
