"""The text files that preprocessing reads: finds the files, selects a shard of them, and reads their
lines."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, BinaryIO, cast

from megatron.config import ConfigError
from megatron.errors import UserError
from megatron.object_store.store import ObjectInfo, ObjectStore, check_url, is_url
from megatron.shares import share_out

BATCH_BYTES = 1 << 20
BATCH_LINES = 1024
# Length limit of a line in bytes. Tokenizing a document takes about 100 times its size in memory.
MAX_LINE_BYTES = 1 << 26
# Number of bytes of an object that one request reads.
OBJECT_BLOCK_BYTES = 1 << 23
_PARQUET = ".parquet"
# Suffix of compressed or binary files -> the first bytes of such a file.
_MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", _PARQUET: b"PAR1"}
_FORMATS_OF_PYARROW = (".zst", _PARQUET)
# The errors that reading a damaged file raises. pyarrow raises OSError and ValueError.
_READ_ERRORS = (OSError, EOFError, ValueError, zlib.error)
_UNREADABLE = (".xz", ".bz2", ".zip", ".tar")
# Suffixes of the files that are read from a folder of --input.
_TEXT_NAMES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", _PARQUET)


@dataclass(frozen=True)
class LineBatch:
    """Consecutive lines of one file."""

    path: str
    first_line: int
    """Line number of the first line, counted from 1."""
    lines: list[bytes]


def find_files(words: Iterable[str]) -> list[str]:
    """Returns the files that --input names: files, patterns such as 'corpus/*.jsonl', folders (all jsonl and
    parquet files in them, in alphabetical order), URLs of objects, of patterns and of folders in an object
    store, - (standard input), and @LIST, a file with one of these per line.

    Raises ConfigError for a word that names no file, and for a file that cannot be read or whose compression
    is unknown.
    """
    return [path for word in words for path in _files_of(word)]


def _files_of(word: str) -> Iterator[str]:
    if word == "-":
        yield "/dev/stdin"
        return
    if word.startswith("@"):
        _check_readable(word[1:], f"--input {word}")
        with open(word[1:], encoding="utf-8") as file:
            lines = [line.strip() for line in file]
        yield from (path for line in lines if line and line[0] != "#" for path in _files_of(line))
        return
    found = _named_objects(word) if is_url(word) else _named_files(word)
    for path in sorted(found):
        if not is_url(path):
            _check_readable(path, f"--input {path}")
        _check_format(path)
        yield path


def _named_files(word: str) -> list[str]:
    if os.path.isdir(word):
        found = [entry.path for entry in os.scandir(word) if entry.name.endswith(_TEXT_NAMES)]
        if not found:
            raise ConfigError(
                f"--input {word}: the folder has no file that ends with {', '.join(_TEXT_NAMES)}"
            )
        return found
    if glob.has_magic(word) and not os.path.exists(word):
        found = glob.glob(word, recursive=True)
        if not found:
            raise ConfigError(f"--input {word}: no file matches the pattern")
        return found
    return [word]


def _named_objects(word: str) -> list[str]:
    """Returns the URLs of the objects that a URL names: an object, a folder or a pattern with * and ?."""
    magic = re.search(r"[*?]", word)
    folder = word[: word.rindex("/", 0, magic.start())] if magic else word.rstrip("/")
    try:
        check_url(folder)
        if not magic:
            if _object_info(word) is not None:
                return [word]
            found = [url for url in _listing(folder) if url.endswith(_TEXT_NAMES)]
        else:
            depth = None if "/" in word[len(folder) + 1 :] else 1
            found = [url for url in _listing(folder, depth) if _matches(url, word)]
    except (OSError, ConfigError) as error:
        raise ConfigError(f"--input {word}: {error}") from error
    if not found:
        expected = "the pattern" if magic else f"it or is in it and ends with {', '.join(_TEXT_NAMES)}"
        raise ConfigError(f"--input {word}: no object matches {expected}")
    return found


def _matches(url: str, pattern: str) -> bool:
    """Returns whether a URL matches a pattern by the rules of `glob.glob` with `recursive`."""
    parts = re.split(r"(\*\*/|\*|\?)", pattern)
    meanings = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    return re.fullmatch("".join(meanings.get(part) or re.escape(part) for part in parts), url) is not None


@cache
def _listing(folder: str, depth: int | None = 1) -> dict[str, ObjectInfo]:
    """Returns URL -> object for the objects in a folder of an object store. A process lists each folder only
    once, because thousands of inputs are in few folders."""
    return {f"{folder}/{key}": info for key, info in ObjectStore(folder).list(depth=depth).items()}


def _object_info(url: str) -> ObjectInfo | None:
    return _listing(os.path.dirname(url)).get(url)


def _check_readable(path: str, option: str) -> None:
    if not os.path.exists(path) or os.path.isdir(path):
        raise ConfigError(f"{option}: the file does not exist")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{option}: this user cannot read the file")


def _check_format(path: str) -> None:
    if path.endswith(_UNREADABLE):
        raise ConfigError(
            f"--input {path}: only plain, .gz, .zst and .parquet files can be read; decompress it first"
        )
    if path.endswith(_FORMATS_OF_PYARROW) and find_spec("pyarrow") is None:
        raise ConfigError(f"--input {path}: such files need the package pyarrow: pip install pyarrow")


def files_of_shard(paths: Sequence[str], shard: int, shards: int) -> list[str]:
    """Returns the files of one of `shards` shards, in their order. The shards have about equally many bytes.
    All shards must be given the same paths."""
    chosen = share_out({path: size_of(path) for path in paths}, shards)
    return [path for path in paths if chosen[path] == shard]


def parse_shard(text: str, environment: Mapping[str, str]) -> tuple[int, int]:
    """Returns (index, number of shards) for a value of --shard: I/N, or 'slurm' for this task of a Slurm
    array job. Raises ConfigError for other values."""
    if text == "slurm":
        names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_COUNT")
        try:
            task, first, count = (int(environment[name]) for name in names)
        except (KeyError, ValueError):
            raise ConfigError(
                f"--shard slurm: expected an array job of Slurm, which sets {names[0]}"
            ) from None
        if not first <= task < first + count:
            raise ConfigError(
                f"--shard slurm: task {task} is not one of {count} consecutive tasks from {first} on: set "
                "--array=0-N without a step"
            )
        return task - first, count
    index, slash, number = text.partition("/")
    if not (slash and index.isdecimal() and number.isdecimal() and int(index) < int(number)):
        raise ConfigError(f"--shard {text}: expected I/N with I from 0 to N - 1, such as 0/4, or slurm")
    return int(index), int(number)


def size_of(path: str) -> int:
    """Returns the size of a file in bytes, before decompression."""
    if is_url(path):
        info = _object_info(path)
        assert info is not None
        return info.size
    return os.path.getsize(path)


def stem_of(path: str) -> str:
    """Returns a file's name without folder, format and compression: 'a' for 'corpus/a.jsonl.zst'."""
    name = os.path.basename(path)
    name = name.removesuffix(_suffix(name))
    return os.path.splitext(name)[0] if name.endswith((".jsonl", ".json", ".txt")) else name


