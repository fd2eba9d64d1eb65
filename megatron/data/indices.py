"""The order of samples: document, sample and shuffle index, computed as in Megatron.

The arrays equal Megatron's for equal data, seed, sequence length and number of samples. They are computed in
this order from one `numpy.random.RandomState(seed)`:

document index  The documents of all epochs, shuffled together. If less than 95 % of the last epoch is used,
                the last epoch is shuffled separately and appended, so that no document is repeated before
                all documents have been read.
sample index    The documents are concatenated in this order and split every seq_length tokens. Row i is the
                first token of sample i (position in the document index, offset in that document), row i + 1
                its last: a sample has seq_length + 1 tokens; consecutive samples overlap by one token.
shuffle index   A permutation of the samples. A separate last epoch is permuted separately.

Index files hold the arrays as .npy files, in the folder of the data or of --data-cache-path. One process per
node calls `prepare_sample_index`, which builds them; then every process calls `load_sample_index`, which
memory-maps them. Files are written under a temporary name and renamed. All processes would write equal
contents, so concurrent builders are safe.
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
from megatron.errors import UserError, is_access_error, stop_at_access_error
from megatron.files import open_regular
from megatron.mapped_file import map_open_file

# The value of BigScience's Megatron-DeepSpeed. NVIDIA's Megatron-LM has 0.80.
SEPARATE_LAST_EPOCH_THRESHOLD = 0.95


@dataclass(frozen=True)
class EpochPlan:
    """The number of epochs over the documents of a split, and the samples that they give."""

    num_epochs: int
    tokens_per_epoch: int
    total_samples: int
    """Complete samples in all epochs, at least the requested number."""
    samples_before_last_epoch: int
    """Complete samples in all epochs but the last."""
    separate_last_epoch: bool
    """Whether the last epoch is shuffled separately."""


@dataclass(frozen=True)
class SampleIndex:
    """The document, sample and shuffle index."""

    documents: npt.NDArray[Any]
    """Document index, [num_epochs * documents]: document numbers."""
    samples: npt.NDArray[Any]
    """Sample index, [total_samples + 1, 2]: position in `documents`, token offset in that document."""
    shuffle: npt.NDArray[Any]
    """Shuffle index, [total_samples]: row of `samples` for each sample in training order."""


def plan_epochs(tokens_per_epoch: int, seq_length: int, num_samples: int) -> EpochPlan:
    """Plans at least `num_samples` samples of `seq_length` + 1 tokens; adjacent samples share one token.

    Raises ValueError unless all arguments are positive.
    """
    if tokens_per_epoch < 1 or seq_length < 1 or num_samples < 1:
        raise ValueError(f"{tokens_per_epoch} tokens, sequence length {seq_length}, {num_samples} samples")
    num_epochs = -(-(num_samples * seq_length + 1) // tokens_per_epoch)
    before_last = max(((num_epochs - 1) * tokens_per_epoch - 1) // seq_length, 0)
    samples_per_epoch = (tokens_per_epoch - 1) // seq_length
    return EpochPlan(
        num_epochs=num_epochs,
        tokens_per_epoch=tokens_per_epoch,
        total_samples=(num_epochs * tokens_per_epoch - 1) // seq_length,
        samples_before_last_epoch=before_last,
        separate_last_epoch=num_epochs > 1
        and num_samples - before_last < int(SEPARATE_LAST_EPOCH_THRESHOLD * samples_per_epoch),
    )


def build_sample_order(
    sizes: npt.NDArray[Any], documents: range, seq_length: int, seed: int, plan: EpochPlan
) -> SampleIndex:
    """Computes the three arrays for `documents` of a dataset. sizes: tokens of each of its documents."""
    generator = np.random.RandomState(seed)
    order = build_document_index(documents, plan, generator)
    samples = build_sample_index(sizes, order, seq_length, plan.total_samples)
    return SampleIndex(order, samples, build_shuffle_index(plan, generator))


def build_document_index(
    documents: range, plan: EpochPlan, generator: np.random.RandomState
) -> npt.NDArray[Any]:
    """Returns the shuffled documents of all epochs, [num_epochs * documents]."""
    epoch = np.arange(documents.start, documents.stop, dtype=_index_dtype(documents.stop))
    last = 1 if plan.separate_last_epoch else 0
    order = np.tile(epoch, plan.num_epochs - last)
    generator.shuffle(order)
    if last:
        generator.shuffle(epoch)
        order = np.concatenate((order, epoch))
    return order


def build_sample_index(
    sizes: npt.NDArray[Any], document_index: npt.NDArray[Any], seq_length: int, num_samples: int
) -> npt.NDArray[Any]:
    """Returns the first token of each sample and the last token of the last sample, [num_samples + 1, 2].

    Row: position in `document_index`, token offset in that document. The documents must have at least
    num_samples * seq_length + 1 tokens. Row 0 is the first document, also if it is empty. No other row refers
    to an empty document.
    """
    ends = np.cumsum(sizes[document_index], dtype=np.int64)
    boundaries = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    positions = np.searchsorted(ends, boundaries, side="right")
    positions[0] = 0
    starts = ends[positions] - sizes[document_index[positions]]
    samples = np.empty((num_samples + 1, 2), dtype=_index_dtype(len(document_index)))
    samples[:, 0] = positions
    samples[:, 1] = boundaries - starts
    return samples


def build_shuffle_index(plan: EpochPlan, generator: np.random.RandomState) -> npt.NDArray[Any]:
    """Returns a permutation of the rows of the sample index, [total_samples]."""
    total = plan.total_samples
    order = np.arange(total, dtype=np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64)
    first = plan.samples_before_last_epoch if plan.separate_last_epoch else total
    generator.shuffle(order[:first])
    if first < total:
        generator.shuffle(order[first:])
    return order


def _index_dtype(limit: int) -> type[np.signedinteger[Any]]:
    return np.int32 if limit <= np.iinfo(np.int32).max else np.int64


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
        """Returns the number of epochs and samples. Raises UserError if an epoch has fewer tokens than one
        sample."""
        tokens = self.dataset.tokens_in(self.documents)
        if tokens < self.seq_length + 1:
            raise UserError(
                f"{self.dataset.source}: the {self.split_name} split has {tokens:,} tokens in "
                f"{len(self.documents):,} documents, expected at least {self.seq_length + 1:,} for a sample: "
                "give the split more documents, or reduce --seq-length"
            )
        return plan_epochs(tokens, self.seq_length, self.num_samples)

    def paths(self) -> tuple[str, str, str]:
        """Returns the files of the document, sample and shuffle index, named as in Megatron."""
        stem = f"{self._data_name()}_{self.index_name or self.split_name}_indexmap"
        stem += f"_{self.num_samples}ns_{self.seq_length}sl_{self.seed}s"
        return f"{stem}_doc_idx.npy", f"{stem}_sample_idx.npy", f"{stem}_shuffle_idx.npy"

    def _data_name(self) -> str:
        """Returns the prefix of the data; with a cache folder, a path in it that is unique to the prefix."""
        if self.cache_folder is None:
            return self.dataset.prefix
        path = os.path.abspath(self.dataset.prefix)
        digest = hashlib.sha256(path.encode()).hexdigest()[:12]
        return os.path.join(self.cache_folder, f"{os.path.basename(path)}-{digest}")


class IndexFileError(Exception):
    """An index file is missing, damaged or was built from other data."""


@stop_at_access_error()
def prepare_sample_index(request: IndexRequest) -> None:
    """Builds the index files unless valid ones exist. Raises UserError if the folder is not writable."""
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
    """Memory-maps the index files. Raises UserError, naming the file, if one is missing or damaged."""
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
    """Returns what np.load(path, mmap_mode="r") returns, without keeping a file descriptor open."""
    with open_regular(path) as file:
        # Headers of later versions may have gigabytes; np.save does not write them for integers.
        if (version := np.lib.format.read_magic(file)) != (1, 0):
            raise ValueError(f"version {version} of the npy format, expected (1, 0)")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
        start, count = file.tell(), math.prod(shape)
        content = map_open_file(file, path)[start : start + count * dtype.itemsize].view(dtype)
    return content.reshape(shape, order="F" if is_fortran else "C")


def _check_contents(request: IndexRequest, plan: EpochPlan, index: SampleIndex) -> None:
    """Raises IndexFileError if files of the expected shape are damaged or were built from other data."""
    doc_path, sample_path, shuffle_path = request.paths()
    documents, samples, shuffle = index.documents, index.samples, index.shuffle
    if documents.min() < request.documents.start or documents.max() >= request.documents.stop:
        raise IndexFileError(f"{doc_path} names documents outside {request.documents}")
    total, before_last = plan.total_samples, plan.samples_before_last_epoch
    # Comparing sums is not enough: wrong numbers of a damaged file may have the expected sum.
    found = np.zeros(total, dtype=bool)
    if shuffle.min() >= 0 and shuffle.max() < total:
        found[shuffle] = True
    if not found.all():
        raise IndexFileError(f"{shuffle_path} is not a permutation of {total} samples")
    if plan.separate_last_epoch and before_last and shuffle[:before_last].max() >= before_last:
        # Other versions of Megatron have a different threshold for a separate last epoch, but equal names.
        raise IndexFileError(f"{shuffle_path} mixes the last epoch with the others")
    positions, offsets = samples[:, 0], samples[:, 1]
    if samples.min() < 0 or positions.max() >= len(documents) or np.any(positions[1:] < positions[:-1]):
        raise IndexFileError(f"{sample_path} points outside {doc_path}")
    if np.any(np.bincount(documents - request.documents.start) != plan.num_epochs):
        raise IndexFileError(f"{doc_path} does not hold every document {plan.num_epochs} times")
    ends = np.cumsum(request.dataset.sizes[documents], dtype=np.int64)
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
            f"cannot write index files into {folder} ({error.strerror}): set --data-cache-path to a "
            "different folder"
        ) from error
