"""Tokenizes many texts: with gigatoken (https://github.com/marcelroed/gigatoken), word by word, or with the
tokenizer's own library. The first two ways are faster than the library; while they run, some texts are
compared with the library."""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.errors import UserError
from megatron.tokenizer.base import Tokenizer

# Number of texts that are compared in the first batch of a file. In every other batch one text is compared.
COMPARED_AT_FIRST = 20
# Number of characters of a text that are compared, so that the comparison takes a small part of the time.
COMPARED_CHARACTERS = 10_000

Encoded = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
"""The concatenated ids of several texts, and the number of tokens of each text."""


def finder_of(tokens: Iterable[str]) -> Callable[[str], list[str]]:
    """Returns a function that lists the occurrences of tokens in a text. If several tokens match at a place,
    the function lists the longest."""
    longest_first = sorted(tokens, key=len, reverse=True)
    find_all = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)").findall
    # Searching for single tokens is much faster than the expression, and most texts contain none.
    return lambda text: find_all(text) if any(token in text for token in longest_first) else []


class TextsEncoder(Protocol):
    """Tokenizes several texts."""

    def encode(self, texts: Sequence[str], is_first: bool) -> Encoded:
        """Returns the tokens of the texts of a batch. is_first: whether it is the first batch of a file."""


class ReferenceEncoder:
    """Tokenizes with the tokenizer's own library."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, texts: Sequence[str], is_first: bool) -> Encoded:
        documents = self.tokenizer.tokenize_batch(texts) if texts else []
        sizes = np.array([len(ids) for ids in documents], dtype=np.int64)
        return np.fromiter(chain.from_iterable(documents), np.int64, int(sizes.sum())), sizes


class ComparedEncoder(ABC):
    """Tokenizes in a different way from the tokenizer's library, and compares some texts with the library.

    The library tokenizes texts that contain special tokens as ordinary text (`Tokenizer.parse_special`).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.literals = () if getattr(tokenizer, "parse_special", True) else tuple(tokenizer.special_tokens)
        self._find_literals = finder_of(self.literals)

    @abstractmethod
    def encode_texts(self, texts: Sequence[str]) -> Encoded:
        """Returns the tokens of at least one text. No text contains any of `literals`."""

    def _encode_all(self, texts: Sequence[str]) -> Encoded:
        is_literal = [bool(self._find_literals(text)) for text in texts]
        if not any(is_literal):
            return self.encode_texts(texts)
        others = [text for text, literal in zip(texts, is_literal, strict=True) if not literal]
        ids, sizes = self.encode_texts(others) if others else (np.empty(0, np.int64), np.empty(0, np.int64))
        parts = iter(np.split(ids, np.cumsum(sizes)[:-1]))
        documents = [
            np.array(self.tokenizer.tokenize(text), np.int64) if literal else next(parts)
            for text, literal in zip(texts, is_literal, strict=True)
        ]
        return np.concatenate(documents), np.array([len(ids) for ids in documents], np.int64)

    def encode(self, texts: Sequence[str], is_first: bool) -> Encoded:
        if not texts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        ids, sizes = self._encode_all(texts)
        ends = np.cumsum(sizes)
        compared: Sequence[int] = range(min(len(texts), COMPARED_AT_FIRST))
        if not is_first:
            # The content chooses the text, so that the choice does not depend on the number of workers.
            compared = [random.Random(texts[0][:COMPARED_CHARACTERS]).randrange(len(texts))]
        for index in compared:
            self._compare(texts[index], ids[ends[index] - sizes[index] : ends[index]])
        return ids, sizes

    def _compare(self, text: str, ids: npt.NDArray[Any]) -> None:
        if len(text) > COMPARED_CHARACTERS:
            text = text[:COMPARED_CHARACTERS]
            ids, _ = self._encode_all([text])
        if self.tokenizer.tokenize(text) != ids.tolist():
            raise UserError(
                "--tokenizer-backend: gigatoken and words give other token ids than the tokenizer's own "
                f"library for the text {text!r:.80}: set --tokenizer-backend reference"
            )


class GigatokenEncoder(ComparedEncoder):
    """Tokenizes with gigatoken in one thread. Raises ValueError if gigatoken does not support the
    tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            import awkward  # noqa: F401 (`encode_texts` needs it)
            import gigatoken
        except ImportError as error:
            raise ValueError(f"the package is not installed: pip install gigatoken ({error})") from error

        super().__init__(tokenizer)
        source = getattr(tokenizer, "source", None)
        try:
            if isinstance(source, bytes):
                self._fast = gigatoken.Tokenizer.from_sentencepiece(source)
            else:
                self._fast = gigatoken.Tokenizer(source)  # type: ignore[arg-type]
        except Exception as error:  # gigatoken's Rust part raises errors of many types
            raise ValueError(str(error)) from error

    def encode_texts(self, texts: Sequence[str]) -> Encoded:
        import awkward

        found = self._fast.encode_batch(list(texts), parallel=False)
        sizes = awkward.to_numpy(awkward.num(found)).astype(np.int64)
        return awkward.to_numpy(awkward.flatten(found)), sizes
