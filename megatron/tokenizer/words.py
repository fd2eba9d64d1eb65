"""Tokenizes word by word: a table holds the ids of each word, so the tokenizer's library tokenizes each word
only once.

A byte-level BPE splits a text into words with regular expressions, and merges only within words. So the ids
of a text are the ids of its words in order. Looking up a word is several times faster than merging it again,
and a long document needs no more memory than its words.
"""

from __future__ import annotations

import io
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from operator import methodcaller
from typing import Any

import numpy as np
import regex
import tokenizers
from tokenizers import pre_tokenizers

from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.fast import ComparedEncoder, Encoded

# Largest number of words in a table. A table takes about 200 bytes per word.
MAX_WORDS = 1 << 18
MAX_WORD_CHARACTERS = 100  # longer words are not kept: they rarely occur twice
# Longer words are tokenized in parts of about this many characters: a word takes 130 bytes of memory per
# character.
PART_CHARACTERS = 1 << 15
# The words of longer texts are found one by one, because a list of words takes 12 times as much memory as its
# text.
LISTED_CHARACTERS = 1 << 16
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PROPERTY = re.compile(r"\\p\{(\w+)\}")
_SET_OR_PROPERTY = re.compile(rf"\[(?:\\.|[^\]\\])*\]|{_PROPERTY.pattern}")
# All other Unicode properties have no ASCII characters, or the comparison of characters detects them.
_ASCII_CLASSES = {"L": "a-zA-Z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9", "Nd": "0-9"}
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


