"""Tokenizers: one class for each --tokenizer-type; each class wraps one library."""

from megatron.tokenizer.base import Tokenizer, TokenizerFlags
from megatron.tokenizer.factory import TOKENIZER_TYPES, build_tokenizer

__all__ = ["TOKENIZER_TYPES", "Tokenizer", "TokenizerFlags", "build_tokenizer"]
