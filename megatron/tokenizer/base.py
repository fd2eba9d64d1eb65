"""The interfaces of tokenizers and of the flags that select a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from megatron.errors import UserError


class Tokenizer(Protocol):
    """The interface of all tokenizers. Preprocessing, training and generation use it."""

    @property
    def name(self) -> str:
        """The tokenizer's value of --tokenizer-type."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary without padding. Every token id is below it."""

    @property
    def eod(self) -> int:
        """Id of the end-of-document token."""

    @property
    def bos(self) -> int:
        """Id of the token that precedes a text without context: the beginning-of-sequence token, or `eod` if
        the tokenizer has none."""

    @property
    def adds_bos(self) -> bool:
        """Whether texts of this tokenizer conventionally begin with `bos`, as Llama's do. `tokenize` never
        adds it."""

    @property
    def parse_special(self) -> bool:
        """Whether a special token that a text contains literally becomes its id. If not, it is ordinary text,
        as in OpenAI's encoder of GPT-2, which BigScience's code includes."""

    @property
    def special_tokens(self) -> dict[str, int]:
        """Special tokens that a text may contain literally -> ids."""

    def vocabulary(self) -> dict[str, int]:
        """Returns token -> id for every token, including special tokens."""

    def tokenize(self, text: str) -> list[int]:
        """Returns the token ids of `text`. Adds no special tokens. See `parse_special`."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text. Some libraries are faster with this than with one call per
        text."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, including special tokens."""


class TokenizerFlags(Protocol):
    """The flags that select a tokenizer, as attributes of `DataConfig` or of a tool's parsed arguments."""

    @property
    def tokenizer_type(self) -> str | None: ...

    @property
    def vocab_file(self) -> str | None: ...

    @property
    def merge_file(self) -> str | None: ...

    @property
    def tokenizer_name_or_path(self) -> str | None: ...

    @property
    def tokenizer_model(self) -> str | None: ...


def require_setting(path: str | None, flag: str, tokenizer_type: str) -> str:
    """Returns the value of a tokenizer flag. Raises UserError if the flag is missing or its file cannot be
    read.

    Values of flags that end in -or-path are not checked, because they may be names.
    """
    if not path:
        raise UserError(f"--tokenizer-type {tokenizer_type} needs {flag}, which is not set")
    if flag.endswith("-or-path"):
        return path
    if not os.path.isfile(path):
        raise UserError(f"{flag} {path}: the file does not exist")
    if not os.access(path, os.R_OK):
        raise UserError(f"{flag} {path}: this user cannot read the file, change its permissions")
    return path
