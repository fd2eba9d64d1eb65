"""Reader and writer of Megatron's memory-mapped token files ("mmap"), format version 1.

`{prefix}.bin` is the concatenation of the token ids of all documents. `{prefix}.idx` holds the sizes and
offsets of the documents, little-endian:

    9 bytes   magic  MMIDIDX 0 0
    uint64    version, 1
    uint8     dtype code of the ids in .bin (see DTYPE_OF_CODE)
    uint64    number of sequences, S
    uint64    length of the document index, D
    int32[S]  tokens per sequence
    int64[S]  byte offset of each sequence in .bin
    int64[D]  first sequence of each document, followed by S

GPT data has one sequence per document. The sample order counts sequences, as in Megatron. In this module, a
"document" is one sequence.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron.errors import UserError, stop_at_access_error
from megatron.files import create_locked, locked_leftover, open_regular, sync_file
from megatron.mapped_file import advise_random, map_file, read_ahead

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
OLD_MAGIC = b"TNTIDX\x00\x00"

DTYPE_OF_CODE: dict[int, np.dtype] = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
# Codes 6 and 7 are floating-point types (of different widths in different programs), which hold no token ids.
FLOAT_CODES = (6, 7)

CHECK_BLOCK = 1 << 22  # number of sequences that are verified at a time, to bound the memory
COPY_BLOCK = 1 << 24  # bytes that are copied at a time
# A few blocks of a .bin file tell it from one with other tokens without reading all of it.
SAMPLED_BLOCKS, SAMPLED_BYTES = 4, 4096


def smallest_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype in which Megatron stores token ids below `vocab_size`."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def index_path(prefix: str) -> str:
    """Returns the path of the .idx file."""
    return prefix + ".idx"


def data_path(prefix: str) -> str:
    """Returns the path of the .bin file."""
    return prefix + ".bin"


def sample_digest(path: str) -> str:
    """Returns the SHA-256 of a few blocks of a .bin file, the first and the last one included."""
    digest, last = hashlib.sha256(), max(os.path.getsize(path) - SAMPLED_BYTES, 0)
    with open(path, "rb", buffering=0) as file:
        for block in range(SAMPLED_BLOCKS):
            file.seek(last * block // (SAMPLED_BLOCKS - 1))
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()


@dataclass(frozen=True)
class TokenFacts:
    """What the start of a run needs to know about token files."""

    documents: int
    tokens: int
    ranges: dict[str, int] = field(default_factory=dict)
    """Tokens of ranges of documents, such as '0-423': those that `IndexedDataset.tokens_in` was asked for."""


@dataclass
class _TokenFiles:
    """Memory-mapped token files."""

    dtype: np.dtype
    sizes: npt.NDArray[np.int32]
    """int32 [documents]: tokens per document."""
    pointers: npt.NDArray[np.int64]
    """int64 [documents]: byte offset of each document in .bin."""
    doc_idx: npt.NDArray[np.int64]
    tokens: npt.NDArray[Any] = field(init=False)

    def end_of(self, document: int) -> int:
        """Returns the offset in .bin of the first byte after a document."""
        return int(self.pointers[document]) + int(self.sizes[document]) * self.dtype.itemsize


class IndexedDataset:
    """The documents of one `{prefix}.bin` and `.idx`, memory-mapped and read-only.

    Opening checks both files. Raises UserError, naming the file, if one is damaged, truncated, empty or
    missing. Forked processes can share an instance; unpickling opens the files again.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        option: str = "--data-path",
        verify: bool = True,
        facts: TokenFacts | None = None,
    ) -> None:
        """option: the flag that names the prefix, for error messages. verify: whether to read all of the .idx
        file and check every size and offset, instead of only the header and the sizes of both files. facts:
        of verified files, which are opened when a document is read; None opens them now."""
        self.prefix = os.fspath(prefix)
        self.option = option
        if facts is None:
            self._files = self._open(verify)
            facts = TokenFacts(len(self.sizes), len(self._files.tokens))
        self.facts = facts

    def __len__(self) -> int:
        """Returns the number of documents."""
        return self.facts.documents

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        return self.get(index)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str, str, bool, TokenFacts]]:
        return IndexedDataset, (self.prefix, self.option, False, self.facts)

    @property
    def source(self) -> str:
        """The flag and the prefix, as on the command line."""
        return f"{self.option} {self.prefix}"

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all documents."""
        return self.facts.tokens

    @property
    def dtype(self) -> np.dtype:
        """The type of the token ids in .bin."""
        return self._files.dtype

    @property
    def sizes(self) -> npt.NDArray[np.int32]:
        """int32 [documents]: tokens per document."""
        return self._files.sizes

    @property
    def pointers(self) -> npt.NDArray[np.int64]:
        """int64 [documents]: byte offset of each document in .bin."""
        return self._files.pointers

    @property
    def doc_idx(self) -> npt.NDArray[np.int64]:
        """int64: first sequence of each document, followed by the number of sequences."""
        return self._files.doc_idx

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Returns `length` tokens (None: all) of document `index` from token `offset`, a read-only view. It
        may still be read from the disk."""
        files = self._files
        if not 0 <= index < len(files.sizes):
            raise IndexError(f"document {index} of {self.prefix}, which has {len(files.sizes)}")
        size = int(files.sizes[index])
        if length is None:
            length = size - offset
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"tokens {offset} to {offset + length} of document {index}, which has {size}")
        start = int(files.pointers[index]) // files.dtype.itemsize + offset
        tokens = files.tokens[start : start + length]
        read_ahead(tokens)
        return tokens

    def tokens_in(self, documents: range) -> int:
        """Returns the number of tokens of consecutive documents. Reads the offsets of only the first and the
        last."""
        if not documents:
            return 0
        key = f"{documents.start}-{documents.stop}"
        if key not in self.facts.ranges:
            end, start = self._files.end_of(documents[-1]), int(self.pointers[documents[0]])
            self.facts.ranges[key] = (end - start) // self.dtype.itemsize
        return self.facts.ranges[key]

    @cached_property
    def _files(self) -> _TokenFiles:
        files = self._open(verify=False)
        if (len(files.sizes), len(files.tokens)) != (len(self), self.num_tokens):
            raise UserError(
                f"{self.source}: the token files have changed since the start, from {self.num_tokens:,} to "
                f"{len(files.tokens):,} tokens: start the run again"
            )
        return files

    @stop_at_access_error()
    def _open(self, verify: bool) -> _TokenFiles:
        index_bytes, data_bytes = self._file_sizes()
        dtype, num_sequences, doc_idx_length = _read_header(index_path(self.prefix), index_bytes)
        buffer = map_file(index_path(self.prefix))
        at = HEADER.size
        sizes: npt.NDArray[np.int32] = np.frombuffer(buffer, "<i4", num_sequences, at)
        at += sizes.nbytes
        pointers: npt.NDArray[np.int64] = np.frombuffer(buffer, "<i8", num_sequences, at)
        at += pointers.nbytes
        doc_idx: npt.NDArray[np.int64] = np.frombuffer(buffer, "<i8", doc_idx_length, at)
        files = _TokenFiles(dtype, sizes, pointers, doc_idx)
        if verify:
            self._verify_index(files)
        self._check_length(files, data_bytes)
        files.tokens = map_file(data_path(self.prefix)).view(dtype)
        advise_random(files.tokens)
        return files

    def _file_sizes(self) -> tuple[int, int]:
        sizes = []
        for path in (index_path(self.prefix), data_path(self.prefix)):
            if not os.path.isfile(path):
                hint = ""
                if self.prefix.endswith((".bin", ".idx")):
                    hint = f", give the prefix {self.prefix[:-4]} without the extension"
                raise UserError(f"{self.source}: the file {path} does not exist{hint}")
            if not os.access(path, os.R_OK):
                raise UserError(f"{self.source}: {path} cannot be read by this user")
            sizes.append(os.path.getsize(path))
        return sizes[0], sizes[1]

    def _verify_index(self, files: _TokenFiles) -> None:
        """Raises UserError if a size, an offset or a document boundary is wrong."""
        idx = index_path(self.prefix)
        end = 0
        for start in range(0, len(files.sizes), CHECK_BLOCK):
            sizes = files.sizes[start : start + CHECK_BLOCK]
            if sizes.min() < 0:
                raise UserError(
                    f"{idx}: damaged, document {start + int(sizes.argmin())} has {int(sizes.min())} tokens"
                )
            ends = end + np.cumsum(sizes, dtype=np.int64) * files.dtype.itemsize
            expected = np.concatenate(([end], ends[:-1]))
            wrong = np.flatnonzero(files.pointers[start : start + CHECK_BLOCK] != expected)
            if len(wrong):
                at = int(wrong[0])
                raise UserError(
                    f"{idx}: damaged, document {start + at} begins at byte {int(files.pointers[start + at])} "
                    f"of the .bin file, expected byte {int(expected[at])}, where the previous document ends"
                )
            end = int(ends[-1])
        doc_idx = files.doc_idx
        if len(doc_idx) and (
            doc_idx[0] != 0 or doc_idx[-1] > len(files.sizes) or bool(np.any(doc_idx[1:] < doc_idx[:-1]))
        ):
            raise UserError(
                f"{idx}: damaged, its document index does not increase from 0 to at most {len(files.sizes)}"
            )

    def _check_length(self, files: _TokenFiles, data_bytes: int) -> None:
        """Raises UserError if the length of .bin is wrong."""
        idx, bin_ = index_path(self.prefix), data_path(self.prefix)
        end = files.end_of(len(files.sizes) - 1)
        if end != data_bytes:
            state = "truncated" if data_bytes < end else "too long"
            raise UserError(f"{bin_}: {state}, it has {data_bytes:,} bytes, expected {end:,} by {idx}")
        if end == 0:
            raise UserError(f"{bin_}: contains no tokens; preprocess the data again")