def read_batches(inputs: Sequence[str], keys: Sequence[str] = ()) -> Iterator[LineBatch]:
    """Yields the lines of the files in order, in batches of about 1 MB from one file. keys: the columns of
    parquet files to read; each row becomes a line of JSON.

    A line longer than MAX_LINE_BYTES is truncated to MAX_LINE_BYTES + 1 bytes, so that the caller can reject
    it: a .gz file of 300 kB can decompress to a line of 600 MB.
    """
    for path in inputs:
        with _open_lines(path, keys) as file_lines:
            lines: list[bytes] = []
            num_bytes, first_line = 0, 1
            try:
                for line in file_lines:
                    lines.append(line)
                    num_bytes += len(line)
                    if num_bytes >= BATCH_BYTES or len(lines) == BATCH_LINES:
                        batch = LineBatch(path, first_line, lines)
                        first_line += len(lines)
                        lines, num_bytes, line = [], 0, b""  # so that only the batch holds its lines
                        yield batch
            except _READ_ERRORS as error:
                line_number = first_line + len(lines)
                raise UserError(
                    f"--input {path}: cannot read line {line_number} or later ({error})"
                ) from error
            if lines:
                yield LineBatch(path, first_line, lines)


def _suffix(path: str) -> str:
    return next((suffix for suffix in _MAGIC if path.endswith(suffix)), "")


