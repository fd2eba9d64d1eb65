"""Builds the tokenizer that the flags select."""

from __future__ import annotations

from megatron.config.fields import option_name
from megatron.config.registries import TOKENIZERS
from megatron.config.sections.data import fitting_tokenizer_types
from megatron.errors import UserError
from megatron.tokenizer.base import Tokenizer, TokenizerFlags, require_setting

TOKENIZER_TYPES = tuple(TOKENIZERS)


def build_tokenizer(
    flags: TokenizerFlags, vocab_size: int | None = None, parse_special: bool = False
) -> Tokenizer:
    """Returns the tokenizer for `flags`, which is a DataConfig or the parsed arguments of a tool. vocab_size:
    the value of --vocab-size. parse_special: see `Tokenizer`.

    Without --tokenizer-type, the given files determine the type. Raises UserError if several types can use
    the given files, for a missing flag, and for a missing or damaged file.
    """
    tokenizer_type = flags.tokenizer_type or _type_from_files(flags)
    values: list[str | int] = [
        require_setting(getattr(flags, name), option_name(name), tokenizer_type)
        for name in TOKENIZERS[tokenizer_type].settings
    ]
    if TOKENIZERS[tokenizer_type].takes_vocab_size:
        if vocab_size is None:
            raise UserError(f"--tokenizer-type {tokenizer_type} without --vocab-size: set another tokenizer")
        values = [vocab_size]
    # Only the library of this tokenizer is imported: each library takes seconds to import.
    tokenizer: Tokenizer = TOKENIZERS.load(tokenizer_type)(*values, parse_special=parse_special)
    return tokenizer


def _type_from_files(flags: TokenizerFlags) -> str:
    possible = fitting_tokenizer_types(flags)
    if len(possible) == 1:
        return possible[0]
    if possible:
        raise UserError(f"the tokenizer files fit {' and '.join(possible)}: choose one with --tokenizer-type")
    raise UserError(
        "no tokenizer is set: set --vocab-file with --merge-file (GPT-2), --tokenizer-name-or-path "
        "(Hugging Face) or --tokenizer-model (SentencePiece)"
    )