def _read_header(path: str, file_bytes: int) -> tuple[np.dtype, int, int]:
    """Returns (dtype, number of sequences, length of the document index). Raises UserError for a bad file."""
    with open_regular(path) as file:
        header = file.read(HEADER.size)
    if header.startswith(OLD_MAGIC):
        raise UserError(
            f"{path}: has the old lazy/cached format; preprocess the data again with --dataset-impl mmap"
        )
    if not header:
        raise UserError(f"{path}: is empty; preprocess the data again")
    if header[: len(MAGIC)] != MAGIC[: len(header)]:
        raise UserError(
            f"{path}: not a Megatron index file, it begins with {header[:9]!r}, expected {MAGIC!r}"
        )
    if len(header) < HEADER.size:
        raise UserError(f"{path}: truncated, its header has {len(header)} of {HEADER.size} bytes")
    _, version, code, num_sequences, doc_idx_length = HEADER.unpack(header)
    if version != VERSION:
        raise UserError(f"{path}: has format version {version}, expected {VERSION}")
    if code in FLOAT_CODES:
        raise UserError(f"{path}: contains floating-point numbers (dtype code {code}), expected token ids")
    if code not in DTYPE_OF_CODE:
        raise UserError(f"{path}: damaged, its dtype code {code} is unknown")
    expected_bytes = HEADER.size + 12 * num_sequences + 8 * doc_idx_length
    if file_bytes != expected_bytes:
        state = "truncated" if file_bytes < expected_bytes else "too long"
        raise UserError(
            f"{path}: {state}, it has {file_bytes:,} bytes, expected {expected_bytes:,} by its header "
            f"({num_sequences:,} documents)"
        )
    if num_sequences == 0:
        raise UserError(f"{path}: contains no documents; preprocess the data again")
    return DTYPE_OF_CODE[code], num_sequences, doc_idx_length


