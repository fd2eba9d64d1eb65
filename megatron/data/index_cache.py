"""Index files: the sample order as .npy files, built by one process and memory-mapped by all.

They are in the folder of the data, or in that of --data-cache-path. One process per node calls
`prepare_sample_index`. Afterwards every process calls `load_sample_index`. Files are written under a
temporary name and renamed. Their contents do not depend on the process: concurrent builders are safe.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indices import EpochPlan, SampleIndex, build_sample_order, plan_epochs
from megatron.errors import UserError, is_access_error, stop_at_access_error
from megatron.files import open_regular
from megatron.mapped_file import map_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexRequest:
    """Everything that determines the sample order of one split and the names of its index files."""

    dataset: IndexedDataset
    split_name: str
    documents: range
    num_samples: int
    seq_length: int
    seed: int
    index_name: str | None = None
    """Identifies the documents in the file names. None: the name of the split, as in Megatron."""
    cache_folder: str | None = None
    """The folder of the files. None: the folder of the data."""

    def plan(self) -> EpochPlan:
        """The number of epochs and samples. UserError if one epoch has fewer tokens than one sample."""
        tokens = self.dataset.tokens_in(self.documents)
        if tokens < self.seq_length + 1:
            raise UserError(
                f"{self.dataset.source}: the {self.split_name} split has {tokens:,} tokens in "
                f"{len(self.documents):,} documents, expected at least {self.seq_length + 1:,} for a sample: "
                "give the split more documents, or lower --seq-length"
            )
        return plan_epochs(tokens, self.seq_length, self.num_samples)

    def paths(self) -> tuple[str, str, str]:
        """The files of the document, sample and shuffle index, named as in Megatron."""
        stem = f"{self._data_name()}_{self.index_name or self.split_name}_indexmap"
        stem += f"_{self.num_samples}ns_{self.seq_length}sl_{self.seed}s"
        return f"{stem}_doc_idx.npy", f"{stem}_sample_idx.npy", f"{stem}_shuffle_idx.npy"

    def _data_name(self) -> str:
        """The prefix of the data, or in a cache folder a name that is unique to the prefix."""
        if self.cache_folder is None:
            return self.dataset.prefix
        path = os.path.abspath(self.dataset.prefix)
        digest = hashlib.sha256(path.encode()).hexdigest()[:12]
        return os.path.join(self.cache_folder, f"{os.path.basename(path)}-{digest}")


class IndexFileError(Exception):
    """An index file is missing, damaged or was built from other data."""


@stop_at_access_error()
def prepare_sample_index(request: IndexRequest) -> None:
    """Build the index files unless valid ones exist. UserError if the folder is not writable."""
    plan = request.plan()
    try:
        index = _read_index(request, plan)
        _check_contents(request, plan, index)
        return
    except IndexFileError as problem:
        logger.info(
            "building the %s index files of %s: %s", request.split_name, request.dataset.prefix, problem
        )
    index = build_sample_order(
        request.dataset.sizes, request.documents, request.seq_length, request.seed, plan
    )
    arrays = (index.documents, index.samples, index.shuffle)
    for path, array in zip(request.paths(), arrays, strict=True):
        _write_array(path, array)


@stop_at_access_error()
def load_sample_index(request: IndexRequest) -> SampleIndex:
    """Memory-map the index files. Raises UserError, naming the file, if one is missing or damaged."""
    try:
        return _read_index(request, request.plan())
    except IndexFileError as problem:
        raise UserError(
            f"{problem}: one process per node builds the index files of {request.dataset.source} before "
            "training, and every process needs access to their folder"
        ) from problem


def _read_index(request: IndexRequest, plan: EpochPlan) -> SampleIndex:
    shapes = ((plan.num_epochs * len(request.documents),), (plan.total_samples + 1, 2), (plan.total_samples,))
    arrays = [_read_array(path, shape) for path, shape in zip(request.paths(), shapes, strict=True)]
    return SampleIndex(*arrays)


def _read_array(path: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    try:
        array = _map_array(path)
    except FileNotFoundError:
        raise IndexFileError(f"{path} does not exist") from None
    except Exception as error:  # numpy parses the header as a Python literal, with errors of any type
        if is_access_error(error):
            raise
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise IndexFileError(f"{path} is damaged ({reason})") from error
    if array.dtype.kind not in "iu":
        raise IndexFileError(f"{path} does not hold an array of integers")
    if array.shape != shape:
        raise IndexFileError(f"{path} has shape {array.shape}, expected {shape}")
    return array


def _map_array(path: str) -> npt.NDArray[Any]:
    """As np.load(path, mmap_mode="r"), without a descriptor that stays open."""
    with open_regular(path) as file:
        # Headers of later versions may have gigabytes; np.save writes them for other dtypes only.
        if (version := np.lib.format.read_magic(file)) != (1, 0):
            raise ValueError(f"version {version} of the npy format, expected (1, 0)")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
        start, count = file.tell(), math.prod(shape)
    content = map_file(path)[start : start + count * dtype.itemsize].view(dtype)
    return content.reshape(shape, order="F" if is_fortran else "C")


def _check_contents(request: IndexRequest, plan: EpochPlan, index: SampleIndex) -> None:
    """Raise IndexFileError for files of the right shape that are damaged or were built from other data."""
    doc_path, sample_path, shuffle_path = request.paths()
    documents, samples, shuffle = index.documents, index.samples, index.shuffle
    if documents.min() < request.documents.start or documents.max() >= request.documents.stop:
        raise IndexFileError(f"{doc_path} names documents outside {request.documents}")
    total, before_last = plan.total_samples, plan.samples_before_last_epoch
    if shuffle.min() != 0 or shuffle.max() != total - 1 or 2 * int(shuffle.sum()) != total * (total - 1):
        raise IndexFileError(f"{shuffle_path} is not a permutation of {total} samples")
    if plan.separate_last_epoch and before_last and shuffle[:before_last].max() >= before_last:
        # Other Megatron versions have another threshold for a separate last epoch, and the same file names.
        raise IndexFileError(f"{shuffle_path} mixes the last epoch with the others")
    positions, offsets = samples[:, 0], samples[:, 1]
    if samples.min() < 0 or positions.max() >= len(documents) or np.any(positions[1:] < positions[:-1]):
        raise IndexFileError(f"{sample_path} points outside {doc_path}")
    ends = np.cumsum(request.dataset.sizes[documents], dtype=np.int64)
    if ends[-1] != plan.num_epochs * plan.tokens_per_epoch:
        raise IndexFileError(f"{doc_path} does not hold every document {plan.num_epochs} times")
    starts = ends[positions] - request.dataset.sizes[documents[positions]]
    if np.any(starts + offsets != np.arange(total + 1, dtype=np.int64) * request.seq_length):
        raise IndexFileError(f"{sample_path} was built from other data")


def _write_array(path: str, array: npt.NDArray[Any]) -> None:
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        with open(temporary, "xb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise UserError(
            f"cannot write index files into {folder} ({error.strerror}): set --data-cache-path to another "
            "folder"
        ) from error
