"""From jsonl text to token files, by any number of processes; the files do not depend on it."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError
from megatron.data.indexed_dataset import IndexedDatasetBuilder, smallest_dtype
from megatron.tokenizer import Tokenizer, TokenizerFlags, build_tokenizer
from megatron.tokenizer.vocabulary_record import remove_record, write_record

BATCH_BYTES = 1 << 20
BATCH_LINES = 1024
BATCHES_IN_FLIGHT_PER_WORKER = 3
# A document on one line. To tokenize it takes some 100 times its size in memory.
MAX_LINE_BYTES = 1 << 26


@dataclass(frozen=True)
class LineBatch:
    """Consecutive lines of one file."""

    path: str
    first_line: int
    """Number of the first line, from 1."""
    lines: list[bytes]


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
    """The token ids of a batch's documents, per json key: all ids, and the ids of each document."""

    documents: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]
    input_bytes: int
    num_lines: int
    """Lines with something in them."""
    bad_lines: list[BadLine]


@dataclass
class Progress:
    """What has been done so far."""

    lines: int = 0
    input_bytes: int = 0
    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    skipped: list[BadLine] = field(default_factory=list)


@dataclass(frozen=True)
class BatchEncoder:
    """Tokenizes batches of lines."""

    tokenizer: Tokenizer
    json_keys: tuple[str, ...]
    append_eod: bool

    def encode(self, batch: LineBatch) -> EncodedBatch:
        """Tokenize the texts of a batch. A line with any fault is left out whole and named in `bad_lines`.

        Blank lines are passed over, and so are documents without a token, as Megatron does.
        """
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
        documents = {key: self._tokenize(texts[key]) for key in self.json_keys}
        return EncodedBatch(documents, sum(map(len, batch.lines)), num_lines, bad_lines)

    def _tokenize(self, texts: Sequence[str]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        documents = [ids for ids in self.tokenizer.tokenize_batch(texts) if ids] if texts else []
        if self.append_eod:
            for ids in documents:
                ids.append(self.tokenizer.eod)
        sizes = np.array([len(ids) for ids in documents], dtype=np.int64)
        dtype = smallest_dtype(self.tokenizer.vocab_size)
        tokens = np.fromiter(chain.from_iterable(documents), dtype, int(sizes.sum()))
        return tokens, sizes


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    json_keys: Sequence[str],
    flags: TokenizerFlags,
    *,
    append_eod: bool = False,
    workers: int = 1,
    skip_bad_lines: bool = False,
    report: Callable[[Progress], None] | None = None,
) -> Progress:
    """Tokenize the jsonl files `inputs` into `{output_prefix}_{key}_document.bin` and `.idx`, one pair per
    json key, each with the record of its vocabulary (`megatron.tokenizer.vocabulary_record`).

    `report` is called after each batch. Raises ConfigError for what a user can put right: a missing or
    damaged input, a line that is no json object with those keys (unless skipped), nothing to write. Then no
    output file is made.
    """
    # Processes are the parallelism here: the library's own threads would only compete with them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = build_tokenizer(flags)
    progress = Progress(documents=dict.fromkeys(json_keys, 0), tokens=dict.fromkeys(json_keys, 0))
    with ExitStack() as stack:
        builders = {
            key: stack.enter_context(
                IndexedDatasetBuilder(output_name(output_prefix, key), smallest_dtype(tokenizer.vocab_size))
            )
            for key in dict.fromkeys(json_keys)
        }
        encoder = BatchEncoder(tokenizer, tuple(builders), append_eod)
        batches = read_batches(inputs)
        encoded = (
            map(encoder.encode, batches)
            if workers == 1
            else _encode_in_processes(batches, flags, encoder, workers)
        )
        for result in encoded:
            if result.bad_lines and not skip_bad_lines:
                raise ConfigError(f"{result.bad_lines[0]} (--skip-bad-lines leaves such lines out)")
            progress.skipped.extend(result.bad_lines)
            progress.lines += result.num_lines
            progress.input_bytes += result.input_bytes
            for key, (tokens, sizes) in result.documents.items():
                builders[key].add_documents(tokens, sizes)
                progress.documents[key] = builders[key].num_documents
                progress.tokens[key] = builders[key].num_tokens
            if report is not None:
                report(progress)
        for key, builder in builders.items():
            if builder.num_tokens == 0:
                raise ConfigError(f"--input {' '.join(inputs)}: no line has text under the json key '{key}'")
        for builder in builders.values():
            remove_record(builder.prefix)
            builder.finalize()
            write_record(builder.prefix, tokenizer)
    return progress


