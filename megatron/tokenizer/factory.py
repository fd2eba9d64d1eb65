"""From flags to a tokenizer."""

from __future__ import annotations

from megatron.config import ConfigError
from megatron.config.fields import option_name
from megatron.config.registries import TOKENIZERS
from megatron.config.sections.data import fitting_tokenizer_types
from megatron.tokenizer.base import Tokenizer, TokenizerFlags, require_setting

TOKENIZER_TYPES = tuple(TOKENIZERS)


def build_tokenizer(flags: TokenizerFlags) -> Tokenizer:
    """Make the tokenizer that `flags` (a DataConfig, or a tool's arguments) describe.

    Without --tokenizer-type the kind follows from the files that are given, if only one kind can use them.
    Raises ConfigError for an unknown type, a missing flag, and a missing or damaged file.
    """
    tokenizer_type = flags.tokenizer_type or _type_from_files(flags)
    values = [
        require_setting(getattr(flags, name), option_name(name), tokenizer_type)
        for name in TOKENIZERS[tokenizer_type].settings
    ]
    # The libraries take seconds to import: only this tokenizer's is imported.
    tokenizer: Tokenizer = TOKENIZERS.load(tokenizer_type)(*values)
    return tokenizer


def _type_from_files(flags: TokenizerFlags) -> str:
    possible = fitting_tokenizer_types(flags)
    if len(possible) == 1:
        return possible[0]
    if possible:
        raise ConfigError(
            f"the tokenizer files fit {' and '.join(possible)}: choose one with --tokenizer-type"
        )
    raise ConfigError(
        "no tokenizer is given: use --vocab-file with --merge-file (GPT-2), --tokenizer-name-or-path "
        "(Hugging Face) or --tokenizer-model (SentencePiece)"
    )
