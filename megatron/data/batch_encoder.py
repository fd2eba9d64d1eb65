"""Tokenizes batches of jsonl lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.indexed_dataset import LOSS_MASK_DTYPE, smallest_dtype
from megatron.data.text_files import MAX_LINE_BYTES, LineBatch
from megatron.text_table import first_few
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.backends import texts_encoder
from megatron.tokenizer.fast import TextsEncoder, finder_of
from megatron.tokenizer.prompts import PROMPT_KEYS, RowEncoder, has_surrogate, row_encoder

_JSON = json.JSONDecoder()


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be used."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}"


@dataclass(frozen=True)
class EncodedBatch:
    """The tokens of a batch. documents: output name -> (concatenated ids, number of tokens of each
    document)."""

    documents: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]
    input_bytes: int
    num_lines: int
    """Number of lines that are not blank."""
    bad_lines: list[BadLine]
    empty_documents: dict[str, int]
    """Output name -> number of documents without tokens, which are skipped."""
    special_tokens: Counter[str]
    """Special tokens that the texts contain literally, and how often."""
    loss_masks: dict[str, npt.NDArray[np.uint8]] = field(default_factory=dict)
    """Only for prompts: output name -> for each token 1 if it counts in the loss, else 0."""


@dataclass(frozen=True)
class BatchEncoder:
    """Tokenizes batches of jsonl lines whose keys hold plain texts."""

    texts_encoder: TextsEncoder
    json_keys: tuple[str, ...]
    dtype: npt.DTypeLike
    """Type of the token ids in the result."""
    eod: int | None
    """The token id that ends each document; None to add none."""
    find_special: Callable[[str], list[str]]
    """Returns the special tokens that a text contains literally."""

    def encode(self, batch: LineBatch) -> EncodedBatch:
        """Returns the tokens of a batch. An invalid line is listed in `bad_lines` and gives no document.

        Blank lines and documents without tokens are skipped, as in Megatron. The method removes the lines
        from the batch, because tokenizing a long line needs their memory.
        """
        num_bytes = sum(map(len, batch.lines))
        texts, bad_lines, num_lines = self._parse(batch)
        batch.lines.clear()
        is_first = batch.first_line == 1
        documents = {key: self._tokenize(texts[key], is_first) for key in self.json_keys}
        empty = {key: len(texts[key]) - len(documents[key][1]) for key in self.json_keys}
        special = Counter(chain.from_iterable(map(self.find_special, chain.from_iterable(texts.values()))))
        return EncodedBatch(documents, num_bytes, num_lines, bad_lines, empty, special)

    def _parse(self, batch: LineBatch) -> tuple[dict[str, list[str]], list[BadLine], int]:
        """Returns JSON key -> texts, the bad lines, and the number of lines that are not blank."""
        texts: dict[str, list[str]] = {key: [] for key in self.json_keys}
        bad_lines = []
        num_lines = 0
        for number, line in enumerate(batch.lines, batch.first_line):
            if not line.strip():
                continue
            num_lines += 1
            fields = parse_line(line, self.json_keys)
            if isinstance(fields, str):
                bad_lines.append(BadLine(batch.path, number, fields))
                continue
            for key, text in zip(self.json_keys, fields, strict=True):
                texts[key].append(text)
        return texts, bad_lines, num_lines

    def _tokenize(
        self, texts: Sequence[str], is_first: bool
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        ids, sizes = self.texts_encoder.encode(texts, is_first)
        sizes = sizes[sizes > 0]
        if self.eod is not None:
            ids = np.insert(ids, np.cumsum(sizes), self.eod)
            sizes = sizes + 1
        if ids.size and int(ids.max()) > np.iinfo(self.dtype).max:
            raise ValueError(f"token id {ids.max()} does not fit {np.dtype(self.dtype)}")
        return ids.astype(self.dtype), sizes


@dataclass(frozen=True)
class PromptBatchEncoder:
    """Tokenizes batches of jsonl lines that have prompts and completions, or chats."""

    encode_row: RowEncoder
    name: str
    """Name of the output, the key of `EncodedBatch.documents`."""
    dtype: npt.DTypeLike

    def encode(self, batch: LineBatch) -> EncodedBatch:
        """Returns the tokens of a batch. An invalid line is listed in `bad_lines` and gives no document."""
        ids: list[int] = []
        counts: list[bool] = []
        sizes, bad_lines, num_lines = [], [], 0
        for number, line in enumerate(batch.lines, batch.first_line):
            if not line.strip():
                continue
            num_lines += 1
            record = parse_object(line, self.encode_row.keys)
            try:
                tokens = self.encode_row(record) if isinstance(record, dict) else None
            except ValueError as error:
                record, tokens = str(error), None
            if tokens is None:
                bad_lines.append(BadLine(batch.path, number, str(record)))
                continue
            ids += tokens.ids
            counts += tokens.counts
            sizes.append(len(tokens.ids))
        return EncodedBatch(
            {self.name: (np.array(ids, dtype=self.dtype), np.array(sizes, dtype=np.int64))},
            sum(map(len, batch.lines)),
            num_lines,
            bad_lines,
            {self.name: 0},
            Counter(),
            {self.name: np.array(counts, dtype=LOSS_MASK_DTYPE)},
        )


def parse_object(line: bytes, json_keys: Sequence[str]) -> dict[str, Any] | str:
    """Returns the JSON object in a line, or the reason why the line is not an object with `json_keys`."""
    if len(line) > MAX_LINE_BYTES:
        return f"longer than {MAX_LINE_BYTES:,} bytes, split the document into several lines"
    try:
        record = _JSON.decode(line.decode().removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        return f"not UTF-8 text ({error.reason} at byte {error.start})"
    except (ValueError, RecursionError) as error:
        return f"not valid JSON ({error})"
    if not isinstance(record, dict):
        return f"expected a JSON object, got {type(record).__name__}"
    for key in json_keys:
        if key not in record:
            return f"has no key '{key}', its keys are {first_few(f'{name!r:.40}' for name in record)}"
    return record


def parse_line(line: bytes, json_keys: Sequence[str]) -> list[str] | str:
    """Returns the texts under `json_keys`, or the reason why the line is invalid."""
    record = parse_object(line, json_keys)
    if isinstance(record, str):
        return record
    texts = []
    for key in json_keys:
        text = record[key]
        if not isinstance(text, str):
            return f"expected text under '{key}', got {text!r:.40}"
        if has_surrogate(text):
            return f"the text under '{key}' has an unpaired surrogate"
        texts.append(text)
    return texts


def make_batch_encoder(
    tokenizer: Tokenizer, json_keys: tuple[str, ...], append_eod: bool, backend: str
) -> BatchEncoder | PromptBatchEncoder:
    """Returns the encoder of lines with these keys. Raises UserError if the tokenizer cannot encode such
    lines."""
    eod = tokenizer.eod if append_eod else None
    dtype, find_special = smallest_dtype(tokenizer.vocab_size), finder_of(tokenizer.special_tokens)
    encode_row = row_encoder(tokenizer, json_keys, eod, find_special)
    if encode_row is not None:
        return PromptBatchEncoder(encode_row, output_keys(json_keys)[0], dtype)
    return BatchEncoder(texts_encoder(tokenizer, backend), json_keys, dtype, eod, find_special)


def output_keys(json_keys: Sequence[str]) -> tuple[str, ...]:
    """Returns, for each data set that is made from lines with these keys, the key in the names of
    its files."""
    return ("_".join(PROMPT_KEYS),) if set(json_keys) == set(PROMPT_KEYS) else tuple(json_keys)
