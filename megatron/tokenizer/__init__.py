"""Text to token ids and back: one small class per kind of tokenizer, each over its own library."""

from megatron.tokenizer.base import Tokenizer, TokenizerFlags
from megatron.tokenizer.factory import TOKENIZER_TYPES, build_tokenizer

__all__ = ["TOKENIZER_TYPES", "Tokenizer", "TokenizerFlags", "build_tokenizer"]
