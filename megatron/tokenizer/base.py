"""The interfaces of tokenizers and of the flags that select a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from megatron.errors import UserError


class Tokenizer(Protocol):
    """The interface of all tokenizers, used by preprocessing, training and generation."""

    @property
    def name(self) -> str:
        """The value of --tokenizer-type."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary without padding: every token id is below it."""

    @property
    def eod(self) -> int:
        """The id of the end-of-document token."""

    @property
    def bos(self) -> int:
        """The id of the token that precedes a text without context: the beginning-of-sequence token, or `eod`
        if the tokenizer has none."""

    @property
    def adds_bos(self) -> bool:
        """Whether texts of this tokenizer conventionally begin with `bos`, as Llama's do. `tokenize` does not
        add it."""

    @property
    def parse_special(self) -> bool:
        """Whether a special token that a text literally contains becomes its id. If not, it is ordinary text,
        as in OpenAI's encoder of GPT-2, which BigScience's code has."""

    @property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens that a text may contain literally, with their ids."""

    def vocabulary(self) -> dict[str, int]:
        """Returns the id of every token, special tokens included."""

    def tokenize(self, text: str) -> list[int]:
        """Returns the token ids of `text`, without added special tokens. See `parse_special`."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text. With some libraries, faster than one call per text."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, special tokens included."""


class TokenizerFlags(Protocol):
    """The flags that select a tokenizer: attributes of `DataConfig` and of the tools' parsed arguments."""

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
    """Returns the value of a tokenizer flag. Raises UserError if it is missing or not a readable file.

    The values of flags that end in -or-path may be names and are not checked.
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
