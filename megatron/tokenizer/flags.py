"""The tokenizer flags of the tools. They equal the tokenizer flags of `DataConfig` (`pretrain_gpt.py`)."""

from __future__ import annotations

import argparse

from megatron.config.config import SETTINGS
from megatron.config.fields import option_name
from megatron.config.registries import TOKENIZERS
from megatron.config.sections.data import TOKENIZER_FIELDS
from megatron.errors import UserError
from megatron.tokenizer.base import Tokenizer, TokenizerFlags
from megatron.tokenizer.factory import TOKENIZER_TYPES


def add_tokenizer_flags(parser: argparse.ArgumentParser, title: str = "tokenizer") -> argparse._ArgumentGroup:
    """Adds the tokenizer flags to `parser`. The parsed arguments then satisfy `TokenizerFlags`. Returns their
    group."""
    group = parser.add_argument_group(title)
    spellings = SETTINGS["data.tokenizer_type"].flag.spellings
    group.add_argument(
        "--tokenizer-type",
        type=lambda name: spellings.get(name, name),
        choices=TOKENIZER_TYPES,
        help="default: the type that the given files fit. Names of other programs: "
        + ", ".join(f"{theirs} ({own})" for theirs, own in spellings.items()),
    )
    for name in TOKENIZERS.settings():
        group.add_argument(option_name(name), help=SETTINGS[f"data.{name}"].flag.help)
    return group


def add_parse_special_flag(group: argparse._ArgumentGroup, texts: str) -> None:
    """Adds --parse-special-tokens, which sets `Tokenizer.parse_special`. texts: the texts that it affects."""
    group.add_argument(
        "--parse-special-tokens",
        action="store_true",
        help=f"replace special tokens such as <|endoftext|> in {texts} by their ids (default: they are "
        "ordinary text, as in GPT-2's own encoder)",
    )


def check_parse_special(tokenizer: Tokenizer, is_set: bool) -> None:
    """Raises UserError if --parse-special-tokens is set and the tokenizer does not support it."""
    if is_set and not tokenizer.parse_special:
        raise UserError(
            f"--parse-special-tokens: a {tokenizer.name} reads special tokens in texts as ordinary text: "
            "remove the flag, or use a Hugging Face tokenizer"
        )


def tokenizer_settings(flags: TokenizerFlags) -> dict[str, str]:
    """Returns the tokenizer flags that are set: field of DataConfig -> value."""
    return {name: getattr(flags, name) for name in sorted(TOKENIZER_FIELDS) if getattr(flags, name)}


def tokenizer_flags(flags: TokenizerFlags, default: TokenizerFlags) -> TokenizerFlags:
    """Returns `flags` if any tokenizer flag is set in them, else `default`."""
    return flags if tokenizer_settings(flags) else default
