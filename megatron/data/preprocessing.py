"""Tokenizes jsonl text into token files. The files do not depend on the number of processes."""

from __future__ import annotations

import codecs
import gzip
import json
import multiprocessing
import os
import signal
import threading
import zlib
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from megatron.config.checkpoint_args import TOKENIZER_FIELDS
from megatron.data.indexed_dataset import IndexedDatasetBuilder, smallest_dtype, write_errors
from megatron.errors import UserError
from megatron.text_table import first_few
from megatron.tokenizer import Tokenizer, TokenizerFlags, build_tokenizer
from megatron.tokenizer.flags import tokenizer_settings
from megatron.tokenizer.vocabulary_record import record_path, remove_record, write_record

BATCH_BYTES = 1 << 20
BATCH_LINES = 1024
BATCHES_IN_FLIGHT_PER_WORKER = 3
# Length limit of a line. Tokenizing a document takes about 100 times its size in memory.
MAX_LINE_BYTES = 1 << 26
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class LineBatch:
    """Consecutive lines of one file."""

    path: str
    first_line: int
    """Line number of the first line, counted from 1."""
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
    """The tokens of a batch. documents: for each JSON key, (concatenated ids, tokens per document)."""

    documents: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]
    input_bytes: int
    num_lines: int
    """Lines that are not blank."""
    bad_lines: list[BadLine]
    empty_documents: dict[str, int]
    """Per JSON key, the number of documents without tokens, which are skipped."""


@dataclass
class Progress:
    """What has been processed so far; `documents`, `tokens` and `empty_documents` count per JSON key."""

    documents: dict[str, int]
    tokens: dict[str, int]
    empty_documents: dict[str, int]
    """Documents without tokens, which are skipped."""
    lines: int = 0
    input_bytes: int = 0
    skipped: list[BadLine] = field(default_factory=list)


