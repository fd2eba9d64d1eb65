"""Reads Megatron's memory-mapped token files ("mmap"), format version 1.

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

Data of prompts also have `{prefix}_loss_mask.bin` and `.idx`, a data set in this format: for each token a
uint8 number, 1 if the token counts in the loss as a label, otherwise 0.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.errors import UserError, stop_at_access_error
from megatron.files import open_regular
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
# Codes 6 and 7 are floating-point types, of different widths in different programs. They cannot hold token
# ids.
FLOAT_CODES = (6, 7)

LOSS_MASK_DTYPE = np.dtype("uint8")
LOSS_MASK_KEY = "loss_mask_sha256"
"""Key of a loss mask's digest in the record of its token files."""

CHECK_BLOCK = 1 << 22  # number of sequences that are verified at a time, to limit the memory
# A sample of blocks distinguishes .bin files with different tokens without reading them completely.
SAMPLED_BLOCKS, SAMPLED_BYTES = 4, 4096


def smallest_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype with which Megatron stores token ids below `vocab_size`."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def index_path(prefix: str) -> str:
    """Returns the path of the .idx file of the token files `prefix`."""
    return prefix + ".idx"


def data_path(prefix: str) -> str:
    """Returns the path of the .bin file of the token files `prefix`."""
    return prefix + ".bin"


def loss_mask_prefix(prefix: str) -> str:
    """Returns the prefix of the loss mask of the token files `prefix`."""
    return prefix + "_loss_mask"


def file_paths(prefix: str) -> tuple[str, ...]:
    """Returns the paths of the token files `prefix`, and of their loss mask if there is one."""
    paths = index_path(prefix), data_path(prefix)
    masks = index_path(loss_mask_prefix(prefix)), data_path(loss_mask_prefix(prefix))
    return paths + masks if any(map(os.path.exists, masks)) else paths


def sample_digest(path: str) -> str:
    """Returns the SHA-256 of a few blocks of a .bin file, among them the first and the last one."""
    digest, last = hashlib.sha256(), max(os.path.getsize(path) - SAMPLED_BYTES, 0)
    with open(path, "rb", buffering=0) as file:
        for block in range(SAMPLED_BLOCKS):
            file.seek(last * block // (SAMPLED_BLOCKS - 1))
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()


@dataclass(frozen=True)
class TokenCounts:
    """The counts of token files that the start of a run needs."""

    documents: int
    tokens: int
    ranges: dict[str, int] = field(default_factory=dict)
    """Range of documents, such as '0-423' -> number of tokens. Has the ranges that `tokens_in` was called
    with."""


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

    Opening checks both files. Raises UserError, naming the file, if a file is damaged, truncated, empty or
    missing. Forked processes can share an instance; unpickling opens the files again.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        option: str = "--data-path",
        verify: bool = True,
        counts: TokenCounts | None = None,
    ) -> None:
        """option: the flag that names the prefix, for error messages. verify: whether to read all of the .idx
        file and check every size and offset, instead of only the header and the sizes of both files. counts:
        the counts of verified files, which are opened when a document is first read; None to open the files
        now."""
        self.prefix = os.fspath(prefix)
        self.option = option
        if counts is None:
            self._files = self._open(verify)
            counts = TokenCounts(len(self.sizes), len(self._files.tokens))
        self.counts = counts

    def __len__(self) -> int:
        """Returns the number of documents."""
        return self.counts.documents

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        return self.get(index)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str, str, bool, TokenCounts]]:
        return IndexedDataset, (self.prefix, self.option, False, self.counts)

    @property
    def source(self) -> str:
        """The flag and the prefix as on the command line, for messages."""
        return f"{self.option} {self.prefix}"

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return self.counts.tokens

    @property
    def dtype(self) -> np.dtype:
        """dtype of the token ids in .bin."""
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
        """int64: index of the first sequence of each document, followed by the number of sequences."""
        return self._files.doc_idx

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Returns `length` tokens (None: all) of document `index` from token `offset` on, as a read-only
        view. The tokens may be read from the disk only when they are used."""
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
        """Returns the number of tokens of consecutive documents. Reads only the offsets of the first and the
        last document."""
        if not documents:
            return 0
        key = f"{documents.start}-{documents.stop}"
        if key not in self.counts.ranges:
            end, start = self._files.end_of(documents[-1]), int(self.pointers[documents[0]])
            self.counts.ranges[key] = (end - start) // self.dtype.itemsize
        return self.counts.ranges[key]

    @cached_property
    def loss_mask(self) -> IndexedDataset | None:
        """The loss mask of all tokens; None if there is none. Raises UserError if its length differs from the
        tokens'."""
        prefix = loss_mask_prefix(self.prefix)
        if len(file_paths(self.prefix)) == 2:
            return None
        mask = IndexedDataset(prefix, self.option, verify=False)
        if (len(mask), mask.num_tokens, mask.dtype) != (len(self), self.num_tokens, LOSS_MASK_DTYPE):
            raise UserError(
                f"{self.source}: {index_path(prefix)} has {len(mask):,} documents with {mask.num_tokens:,} "
                f"numbers of type {mask.dtype}, expected {len(self):,} with {self.num_tokens:,} of type "
                f"{LOSS_MASK_DTYPE}, one per token: preprocess the data again"
            )
        return mask

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


def check_loss_mask(dataset: IndexedDataset, record: Mapping[str, Any]) -> None:
    """Verifies the .idx file of the loss mask, if there is one. record: the record of the token files.

    Raises UserError if the mask is damaged, if the sizes of its documents differ from the token files', and
    if the record names a mask that does not exist.
    """
    prefix = loss_mask_prefix(dataset.prefix)
    if dataset.loss_mask is None:
        if LOSS_MASK_KEY in record:
            raise UserError(
                f"{dataset.source}: its loss mask, {data_path(prefix)}, does not exist: copy it and "
                f"{index_path(prefix)}, or preprocess the data again"
            )
        return
    mask = IndexedDataset(prefix, dataset.option)
    if not np.array_equal(mask.sizes, dataset.sizes):
        at = int(np.flatnonzero(mask.sizes != dataset.sizes)[0])
        raise UserError(
            f"{index_path(prefix)}: document {at} has {mask.sizes[at]:,} numbers, expected "
            f"{dataset.sizes[at]:,}, one per token: preprocess the data again"
        )
