"""Writes token files, which `megatron.data.indexed_dataset` reads."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megatron.data.indexed_dataset import (
    CODE_OF_DTYPE,
    HEADER,
    LOSS_MASK_DTYPE,
    LOSS_MASK_KEY,
    MAGIC,
    VERSION,
    IndexedDataset,
    data_path,
    file_paths,
    index_path,
    loss_mask_prefix,
    sample_digest,
)
from megatron.errors import UserError
from megatron.files import create_locked, locked_leftover, sync_file

COPY_BLOCK = 1 << 24  # number of bytes that are copied at a time


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
    """Writes `{prefix}.bin` and `.idx`. The files have temporary names until `finalize`.

    As a context manager it removes the temporary files on exit. The next builder of the same prefix removes
    files that a killed process left behind.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike, has_loss_mask: bool = False
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODE_OF_DTYPE:
            raise ValueError(f"token ids cannot be stored as {np.dtype(dtype)}")
        suffix = f".{uuid.uuid4().hex}.tmp"
        self._temporary_data = data_path(self.prefix) + suffix
        self._temporary_index = index_path(self.prefix) + suffix
        self._digest = hashlib.sha256()
        self._sizes: list[npt.NDArray[np.int32]] = []
        # Index of the first sequence of each document. A document of an appended dataset may have several
        # sequences.
        self._doc_idx: list[range | npt.NDArray[np.int64]] = []
        self.num_documents = 0
        self.num_tokens = 0
        _remove_leftovers(self.prefix)
        with write_errors(index_path(self.prefix)):
            # It stays open (and locked) until the last rename: unlocked temporary files belong to dead
            # processes.
            self._index_file = create_locked(self._temporary_index)
        with write_errors(data_path(self.prefix)):
            self._file: BinaryIO = open(self._temporary_data, "xb")
        mask = loss_mask_prefix(self.prefix)
        self._loss_mask = IndexedDatasetBuilder(mask, LOSS_MASK_DTYPE) if has_loss_mask else None

    def add_documents(
        self, tokens: npt.ArrayLike, sizes: npt.ArrayLike, loss_mask: npt.ArrayLike | None = None
    ) -> None:
        """Appends documents. tokens: their concatenated ids. sizes: the number of tokens of each document.
        loss_mask: for each token whether it counts in the loss, if the data set has a loss mask."""
        if self._loss_mask is not None:
            self._loss_mask.add_documents(np.asarray(loss_mask, dtype=LOSS_MASK_DTYPE), sizes)
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
        """Appends all documents of `dataset`. Its .bin file is copied as bytes.

        on_progress: called with the number of bytes of each copied block. Raises UserError if the dtypes of
        the token ids differ.
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
        if self._loss_mask is not None and dataset.loss_mask is not None:
            self._loss_mask.add_dataset(dataset.loss_mask, lambda size: None)
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

    def finalize(self, write_record: Callable[[dict[str, str]], object] = lambda digests: None) -> str:
        """Writes the index, and renames the files (also the loss mask's) to their final names. A reader finds
        either all files or none. Returns the SHA-256 of .bin.

        write_record: called with the digests of the .bin files before the files get their names, so that no
        reader finds the files without their record.
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
        # The old index is removed first, so that it is never read together with the new .bin or loss mask.
        if os.path.exists(index_path(self.prefix)):
            os.remove(index_path(self.prefix))
        for path in file_paths(self.prefix)[2:]:
            with suppress(FileNotFoundError):
                os.remove(path)
        if self._loss_mask is not None:
            digests[LOSS_MASK_KEY] = self._loss_mask.finalize()
        write_record(digests)
        os.replace(self._temporary_data, data_path(self.prefix))
        os.replace(self._temporary_index, index_path(self.prefix))
        sync_file(Path(self.prefix).absolute().parent)
        self._index_file.close()
        return digests["bin_sha256"]

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
        if self._loss_mask is not None:
            self._loss_mask.discard()
        for file in (self._file, self._index_file):
            with suppress(OSError):  # if the disk is full, the flush fails again
                file.close()
        for path in (self._temporary_data, self._temporary_index):
            with suppress(FileNotFoundError):  # renamed, or removed by the next builder as a leftover
                os.remove(path)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()


def _remove_leftovers(prefix: str) -> None:
    """Removes temporary files of builders whose process has died."""
    for index in glob.glob(f"{glob.escape(index_path(prefix))}.*.tmp"):
        with suppress(OSError), locked_leftover(index):
            suffix = index.removeprefix(index_path(prefix))
            with suppress(FileNotFoundError):
                os.remove(data_path(prefix) + suffix)
            os.remove(index)
