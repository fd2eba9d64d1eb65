"""The sample order as files beside the data, so that it is made once and memory-mapped by every process.

One process per file system calls `prepare_sample_index`; when it is done, any process may call
`load_sample_index`. Files are written under a temporary name and renamed, and are the same whoever makes
them: two builders at once do no harm.
"""

from __future__ import annotations

import logging
import os
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indices import EpochPlan, SampleIndex, build_sample_order, plan_epochs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexRequest:
    """What determines one split's sample order, and the names of its files."""

    dataset: IndexedDataset
    split_name: str
    documents: range
    num_samples: int
    seq_length: int
    seed: int
    index_name: str | None = None
    """What stands for the documents in the files' names; None: the split's name, as in Megatron."""

    def plan(self) -> EpochPlan:
        """How many epochs it takes. Raises ConfigError if an epoch has not the tokens of one sample."""
        sizes = self.dataset.sizes[self.documents.start : self.documents.stop]
        tokens = int(sizes.sum(dtype=np.int64))
        if tokens < self.seq_length + 1:
            raise ConfigError(
                f"{self.dataset.source}: the {self.split_name} split has {tokens:,} tokens in "
                f"{len(self.documents):,} documents, and one sample needs {self.seq_length + 1:,}: give the "
                "split more documents, or lower --seq-length"
            )
        return plan_epochs(tokens, self.seq_length, self.num_samples)

    def paths(self) -> tuple[str, str, str]:
        """Megatron's names for the files of the document, sample and shuffle index."""
        stem = f"{self.dataset.prefix}_{self.index_name or self.split_name}_indexmap"
        stem += f"_{self.num_samples}ns_{self.seq_length}sl_{self.seed}s"
        return f"{stem}_doc_idx.npy", f"{stem}_sample_idx.npy", f"{stem}_shuffle_idx.npy"


class IndexFileError(Exception):
    """An index file is missing, damaged, or made from other data."""


def prepare_sample_index(request: IndexRequest) -> None:
    """Make the index files, unless good ones are there. ConfigError if the data's folder is not writable."""
    plan = request.plan()
    try:
        index = _read_index(request, plan)
        _check_contents(request, plan, index)
        return
    except IndexFileError as problem:
        logger.info(
            "making the %s index files of %s: %s", request.split_name, request.dataset.prefix, problem
        )
    index = build_sample_order(
        request.dataset.sizes, request.documents, request.seq_length, request.seed, plan
    )
    arrays = (index.documents, index.samples, index.shuffle)
    for path, array in zip(request.paths(), arrays, strict=True):
        _write_array(path, array)


def load_sample_index(request: IndexRequest) -> SampleIndex:
    """Memory-map the index files. Raises ConfigError, naming the file, if one is missing or damaged."""
    try:
        return _read_index(request, request.plan())
    except IndexFileError as problem:
        raise ConfigError(
            f"{problem}: index files are made by one process per file system before training, and every "
            f"process must see the folder of {request.dataset.source}"
        ) from problem


def _read_index(request: IndexRequest, plan: EpochPlan) -> SampleIndex:
    shapes = ((plan.num_epochs * len(request.documents),), (plan.total_samples + 1, 2), (plan.total_samples,))
    arrays = [_read_array(path, shape) for path, shape in zip(request.paths(), shapes, strict=True)]
    return SampleIndex(*arrays)


def _read_array(path: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise IndexFileError(f"there is no {path}") from None
    except Exception as error:  # the header is parsed as Python's literals: it can fail anywhere
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise IndexFileError(f"{path} is damaged ({reason})") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        raise IndexFileError(f"{path} does not hold an array of integers")
    if array.shape != shape:
        raise IndexFileError(f"{path} has shape {array.shape}, expected {shape}")
    return np.asarray(array)


def _check_contents(request: IndexRequest, plan: EpochPlan, index: SampleIndex) -> None:
    """Find files whose shape is right but which were made from other data, or lost a page on the way."""
    doc_path, sample_path, shuffle_path = request.paths()
    documents, samples, shuffle = index.documents, index.samples, index.shuffle
    if documents.min() < request.documents.start or documents.max() >= request.documents.stop:
        raise IndexFileError(f"{doc_path} names documents outside {request.documents}")
    total, before_last = plan.total_samples, plan.samples_before_last_epoch
    if shuffle.min() != 0 or shuffle.max() != total - 1 or 2 * int(shuffle.sum()) != total * (total - 1):
        raise IndexFileError(f"{shuffle_path} is not an order of {total} samples")
    if plan.separate_last_epoch and before_last and shuffle[:before_last].max() >= before_last:
        # Other members of the family set the last epoch apart more rarely, under the same file names.
        raise IndexFileError(f"{shuffle_path} mixes the last epoch with the others")
    places, offsets = samples[:, 0], samples[:, 1]
    if samples.min() < 0 or places.max() >= len(documents) or np.any(places[1:] < places[:-1]):
        raise IndexFileError(f"{sample_path} points outside {doc_path}")
    ends = np.cumsum(request.dataset.sizes[documents], dtype=np.int64)
    if ends[-1] != plan.num_epochs * plan.tokens_per_epoch:
        raise IndexFileError(f"{doc_path} does not hold every document {plan.num_epochs} times")
    starts = ends[places] - request.dataset.sizes[documents[places]]
    if np.any(starts + offsets != np.arange(total + 1, dtype=np.int64) * request.seq_length):
        raise IndexFileError(f"{sample_path} was made from other data")


def _write_array(path: str, array: npt.NDArray[Any]) -> None:
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "xb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if os.path.exists(temporary):
            os.remove(temporary)
        folder = os.path.dirname(os.path.abspath(path))
        raise ConfigError(
            f"cannot write index files into {folder} ({error.strerror}): make the folder of the "
            "data writable, or start once as a user who may write there"
        ) from error
