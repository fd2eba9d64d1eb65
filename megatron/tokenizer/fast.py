"""Tokenizing with gigatoken (https://github.com/marcelroed/gigatoken), which is many times faster than the
libraries of the tokenizers, and is compared with them while it runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.errors import UserError
from megatron.tokenizer.base import Tokenizer

BACKENDS = ("auto", "gigatoken", "reference")
# Of the first batch of a file this many texts are compared, of each other batch one.
COMPARED_AT_FIRST = 20
# Longer texts are compared only up to this number of characters, so that a comparison takes a small part of
# the time.
COMPARED_CHARACTERS = 10_000

Encoded = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
"""The concatenated ids of several texts, and the number of tokens of each text."""


class TextsEncoder(Protocol):
    """Tokenizes several texts."""

    def encode(self, texts: Sequence[str], is_first: bool) -> Encoded:
        """Tokenizes the texts of a batch. is_first: whether it is the first batch of a file."""


class ReferenceEncoder:
    """Tokenizes with the library of the tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, texts: Sequence[str], is_first: bool) -> Encoded:
        documents = self.tokenizer.tokenize_batch(texts) if texts else []
        sizes = np.array([len(ids) for ids in documents], dtype=np.int64)
        return np.fromiter(chain.from_iterable(documents), np.int64, int(sizes.sum())), sizes


class GigatokenEncoder:
    """Tokenizes with gigatoken in one thread, and compares some texts with the tokenizer's library.

    Raises ValueError if gigatoken does not support the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        import gigatoken

        self.tokenizer = tokenizer
        source = getattr(tokenizer, "source", None)
        try:
            if isinstance(source, bytes):
                self._fast = gigatoken.Tokenizer.from_sentencepiece(source)
            else:
                self._fast = gigatoken.Tokenizer(source)  # type: ignore[arg-type]
        except Exception as error:  # its Rust part raises errors of many types
            raise ValueError(f"gigatoken does not support this tokenizer ({error})") from error

    def encode(self, texts: Sequence[str], is_first: bool) -> Encoded:
        if not texts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        import awkward

        found = self._fast.encode_batch(list(texts), parallel=False)
        compared: Sequence[int] = range(min(len(texts), COMPARED_AT_FIRST))
        if (
            not is_first
        ):  # a text that depends on the content, so that no run depends on the number of workers
            compared = [random.Random(texts[0]).randrange(len(texts))]
        for index in compared:
            self._compare(texts[index], found[index])
        sizes = awkward.to_numpy(awkward.num(found)).astype(np.int64)
        return awkward.to_numpy(awkward.flatten(found)), sizes

    def _compare(self, text: str, ids: Any) -> None:
        if len(text) > COMPARED_CHARACTERS:
            text = text[:COMPARED_CHARACTERS]
            ids = self._fast.encode(text)
        if self.tokenizer.tokenize(text) != np.asarray(ids).tolist():
            raise UserError(
                "gigatoken gives other token ids than the tokenizer's own library for the text "
                f"{text!r:.80}: set --tokenizer-backend reference"
            )


def texts_encoder(tokenizer: Tokenizer, backend: str) -> TextsEncoder:
    """Returns the encoder of --tokenizer-backend. 'auto' is gigatoken if it is installed and supports the
    tokenizer. Raises UserError if 'gigatoken' cannot be used."""
    if backend == "reference":
        return ReferenceEncoder(tokenizer)
    if find_spec("gigatoken") is None:
        if backend == "auto":
            return ReferenceEncoder(tokenizer)
        raise UserError("--tokenizer-backend gigatoken: the package is not installed: pip install gigatoken")
    try:
        return GigatokenEncoder(tokenizer)
    except ValueError as error:
        if backend == "auto":
            return ReferenceEncoder(tokenizer)
        raise UserError(
            f"--tokenizer-backend gigatoken: {error}: set --tokenizer-backend reference"
        ) from error