def output_name(output_prefix: str, json_key: str) -> str:
    """The prefix of the files for one json key, as Megatron names them."""
    return f"{output_prefix}_{json_key}_document"


def parse_line(line: bytes, json_keys: Sequence[str]) -> list[str] | str:
    """The texts under `json_keys`, or what is wrong with the line."""
    if len(line) > MAX_LINE_BYTES:
        return f"longer than {MAX_LINE_BYTES:,} bytes, split the document into several lines"
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        return f"not UTF-8 text ({error.reason} at byte {error.start})"
    except (ValueError, RecursionError) as error:
        return f"not valid json ({error})"
    if not isinstance(record, dict):
        return f"expected a json object, got {type(record).__name__}"
    texts = []
    for key in json_keys:
        text = record.get(key)
        if not isinstance(text, str):
            return (
                f"has no key '{key}'"
                if key not in record
                else f"expected text under '{key}', got {text!r:.40}"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"the text under '{key}' has half a surrogate pair"
        texts.append(text)
    return texts


def read_batches(inputs: Sequence[str]) -> Iterator[LineBatch]:
    """The lines of the files, in order, in batches of about a megabyte that never span two files. Of a line
    beyond MAX_LINE_BYTES, so many bytes and one more are kept: a file of 300 kB may unpack to a line of
    600 MB."""
    for path in inputs:
        opened = gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")
        with cast(BinaryIO, opened) as file:
            lines: list[bytes] = []
            num_bytes, first_line = 0, 1
            try:
                for line in _lines(file):
                    lines.append(line)
                    num_bytes += len(line)
                    if num_bytes >= BATCH_BYTES or len(lines) == BATCH_LINES:
                        yield LineBatch(path, first_line, lines)
                        first_line += len(lines)
                        lines, num_bytes = [], 0
            except (OSError, EOFError, zlib.error) as error:
                line_number = first_line + len(lines)
                raise ConfigError(
                    f"--input {path}: cannot be read beyond line {line_number} ({error})"
                ) from error
            if lines:
                yield LineBatch(path, first_line, lines)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES + 1) or b"\n"


def _encode_in_processes(
    batches: Iterator[LineBatch], flags: TokenizerFlags, encoder: BatchEncoder, workers: int
) -> Iterator[EncodedBatch]:
    """`encoder.encode` of each batch, in order, by `workers` processes."""
    settings = _EncoderSettings(
        flags.tokenizer_type,
        flags.vocab_file,
        flags.merge_file,
        flags.tokenizer_name_or_path,
        flags.tokenizer_model,
        encoder.json_keys,
        encoder.append_eod,
    )
    executor = ProcessPoolExecutor(
        workers,
        # A forked copy of a process with threads (the progress bar's) can hang; a spawned one cannot.
        multiprocessing.get_context("spawn"),
        initializer=_start_worker,
    )
    # A bounded number of batches is in flight, so that memory does not grow with the input.
    in_flight: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in batches:
            in_flight.append(executor.submit(_encode_in_worker, settings, batch))
            if len(in_flight) >= workers * BATCHES_IN_FLIGHT_PER_WORKER:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    except BrokenProcessPool as error:
        raise ConfigError(
            f"a worker process died, most often because memory ran out: use fewer --workers than {workers}"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class _EncoderSettings:
    """What a worker makes its encoder from. It goes with each batch, for which a tokenizer is too large."""

    tokenizer_type: str | None
    vocab_file: str | None
    merge_file: str | None
    tokenizer_name_or_path: str | None
    tokenizer_model: str | None
    json_keys: tuple[str, ...]
    append_eod: bool


@cache
def _worker_encoder(settings: _EncoderSettings) -> BatchEncoder:
    """Made once in each worker process."""
    return BatchEncoder(build_tokenizer(settings), settings.json_keys, settings.append_eod)


def _start_worker() -> None:
    # Ctrl-C reaches every process of a terminal; the main one alone says what became of the work.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _encode_in_worker(settings: _EncoderSettings, batch: LineBatch) -> EncodedBatch:
    return _worker_encoder(settings).encode(batch)