class WordEncoder(ComparedEncoder):
    """Tokenizes with a table of words, for byte-level BPE tokenizers of the `tokenizers` library.

    The package `regex` runs the tokenizer's regular expressions, and Python normalizes texts. Their versions
    of Unicode may differ from the library's. Therefore each character is compared with the library when it
    first occurs, and the library tokenizes texts with a character on which the versions may disagree.

    Raises ValueError for a tokenizer if the ids of a text are not known to be the ids of its words.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        source = getattr(tokenizer, "source", None)
        library = getattr(source, "backend_tokenizer", source)
        if not isinstance(library, tokenizers.Tokenizer):
            raise ValueError("it is not one of the library tokenizers")
        model = library.model
        if not isinstance(model, tokenizers.models.BPE) or model.dropout:
            raise ValueError("its model is not a BPE without dropout")
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            raise ValueError("its tokens depend on their place in a word")
        super().__init__(tokenizer)
        if library.encode_special_tokens and not self.literals:
            raise ValueError("it splits special tokens in texts")
        self._normal_form = _normal_form(library)
        patterns = [*_word_patterns(library)]
        self._stages = [_all_words(pattern) for pattern in patterns]
        self._normalize_library = library.normalizer and library.normalizer.normalize_str
        self._split_library = library.pre_tokenizer.pre_tokenize_str
        added = library.get_added_tokens_decoder()
        self._split_at_added, self._split_at_normalized = (
            _splitter([token for token in added.values() if token.normalized == normalized])
            for normalized in (False, True)
        )
        self._dtype = np.dtype(np.int32)
        self._ids_of_added = {token.content: self._bytes([number]) for number, token in added.items()}
        self._ids = _WordTable(model, self._bytes)
        ascii_stages = [
            _all_ascii_words(pattern) or stage for pattern, stage in zip(patterns, self._stages, strict=True)
        ]
        for stages in (ascii_stages, self._stages):
            self._ascii_stages = stages
            self._known: set[str] = set()
            self._disputed: set[str] = set()
            if not self._has_disputed("".join(map(chr, range(128)))):
                return
        raise ValueError("the package regex reads its regular expression differently")

    def encode_texts(self, texts: Sequence[str]) -> Encoded:
        # The ids are written to a buffer, because a list of the words' ids would take 80 bytes for each word.
        output = io.BytesIO()
        ends = [self._write(text, output) for text in texts]
        sizes = np.diff(ends, prepend=0) // self._dtype.itemsize
        return np.frombuffer(output.getbuffer(), self._dtype), sizes

    def _write(self, text: str, output: io.BytesIO) -> int:
        """Writes the ids of a text to `output`. Returns the position of their end."""
        parts = [*self._parts(text)]
        if self._has_disputed(text) or any(self._has_disputed(part) for part, ids in parts if ids is None):
            output.write(self._bytes(self.tokenizer.tokenize(text)))
            return output.tell()
        for part, ids in parts:
            if ids is None:
                output.writelines(map(self._ids.__getitem__, self._words(part)))
            else:
                output.write(ids)
        return output.tell()

    def _parts(self, text: str) -> Iterator[tuple[str, bytes | None]]:
        """Yields (text, ids) for the parts of a text: added tokens with their ids, and the normalized texts
        between them with None."""
        for index, part in enumerate(self._split_at_added(text)):
            if index % 2:
                yield part, self._ids_of_added[part]
                continue
            if self._normal_form:
                part = unicodedata.normalize(self._normal_form, part)
            for inner_index, inner in enumerate(self._split_at_normalized(part)):
                yield inner, self._ids_of_added[inner] if inner_index % 2 else None

    def _words(self, text: str) -> Iterator[str]:
        first, *others = self._ascii_stages if text.isascii() else self._stages
        words: Iterator[str]
        if len(text) > LISTED_CHARACTERS:
            words = map(methodcaller("group"), first.finditer(text))
        else:
            words = iter(first.findall(text))
        for stage in others:
            words = chain.from_iterable(map(stage.findall, words))
        return words

    def _has_disputed(self, text: str) -> bool:
        """Returns whether a text has a character that the library may read differently."""
        if text.isascii() and self._known:
            return False
        characters = set(text)
        for character in characters - self._known:
            if not (self._splits_equally(character) and self._normalizes_equally(character)):
                self._disputed.add(character)
            self._known.add(character)
        return not self._disputed.isdisjoint(characters)

    def _splits_equally(self, c: str) -> bool:
        sample = f"a{c}a {c}{c}1{c}1 {c}.{c}.{c} '{c} {c}\n{c}\r{c}A{c}A{c}{c}{c}{c}1 {c}"
        return all(
            [*self._words(text)] == [text[start:end] for _, (start, end) in self._split_library(text)]
            for text in (sample, sample + " \u00e9")  # the first text may be ASCII, the second is not
        )

    def _normalizes_equally(self, character: str) -> bool:
        if self._normal_form is None or unicodedata.ucd_3_2_0.category(character) != "Cn":
            return True  # all later versions of Unicode normalize a text of older characters in the same way
        # Symbols, punctuation and numbers do not combine with other characters.
        return unicodedata.category(character)[0] in "SPN" and (
            unicodedata.normalize(self._normal_form, character) == self._normalize_library(character)
        )

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return np.array(ids, self._dtype).tobytes()


class _WordTable(dict[str, bytes]):
    """Word -> bytes of its ids. The table empties itself when it is full."""

    def __init__(self, model: Any, to_bytes: Callable[[Sequence[int]], bytes]) -> None:
        super().__init__()
        self._library = tokenizers.Tokenizer(model)
        self._library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._to_bytes = to_bytes
        self._is_cut = lru_cache(1 << 16)(self._can_cut)

    def __missing__(self, word: str) -> bytes:
        if len(word) > 2 * PART_CHARACTERS:
            return b"".join(map(self._bytes_of, self._parts(word)))
        ids = self._bytes_of(word)
        if len(word) <= MAX_WORD_CHARACTERS:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = ids
        return ids

    def _bytes_of(self, word: str) -> bytes:
        return self._to_bytes(self._library.encode(word).ids)

    def _parts(self, word: str) -> Iterator[str]:
        """Yields parts of a long word (such as base64) that together have the ids of the word. No token
        contains the two bytes at a boundary between parts, so no merge crosses it. Each part is longer than
        any token."""
        start = 0
        while cut := self._next_cut(word, start + PART_CHARACTERS):
            yield word[start:cut]
            start = cut
        yield word[start:]

    def _next_cut(self, word: str, start: int) -> int | None:
        positions = range(start, len(word) - PART_CHARACTERS)
        return next((index for index in positions if self._is_cut(word[index - 1], word[index])), None)

    def _can_cut(self, left: str, right: str) -> bool:
        pair = self._symbols(left)[-1] + self._symbols(right)[0]
        return pair not in self._joined and all(symbol in self._vocabulary for symbol in pair)

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return self._library.get_vocab()

    @cached_property
    def _joined(self) -> set[str]:
        """All pairs of bytes that follow each other in a token."""
        return {token[index : index + 2] for token in self._vocabulary for index in range(len(token) - 1)}

    def _symbols(self, character: str) -> str:
        """Returns the bytes of a character in the vocabulary's spelling."""
        ((symbols, _),) = self._library.pre_tokenizer.pre_tokenize_str(character)
        return str(symbols)


