"""The choices of --tokenizer-backend."""

from __future__ import annotations

from megatron.errors import UserError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.fast import GigatokenEncoder, ReferenceEncoder, TextsEncoder

# After auto, the backends are ordered from the fastest to the slowest.
BACKENDS = ("auto", "gigatoken", "words", "reference")


def texts_encoder(tokenizer: Tokenizer, backend: str) -> TextsEncoder:
    """Returns the encoder of a --tokenizer-backend; for 'auto', the first backend that supports the
    tokenizer. Raises UserError if the backend does not support it."""
    for name in BACKENDS[1:] if backend == "auto" else (backend,):
        try:
            return _new_encoder(name, tokenizer)
        except ValueError as error:
            if backend != "auto":
                raise UserError(
                    f"--tokenizer-backend {backend} does not support this tokenizer ({error}): set "
                    "--tokenizer-backend reference"
                ) from error
    raise AssertionError("the reference supports every tokenizer")


def _new_encoder(name: str, tokenizer: Tokenizer) -> TextsEncoder:
    if name == "gigatoken":
        return GigatokenEncoder(tokenizer)
    if name == "words":
        # The import is late, because only such a tokenizer needs the library tokenizers.
        from megatron.tokenizer.words import WordEncoder

        return WordEncoder(tokenizer)
    return ReferenceEncoder(tokenizer)