@dataclass(frozen=True)
class BatchEncoder:
    """Tokenizes batches of jsonl lines."""

    tokenizer: Tokenizer
    json_keys: tuple[str, ...]
    append_eod: bool

    def encode(self, batch: LineBatch) -> EncodedBatch:
        """Tokenizes the texts of a batch. An invalid line is listed in `bad_lines` and gives no document.

        Blank lines and documents without tokens are skipped, as in Megatron.
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
        empty = {key: len(texts[key]) - len(documents[key][1]) for key in self.json_keys}
        return EncodedBatch(documents, sum(map(len, batch.lines)), num_lines, bad_lines, empty)

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
    """Tokenizes the jsonl files `inputs` into `{output_prefix}_{key}_document.bin` and `.idx` per JSON key.

    Each pair of files gets a vocabulary record (`megatron.tokenizer.vocabulary_record`). `report` is called
    after each batch. Raises UserError, and writes no output file, if an input is missing or damaged, if a
    line is not a JSON object with the keys (unless `skip_bad_lines`), or if there is no text.
    """
    # The threads of the tokenizers library would compete with the worker processes.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = build_tokenizer(flags)
    documents, tokens, empty = (dict.fromkeys(json_keys, 0) for _ in range(3))
    progress = Progress(documents, tokens, empty)
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
                raise UserError(
                    f"{result.bad_lines[0]} (--json-keys sets the keys, --skip-bad-lines skips invalid lines)"
                )
            progress.skipped.extend(result.bad_lines)
            progress.lines += result.num_lines
            progress.input_bytes += result.input_bytes
            for key, (ids, sizes) in result.documents.items():
                builders[key].add_documents(ids, sizes)
                progress.documents[key] = builders[key].num_documents
                progress.tokens[key] = builders[key].num_tokens
                progress.empty_documents[key] += result.empty_documents[key]
            if report is not None:
                report(progress)
        for key, builder in builders.items():
            if builder.num_tokens == 0:
                skipped = progress.skipped
                first = f" ({len(skipped):,} lines skipped: {skipped[0]}, ...)" if skipped else ""
                raise UserError(
                    f"--input {' '.join(inputs)}: no line has text under the JSON key '{key}'{first}: set "
                    "the key with --json-keys"
                )
        for builder in builders.values():
            with write_errors(record_path(builder.prefix)):
                remove_record(builder.prefix)
            builder.finalize()
            with write_errors(record_path(builder.prefix)):
                write_record(builder.prefix, tokenizer)
    return progress


def output_name(output_prefix: str, json_key: str) -> str:
    """Returns the prefix of the token files of one JSON key, named as in Megatron."""
    return f"{output_prefix}_{json_key}_document"


def parse_line(line: bytes, json_keys: Sequence[str]) -> list[str] | str:
    """Returns the texts under `json_keys`, or the reason why the line is invalid."""
    if len(line) > MAX_LINE_BYTES:
        return f"longer than {MAX_LINE_BYTES:,} bytes, split the document into several lines"
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        return f"not UTF-8 text ({error.reason} at byte {error.start})"
    except (ValueError, RecursionError) as error:
        return f"not valid JSON ({error})"
    if not isinstance(record, dict):
        return f"expected a JSON object, got {type(record).__name__}"
    texts = []
    for key in json_keys:
        if key not in record:
            return f"has no key '{key}', its keys are {first_few(f'{name!r:.40}' for name in record)}"
        text = record[key]
        if not isinstance(text, str):
            return f"expected text under '{key}', got {text!r:.40}"
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"the text under '{key}' has an unpaired surrogate"
        texts.append(text)
    return texts


def read_batches(inputs: Sequence[str]) -> Iterator[LineBatch]:
    """Yields the lines of the files in order, in batches of about 1 MB from one file.

    A line longer than MAX_LINE_BYTES is truncated to MAX_LINE_BYTES + 1 bytes, so that the caller can reject
    it: a .gz file of 300 kB can decompress to a line of 600 MB.
    """
    for path in inputs:
        with _open_text(path) as file:
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
                raise UserError(
                    f"--input {path}: cannot read line {line_number} or later ({error})"
                ) from error
            if lines:
                yield LineBatch(path, first_line, lines)


@contextmanager
def _open_text(path: str) -> Iterator[BinaryIO]:
    """Opens a plain or .gz file. Raises UserError if it is not of the type in its name, or not UTF-8."""
    with open(path, "rb") as plain:
        is_gzip = path.endswith(".gz")
        head = plain.read(len(GZIP_MAGIC))
        plain.seek(0)
        if is_gzip and head and head != GZIP_MAGIC:
            raise UserError(
                f"--input {path}: not a gzip file, it begins with {head!r}: remove .gz from its name if it "
                "is plain text"
            )
        if not is_gzip and head == GZIP_MAGIC:
            raise UserError(f"--input {path}: it is a gzip file; add .gz to its name")
        file = cast(BinaryIO, gzip.GzipFile(fileobj=plain) if is_gzip else plain)
        try:
            head = file.read(4)
            file.seek(0)
        except (OSError, EOFError, zlib.error):
            head = b""  # reading the lines will raise this error again, with the line number
        # UTF-16 and UTF-32 text begins with a byte order mark or with ASCII characters that have zero bytes.
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 0 in head:
            raise UserError(
                f"--input {path}: looks like UTF-16 or UTF-32 text, expected UTF-8: convert it, for example "
                "with iconv -f UTF-16 -t UTF-8"
            )
        yield file


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES + 1) or b"\n"


def _encode_in_processes(
    batches: Iterator[LineBatch], flags: TokenizerFlags, encoder: BatchEncoder, workers: int
) -> Iterator[EncodedBatch]:
    """Applies `encoder.encode` to each batch in `workers` processes; yields the results in order."""
    settings = (tuple(tokenizer_settings(flags).items()), encoder.json_keys, encoder.append_eod)
    executor = ProcessPoolExecutor(
        workers,
        # fork is unsafe in a process with threads (the progress bar has one).
        multiprocessing.get_context("spawn"),
        initializer=_start_worker,
    )
    # The number of batches in flight is bounded, so that memory use does not grow with the input.
    in_flight: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in batches:
            with _without_ctrl_c():  # this may start a worker
                in_flight.append(executor.submit(_encode_in_worker, settings, batch))
            if len(in_flight) >= workers * BATCHES_IN_FLIGHT_PER_WORKER:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"--workers {workers}: a worker process died, most likely because memory ran out: reduce "
            "--workers"
        ) from error
    except BaseException:
        _kill_workers(executor)
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _kill_workers(executor: ProcessPoolExecutor) -> None:
    """Kills the workers, and closes the result pipe of this process so that `executor.shutdown` returns.

    A worker that is killed while it sends a result leaves the first part of the result in the pipe. The
    executor's thread would wait for the rest as long as any process can write to the pipe.
    """
    for process in list((executor._processes or {}).values()):
        process.kill()
    executor._result_queue._writer.close()  # type: ignore[attr-defined]


@cache
def _worker_encoder(
    flags: tuple[tuple[str, str], ...], json_keys: tuple[str, ...], append_eod: bool
) -> BatchEncoder:
    """Returns the encoder of a worker process, built at the first batch. Each batch is sent with the
    settings of the encoder, since a tokenizer is too large to send. flags: items of `tokenizer_settings`."""
    given: dict[str, str | None] = {**dict.fromkeys(TOKENIZER_FIELDS), **dict(flags)}
    return BatchEncoder(build_tokenizer(Namespace(**given)), json_keys, append_eod)


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Makes processes that start in the block ignore Ctrl-C, which sends SIGINT to all processes of the
    terminal: they inherit the signal mask. Only the main process handles it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> None:
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    """Ends this worker if the main process was killed: the worker would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(settings: tuple[Any, ...], batch: LineBatch) -> EncodedBatch:
    return _worker_encoder(*settings).encode(batch)