def _normal_form(library: Any) -> Any:
    if library.normalizer is None:
        return None
    kind = json.loads(library.normalizer.__getstate__())["type"]
    if kind not in _NORMAL_FORMS:
        raise ValueError(f"its normalizer is {kind}")
    return kind


def _word_patterns(library: Any) -> Iterator[str]:
    """Yields the regular expressions that split a text into words. Each one splits the results of the one
    before."""
    if library.pre_tokenizer is None:
        raise ValueError("it has no pre-tokenizer")
    state = json.loads(library.pre_tokenizer.__getstate__())
    *stages, last = state.get("pretokenizers", [state])
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise ValueError("its pre-tokenizer does not end with ByteLevel without a space in front")
    if last["use_regex"]:
        stages.append({"type": "Split", "pattern": {"Regex": _GPT2_WORDS}, "behavior": "Isolated"})
    elif not stages:
        raise ValueError("it does not split texts into words")
    for stage in stages:
        if stage == {"type": "Digits", "individual_digits": True}:
            yield r"\p{N}"
        elif stage["type"] == "Split" and stage["behavior"] == "Isolated" and not stage.get("invert"):
            yield stage["pattern"].get("Regex") or regex.escape(stage["pattern"]["String"])
        else:
            raise ValueError(f"its pre-tokenizer has a stage {stage}")


def _with_gaps(pattern: str) -> str:
    """Returns an expression that also matches the text between two matches of `pattern`, as one word."""
    return f"(?:{pattern})|(?:(?!(?:{pattern}))(?s:.))+"


def _all_ascii_words(pattern: str) -> re.Pattern[str] | None:
    """Returns the expression for ASCII texts. The package re applies it three times as fast as regex does."""

    def in_ascii(match: re.Match[str]) -> str:
        found = _PROPERTY.sub(lambda name: _ASCII_CLASSES.get(name[1], ""), match[0])
        return found if match[0].startswith("[") else f"[{found}]"

    try:
        return re.compile(_with_gaps(_SET_OR_PROPERTY.sub(in_ascii, pattern)), re.ASCII)
    except re.error:
        return None


def _all_words(pattern: str) -> Any:
    try:
        words = regex.compile(_with_gaps(pattern), regex.V1)
    except regex.error as error:
        raise ValueError(f"the package regex cannot read its regular expression ({error})") from error
    if words.groups or words.fullmatch(""):
        raise ValueError("its regular expression has groups or matches empty words")
    return words


def _splitter(tokens: Sequence[Any]) -> Callable[[str], list[str]]:
    """Returns a function that splits a text at added tokens as the library does: where several match, at the
    longest. In the result every second part is a token."""
    if not tokens:
        return lambda text: [text]
    for token in tokens:
        if token.lstrip or token.rstrip or token.single_word:
            raise ValueError(f"its token {token.content} depends on the text around it")
    contents = sorted((token.content for token in tokens), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, contents))})").split
