"""What every tokenizer offers, and what is needed to make one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from megatron.config import ConfigError


class Tokenizer(Protocol):
    """The interface that data preparation, training and generation use."""

    @property
    def name(self) -> str:
        """The value of --tokenizer-type that makes this kind."""

    @property
    def vocab_size(self) -> int:
        """The true size of the vocabulary: every id is below it. Padding is the model's business."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    def vocabulary(self) -> dict[str, int]:
        """The id of every token, special tokens included."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`, with nothing added at either end."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text, in order; faster than one call per text where the library can."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""


class TokenizerFlags(Protocol):
    """The flags that choose a tokenizer. `DataConfig` has them, and so have the tools' parsed arguments."""

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
    """Return the value of a tokenizer flag; ConfigError if it is missing or not a readable file.

    Flags that end with -or-path may also be a name and are not checked here.
    """
    if not path:
        raise ConfigError(f"--tokenizer-type {tokenizer_type} needs {flag}, which is not given")
    if flag.endswith("-or-path"):
        return path
    if not os.path.isfile(path):
        raise ConfigError(f"{flag} {path}: no such file, give the path of an existing file to {flag}")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{flag} {path}: the file cannot be read by this user, change its permissions")
    return path
