"""Tokenizes jsonl text into token files. Their contents do not depend on the number of processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from megatron.child_processes import end_with_parent, signals_blocked
from megatron.config.sections.data import TOKENIZER_FIELDS
from megatron.data.batch_encoder import BadLine, EncodedBatch, make_batch_encoder, output_keys
from megatron.data.dataset_builder import IndexedDatasetBuilder, write_errors
from megatron.data.indexed_dataset import (
    IndexedDataset,
    check_loss_mask,
    data_path,
    sample_digest,
    smallest_dtype,
)
from megatron.data.text_files import LineBatch, identity_of, read_batches, stem_of
from megatron.errors import UserError
from megatron.tokenizer import Tokenizer, TokenizerFlags, build_tokenizer
from megatron.tokenizer.flags import check_parse_special, tokenizer_settings
from megatron.tokenizer.prompts import has_prompts, recorded_settings
from megatron.tokenizer.vocabulary_record import (
    PARSE_SPECIAL_KEY,
    read_record,
    record_path,
    vocabulary_digest,
    write_record,
)

BATCHES_IN_FLIGHT_PER_WORKER = 3


@dataclass
class Progress:
    """What has been processed so far. `documents`, `tokens` and `empty_documents` have a number per JSON
    key."""

    documents: dict[str, int]
    tokens: dict[str, int]
    empty_documents: dict[str, int]
    """JSON key -> number of documents without tokens, which are skipped."""
    lines: int = 0
    input_bytes: int = 0
    skipped: list[BadLine] = field(default_factory=list)
    special_tokens: Counter[str] = field(default_factory=Counter)
    """Special tokens that the texts contain literally, and how often."""
    indivisible_tokens: Counter[str] = field(default_factory=Counter)
    """Special tokens in texts that the tokenizer's model (such as a list of words) does not split."""


BatchesEncoder = Callable[[Iterator[LineBatch]], Iterator[EncodedBatch]]


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    json_keys: Sequence[str],
    flags: TokenizerFlags,
    *,
    append_eod: bool = False,
    workers: int = 1,
    skip_bad_lines: bool = False,
    backend: str = "auto",
    parse_special: bool = False,
    report: Callable[[Progress], None] | None = None,
    note: Callable[[str], object] = lambda line: None,
) -> Progress:
    """Tokenizes the files `inputs` into `{output_prefix}_{key}_document.bin` and `.idx`, one pair for each
    JSON key. If `output_prefix` ends with '/', it is a folder that gets such files for each input, named
    after the input. The keys of prompts (`megatron.tokenizer.prompts`) give one pair of files with a loss
    mask.

    Each pair of files gets a record (`megatron.tokenizer.vocabulary_record`) of its vocabulary, tokens and
    inputs. Existing files whose record has equal inputs and settings are kept. `report` is called after each
    batch, `note` with a line for each pair of files. Raises UserError, and writes no file of an input, if the
    input is missing or damaged, if a line is not a JSON object with the keys (unless `skip_bad_lines`), or if
    there is no text. In a folder, an input without text only causes a note.
    """
    # Threads of the tokenizers library would compete with the worker processes.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = build_tokenizer(flags, parse_special=parse_special)
    check_parse_special(tokenizer, parse_special)
    keys = tuple(dict.fromkeys(json_keys))
    documents, tokens, empty = (dict.fromkeys(output_keys(keys), 0) for _ in range(3))
    progress = Progress(documents, tokens, empty)
    settings = {
        "append_eod": append_eod,
        "skip_bad_lines": skip_bad_lines,
        PARSE_SPECIAL_KEY: parse_special,
        "vocabulary_sha256": vocabulary_digest(tokenizer),
        **recorded_settings(tokenizer, keys),
    }
    with ExitStack() as stack:
        encode: BatchesEncoder | None = None
        for prefix, paths in _outputs(inputs, output_prefix):
            job = _Job(prefix, tuple(paths), tokenizer, settings)
            if job.is_done(keys):
                note(f"{prefix}: made from this input before, kept")
                continue
            if encode is None:  # so that workers start only if there is work
                encode = stack.enter_context(
                    _batches_encoder(flags, tokenizer, keys, append_eod, backend, workers)
                )
            job.run(keys, encode, progress, report, note, output_prefix.endswith("/"))
    for token in () if parse_special else [*progress.special_tokens]:
        if tokenizer.special_tokens[token] in tokenizer.tokenize(token):
            progress.indivisible_tokens[token] = progress.special_tokens.pop(token)
    return progress