@contextmanager
def write_errors(path: str) -> Iterator[None]:
    """Converts an OSError in the block, for example a full disk, to a UserError that names the file."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError(
            f"cannot write {path}: {error.strerror}"
            + (": free some space, or write to a different disk" if full else "")
        ) from error


class IndexedDatasetBuilder:
    """Writes `{prefix}.bin` and `.idx`, under temporary names until `finalize`.

    As a context manager it removes the temporary files on exit. Files that a killed process left are removed
    by the next builder of the prefix.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODE_OF_DTYPE:
            raise ValueError(f"token ids cannot be stored as {np.dtype(dtype)}")
        suffix = f".{uuid.uuid4().hex}.tmp"
        self._temporary_data = data_path(self.prefix) + suffix
        self._temporary_index = index_path(self.prefix) + suffix
        self._digest = hashlib.sha256()
        self._sizes: list[npt.NDArray[np.int32]] = []
        # The first sequence of each document. An appended dataset may have several sequences per document.
        self._doc_idx: list[range | npt.NDArray[np.int64]] = []
        self.num_documents = 0
        self.num_tokens = 0
        _remove_leftovers(self.prefix)
        with write_errors(index_path(self.prefix)):
            # Open until the last rename: the temporary files of a process that died are not locked.
            self._index_file = create_locked(self._temporary_index)
        with write_errors(data_path(self.prefix)):
            self._file: BinaryIO = open(self._temporary_data, "xb")

    def add_documents(self, tokens: npt.ArrayLike, sizes: npt.ArrayLike) -> None:
        """Appends documents. tokens: their concatenated ids; sizes: the number of tokens of each document."""
        ids, lengths = np.asarray(tokens), np.asarray(sizes, dtype=np.int64)
        if int(lengths.sum()) != ids.size:
            raise ValueError(f"got {ids.size} tokens for documents of {int(lengths.sum())} tokens in total")
        if lengths.size == 0:
            return
        if lengths.max() > np.iinfo(np.int32).max:
            raise UserError(f"a document has {int(lengths.max()):,} tokens, expected at most 2,147,483,647")
        if ids.size and ids.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            if ids.min() < limits.min or ids.max() > limits.max:
                raise ValueError(f"token ids {ids.min()} to {ids.max()} do not fit {self.dtype}")
        self._write(np.ascontiguousarray(ids, dtype=self.dtype).data)
        first = self.num_documents
        self._append(lengths.astype("<i4"), ids.size, range(first, first + lengths.size))

    def add_dataset(self, dataset: IndexedDataset, on_progress: Callable[[int], object]) -> None:
        """Appends all documents of `dataset`, whose .bin file is copied as bytes.

        on_progress: called with the number of bytes of each copied block. Raises UserError if the dtypes
        differ.
        """
        if dataset.dtype != self.dtype:
            raise UserError(
                f"{dataset.source} has token ids of type {dataset.dtype}, expected {self.dtype}: preprocess "
                "the data again, with one tokenizer for all of it"
            )
        with open(data_path(dataset.prefix), "rb") as source:
            while block := source.read(COPY_BLOCK):
                self._write(block)
                on_progress(len(block))
        doc_idx = dataset.doc_idx[:-1] if len(dataset.doc_idx) else np.arange(len(dataset), dtype=np.int64)
        self._append(dataset.sizes, dataset.num_tokens, doc_idx + self.num_documents)

    def _append(
        self, sizes: npt.NDArray[np.int32], num_tokens: int, doc_idx: range | npt.NDArray[np.int64]
    ) -> None:
        self._sizes.append(sizes)
        self._doc_idx.append(doc_idx)
        self.num_documents += len(sizes)
        self.num_tokens += num_tokens

    def _write(self, block: bytes | memoryview) -> None:
        with write_errors(data_path(self.prefix)):
            self._file.write(block)
        self._digest.update(block)

    def finalize(self, write_record: Callable[[dict[str, str]], object] = lambda digests: None) -> None:
        """Writes the index and renames both files. A reader finds either both files or none.

        write_record: called with the digests of .bin before the files get their names, so that no reader
        finds them without their record.
        """
        with write_errors(index_path(self.prefix)):
            self._write_index()
        with write_errors(data_path(self.prefix)):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        digests = {
            "bin_sha256": self._digest.hexdigest(),
            "bin_sample_sha256": sample_digest(self._temporary_data),
        }
        write_record(digests)
        # The old index is removed first, so that it is never read together with the new .bin.
        if os.path.exists(index_path(self.prefix)):
            os.remove(index_path(self.prefix))
        os.replace(self._temporary_data, data_path(self.prefix))
        os.replace(self._temporary_index, index_path(self.prefix))
        sync_file(Path(self.prefix).absolute().parent)
        self._index_file.close()

    def _write_index(self) -> None:
        sizes = np.concatenate(self._sizes) if self._sizes else np.zeros(0, "<i4")
        ends = np.cumsum(sizes, dtype=np.int64) * self.dtype.itemsize
        file = self._index_file
        doc_idx_length = sum(map(len, self._doc_idx)) + 1
        file.write(HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[self.dtype], len(sizes), doc_idx_length))
        file.write(sizes.data)
        file.write((ends - sizes.astype(np.int64) * self.dtype.itemsize).astype("<i8").data)
        for doc_idx in self._doc_idx:
            file.write(np.asarray(doc_idx, dtype="<i8").data)
        file.write(np.array([len(sizes)], dtype="<i8").data)
        file.flush()
        os.fsync(file.fileno())

    def discard(self) -> None:
        """Removes the temporary files."""
        for file in (self._file, self._index_file):
            with suppress(OSError):  # on a full disk the flush fails again
                file.close()
        for path in (self._temporary_data, self._temporary_index):
            with suppress(FileNotFoundError):  # renamed, or removed by the next builder as a leftover
                os.remove(path)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()


def _remove_leftovers(prefix: str) -> None:
    """Removes temporary files of builders that died."""
    for index in glob.glob(f"{glob.escape(index_path(prefix))}.*.tmp"):
        with suppress(OSError), locked_leftover(index):
            suffix = index.removeprefix(index_path(prefix))
            with suppress(FileNotFoundError):
                os.remove(data_path(prefix) + suffix)
            os.remove(index)