@contextmanager
def _open_lines(path: str, keys: Sequence[str]) -> Iterator[Iterator[bytes]]:
    """Yields the lines of a file of any format. Raises UserError if its content does not have the format that
    its name indicates, or is not UTF-8."""
    with ExitStack() as stack:
        plain = stack.enter_context(_open_plain(path))
        suffix, head = _suffix(path), plain.peek(4)[:4]
        for other, magic in _MAGIC.items():
            if suffix == other and head and not head.startswith(magic):
                raise UserError(
                    f"--input {path}: not a {other} file, it begins with {head!r}: remove {other} from its "
                    "name if it is plain text"
                )
            if suffix != other and head.startswith(magic):
                raise UserError(f"--input {path}: it is a {other} file; add {other} to its name")
        if suffix == _PARQUET and head:
            yield _rows(plain, keys)
            return
        file = plain
        if suffix == ".gz":
            file = cast(Any, stack.enter_context(gzip.GzipFile(fileobj=plain)))
        elif suffix == ".zst":
            import pyarrow

            frames = pyarrow.CompressedInputStream(pyarrow.PythonFile(plain, "r"), "zstd")
            file = stack.enter_context(io.BufferedReader(cast(Any, frames)))
        try:
            head = file.peek(4)[:4]
        except _READ_ERRORS:
            head = b""  # reading the lines raises the same error again, with the line number
        # UTF-16 and UTF-32 text begins with a byte order mark or with ASCII characters that have zero bytes.
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or 0 in head:
            raise UserError(
                f"--input {path}: looks like UTF-16 or UTF-32 text, expected UTF-8: convert it, for example "
                "with iconv -f UTF-16 -t UTF-8"
            )
        yield _lines(file)


@contextmanager
def _open_plain(path: str) -> Iterator[Any]:
    if not is_url(path):
        with open(path, "rb") as file:
            yield file
        return
    reader = _ObjectReader(path)
    with io.BufferedReader(reader, OBJECT_BLOCK_BYTES) as file:
        yield file
    reader.check_unchanged()


class _ObjectReader(io.RawIOBase):
    """Reads an object in a store, one request for each read. Raises OSError with its URL if requests fail
    after retries, if the object ends early, or if it is replaced while it is read."""

    def __init__(self, url: str) -> None:
        folder, _, self._key = url.rpartition("/")
        self._store = ObjectStore(folder)
        self._url, self._position, self._size = url, 0, size_of(url)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        data = self._store.read_block(self._key, self._position, end) if end > self._position else b""
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def check_unchanged(self) -> None:
        info = self._store.info(self._key)
        if [os.path.basename(self._url), info.size, int(info.modified)] != identity_of(self._url):
            raise UserError(f"--input {self._url}: the object was replaced while it was read")


def _rows(source: BinaryIO, keys: Sequence[str]) -> Iterator[bytes]:
    """Yields the rows of a parquet file as JSON objects, with only the columns in `keys` that the file
    has."""
    from pyarrow import parquet

    with parquet.ParquetFile(source) as file:
        columns = [name for name in file.schema_arrow.names if name in keys] or None
        for batch in file.iter_batches(BATCH_LINES, columns=columns):
            for row in batch.to_pylist():
                yield json.dumps(row, default=str).encode()


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines of a file. Keeps no reference to them, because a long line takes much memory."""
    is_cut = False

    def read() -> bytes:
        nonlocal is_cut
        line = file.readline(MAX_LINE_BYTES + 1)
        while is_cut:  # skips the rest of the truncated line
            is_cut, line = _is_cut(line), file.readline(MAX_LINE_BYTES + 1)
        is_cut = _is_cut(line)
        return line

    return iter(read, b"")


def _is_cut(line: bytes) -> bool:
    return len(line) > MAX_LINE_BYTES and not line.endswith(b"\n")


def identity_of(path: str) -> list[Any] | None:
    """Returns [name, bytes, modification time], which identify a file as in rsync; None for a pipe."""
    if is_url(path):
        info = _object_info(path)
        # Times are compared in whole seconds: a listing has fractions of seconds, a request for one object
        # has none.
        return None if info is None else [os.path.basename(path), info.size, int(info.modified)]
    state = os.stat(path)
    if not stat.S_ISREG(state.st_mode):
        return None
    return [os.path.basename(path), state.st_size, state.st_mtime_ns]
