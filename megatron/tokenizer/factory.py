"""From flags to a tokenizer."""

from __future__ import annotations

from megatron.config import ConfigError
from megatron.config.sections.data import TOKENIZER_FILES, fitting_tokenizer_types
from megatron.tokenizer.base import Tokenizer, TokenizerFlags, require_file

GPT2_BPE = "GPT2BPETokenizer"
HUGGING_FACE = "PretrainedFromHF"
SENTENCE_PIECE = "SentencePieceTokenizer"
TOKENIZER_TYPES = tuple(TOKENIZER_FILES)


def build_tokenizer(flags: TokenizerFlags) -> Tokenizer:
    """Make the tokenizer that `flags` (a DataConfig, or a tool's arguments) describe.

    Without --tokenizer-type the kind follows from the files that are given, if only one kind can use them.
    Raises ConfigError for an unknown type, a missing flag, and a missing or damaged file.
    """
    tokenizer_type = flags.tokenizer_type or _type_from_files(flags)
    # The libraries are heavy (transformers takes seconds to import): only the one in need is imported.
    if tokenizer_type == GPT2_BPE:
        from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer

        return GPT2BPETokenizer(
            require_file(flags.vocab_file, "--vocab-file", GPT2_BPE),
            require_file(flags.merge_file, "--merge-file", GPT2_BPE),
        )
    if tokenizer_type == HUGGING_FACE:
        from megatron.tokenizer.hugging_face import HuggingFaceTokenizer

        if not flags.tokenizer_name_or_path:
            raise ConfigError(
                f"--tokenizer-type {HUGGING_FACE} needs --tokenizer-name-or-path, which is not given"
            )
        return HuggingFaceTokenizer(flags.tokenizer_name_or_path)
    if tokenizer_type == SENTENCE_PIECE:
        from megatron.tokenizer.sentence_piece import SentencePieceTokenizer

        return SentencePieceTokenizer(
            require_file(flags.tokenizer_model, "--tokenizer-model", SENTENCE_PIECE)
        )
    raise ConfigError(
        f"--tokenizer-type {tokenizer_type} is unknown, expected one of {', '.join(TOKENIZER_TYPES)}"
    )


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