def _outputs(inputs: Sequence[str], output_prefix: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields (prefix of output files without the JSON key, inputs of these files)."""
    if not output_prefix.endswith("/"):
        yield output_prefix, inputs
        return
    by_stem: dict[str, str] = {}
    for path in inputs:
        if (other := by_stem.setdefault(stem_of(path), path)) != path:
            raise UserError(
                f"--output-prefix {output_prefix}: the inputs {other} and {path} would both be written to "
                f"{output_prefix}{stem_of(path)}: preprocess them into two folders"
            )
    for stem, path in by_stem.items():
        yield output_prefix + stem, [path]


@dataclass(frozen=True)
class _Job:
    """The token files of one prefix. settings: the settings that determine their content, besides the
    inputs."""

    prefix: str
    inputs: tuple[str, ...]
    tokenizer: Tokenizer
    settings: dict[str, Any]

    def _details(self, key: str) -> dict[str, Any]:
        return {"made_from": [identity_of(path) for path in self.inputs], "json_key": key, **self.settings}

    def is_done(self, keys: Sequence[str]) -> bool:
        """Returns whether the files of all JSON keys were made from equal inputs with equal settings."""
        names = {key: output_name(self.prefix, key) for key in output_keys(keys)}
        return all(self._is_done(name, self._details(key)) for key, name in names.items())

    def _is_done(self, name: str, details: dict[str, Any]) -> bool:
        if None in details["made_from"]:
            return False  # because nothing identifies the content of a pipe
        try:
            record = read_record(name)
            if record is None or not record.items() >= details.items():
                return False
            dataset = IndexedDataset(name, "--output-prefix", verify=False)
            check_loss_mask(dataset, record)
            return len(dataset) > 0 and record["bin_sample_sha256"] == sample_digest(data_path(name))
        except (UserError, KeyError):
            return False  # because the files are damaged or incomplete

    def run(
        self,
        keys: Sequence[str],
        encode: BatchesEncoder,
        progress: Progress,
        report: Callable[[Progress], None] | None,
        note: Callable[[str], object],
        may_be_empty: bool,
    ) -> None:
        """Writes the token files. See `preprocess` for the arguments."""
        # This is read before the content, so that an input that changes during the run does not count
        # as done.
        outputs = output_keys(keys)
        details = {key: self._details(key) for key in outputs}
        first_skipped = len(progress.skipped)
        with ExitStack() as stack:
            dtype = smallest_dtype(self.tokenizer.vocab_size)
            builders = {
                key: stack.enter_context(
                    IndexedDatasetBuilder(output_name(self.prefix, key), dtype, has_prompts(keys))
                )
                for key in outputs
            }
            counted = 0
            for result in encode(read_batches(self.inputs, keys)):
                if result.bad_lines and not self.settings["skip_bad_lines"]:
                    raise UserError(
                        f"{result.bad_lines[0]} (--json-keys sets the keys, --skip-bad-lines skips invalid "
                        "lines)"
                    )
                progress.skipped.extend(result.bad_lines)
                progress.lines += result.num_lines
                progress.input_bytes += result.input_bytes
                progress.special_tokens += result.special_tokens
                for key, (ids, sizes) in result.documents.items():
                    builders[key].add_documents(ids, sizes, result.loss_masks.get(key))
                    progress.documents[key] += len(sizes)
                    progress.tokens[key] += len(ids)
                    progress.empty_documents[key] += result.empty_documents[key]
                counted += sum(int(mask.sum()) for mask in result.loss_masks.values())
                if report is not None:
                    report(progress)
            for key, builder in builders.items():
                if builder.num_tokens == 0:
                    skipped = progress.skipped[first_skipped:]
                    first = f" ({len(skipped):,} lines skipped: {skipped[0]}, ...)" if skipped else ""
                    problem = f"no line has text under the JSON key '{key}'{first}"
                    if not may_be_empty:
                        raise UserError(
                            f"--input {' '.join(self.inputs)}: {problem}: set the key with --json-keys"
                        )
                    note(f"{self.inputs[0]}: {problem}; no token files are written")
                    return
            for key, builder in builders.items():
                builder.finalize(partial(self._write_record, builder.prefix, details[key]))
                note(
                    f"{builder.prefix}: {builder.num_documents:,} documents, {builder.num_tokens:,} tokens "
                    "(.bin and .idx)" + (f"; {counted:,} count in the loss" if has_prompts(keys) else "")
                )

    def _write_record(self, name: str, details: dict[str, Any], digests: dict[str, str]) -> None:
        with write_errors(record_path(name)):
            write_record(name, self.tokenizer, {**details, **digests})


def output_name(output_prefix: str, json_key: str) -> str:
    """Returns the prefix of the token files of one JSON key, in Megatron's form."""
    return f"{output_prefix}_{json_key}_document"


@contextmanager
def _batches_encoder(
    flags: TokenizerFlags,
    tokenizer: Tokenizer,
    json_keys: tuple[str, ...],
    append_eod: bool,
    backend: str,
    workers: int,
) -> Iterator[BatchesEncoder]:
    """Yields a function that applies `BatchEncoder.encode` to each batch, in `workers` processes, and yields
    the results in order. tokenizer: the tokenizer that `flags` select."""
    settings = (json_keys, append_eod, backend)
    encoder = make_batch_encoder(tokenizer, *settings)
    if workers == 1:
        yield partial(map, encoder.encode)
        return
    idle: SimpleQueue[_Worker] = SimpleQueue()

    def encode_in_worker(batch: LineBatch) -> EncodedBatch:
        worker = idle.get()
        try:
            return worker.encode(batch)
        finally:
            idle.put(worker)

    def encode(batches: Iterator[LineBatch]) -> Iterator[EncodedBatch]:
        # The number of batches in flight is limited, so that memory use does not grow with the input.
        in_flight: deque[Future[EncodedBatch]] = deque()
        for batch in batches:
            in_flight.append(threads.submit(encode_in_worker, batch))
            if len(in_flight) >= workers * BATCHES_IN_FLIGHT_PER_WORKER:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()

    with ExitStack() as stack:
        threads = ThreadPoolExecutor(workers)
        stack.callback(threads.shutdown, cancel_futures=True)  # runs after the workers' end: no thread waits
        for _ in range(workers):
            worker = _Worker(tokenizer_settings(flags), settings, tokenizer.parse_special)
            stack.callback(worker.kill)
            idle.put(worker)
        yield encode


class _Worker:
    """A process that encodes batches. It has its own pipe, so that the pipe ends if the process is killed,
    even while it sends a result."""

    def __init__(self, flags: dict[str, str], settings: tuple[Any, ...], parse_special: bool = False) -> None:
        # fork is unsafe in a process with threads, and the progress bar has one.
        context = multiprocessing.get_context("spawn")
        self._pipe, other_end = context.Pipe()
        arguments = (other_end, flags, settings, parse_special)
        self.process = context.Process(target=_encode_batches, args=arguments, daemon=True)
        resource_tracker.ensure_running()  # a later start of the tracker would unblock SIGINT
        with signals_blocked({signal.SIGINT}):  # because Ctrl-C reaches all processes of a terminal
            self.process.start()
        other_end.close()

    def encode(self, batch: LineBatch) -> EncodedBatch:
        """Returns the tokens of a batch. Raises UserError if the process has died."""
        try:
            # The lines are sent as one string, which is not copied: pickling would copy a long line in each
            # process.
            self._pipe.send((batch.path, batch.first_line, [len(line) for line in batch.lines]))
            self._pipe.send_bytes(b"".join(batch.lines))
            batch.lines.clear()
            result: EncodedBatch | Exception = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise UserError(
                "--workers: a worker process died, most likely because memory ran out: reduce --workers"
            ) from error
        if isinstance(result, Exception):
            raise result
        return result

    def kill(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.join()


def _encode_batches(
    pipe: Connection, flags: dict[str, str], settings: tuple[Any, ...], parse_special: bool
) -> None:
    """Encodes the batches that arrive. flags: see `tokenizer_settings`. settings: see
    `make_batch_encoder`."""
    end_with_parent()
    given: dict[str, str | None] = {**dict.fromkeys(TOKENIZER_FIELDS), **flags}
    encoder = make_batch_encoder(build_tokenizer(Namespace(**given), parse_special=parse_special), *settings)
    with suppress(EOFError, ConnectionError):  # the main process has ended
        while True:
            batch = _receive(pipe)
            try:
                result: EncodedBatch | Exception = encoder.encode(batch)
            except Exception as error:
                result = error
            pipe.send(result)


def _receive(pipe: Connection) -> LineBatch:
    path, first_line, sizes = pipe.recv()
    content = pipe.recv_bytes()
    ends = [0, *accumulate(sizes)]
    return LineBatch(path, first_line, [content[start:end] for start, end in pairwise(ends)])
