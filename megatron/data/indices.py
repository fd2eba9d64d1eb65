"""The order of samples: document, sample and shuffle index, computed as in Megatron.

The arrays equal Megatron's for equal data, seed, sequence length and number of samples; --data-order chooses
which program "Megatron" is. They are computed in this order from one `numpy.random.RandomState(seed)`:

document index  The documents of all epochs, shuffled together. If less than a certain share of the last epoch
                (`DataOrder.last_epoch_threshold`) is used, this epoch is shuffled separately and appended, so
                that no document is repeated before all documents have been read.
sample index    The documents are concatenated in this order and split every seq_length tokens. Row i is the
                first token of sample i (position in the document index, offset in that document), and row
                i + 1 is its last token: a sample has seq_length + 1 tokens, so consecutive samples share one.
shuffle index   A permutation of the samples. A separate last epoch is permuted separately.

Index files hold the arrays as .npy files, in the folder of the data or of --data-cache-path. One process per
node calls `prepare_sample_index`, which builds them. When a process reads the first sample, it calls
`load_sample_index`, which memory-maps them. Files are written under a temporary name and renamed. All
processes would write equal contents, so concurrent builders are safe.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.config.registries import DATA_ORDERS, DataOrder
from megatron.data.helpers import address, compiled, count
from megatron.data.index_files import IndexFileError, read_array, write_array
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import UserError, stop_at_access_error

logger = logging.getLogger(__name__)

# Number of documents or samples from which compiling the loop pays off.
_COMPILED_FROM = 1 << 20

IndexPaths = tuple[str, str, str]
"""The files of the document, sample and shuffle index."""


@dataclass(frozen=True)
class EpochPlan:
    """The number of epochs over the documents of a split, and the number of samples in them."""

    num_epochs: int
    tokens_per_epoch: int
    total_samples: int
    """Number of complete samples in all epochs; at least the requested number."""
    samples_before_last_epoch: int
    """Number of complete samples in all epochs except the last."""
    separate_last_epoch: bool
    """Whether the last epoch is shuffled separately."""


@dataclass(frozen=True)
class SampleIndex:
    """The three arrays of an index: document, sample and shuffle index."""

    documents: npt.NDArray[Any]
    """Document index, [num_epochs * documents]: document numbers."""
    samples: npt.NDArray[Any]
    """Sample index, [total_samples + 1, 2]: position in `documents`, token offset in that document."""
    shuffle: npt.NDArray[Any]
    """Shuffle index, [total_samples]: row of `samples` for each sample in training order."""


def plan_epochs(
    tokens_per_epoch: int, seq_length: int, num_samples: int, last_epoch_threshold: float
) -> EpochPlan:
    """Returns the plan for at least `num_samples` samples of `seq_length` + 1 tokens. Adjacent samples share
    one token.

    last_epoch_threshold: see `DataOrder`. Raises ValueError unless all numbers are positive.
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
        and num_samples - before_last < int(last_epoch_threshold * samples_per_epoch),
    )


def build_sample_order(
    sizes: npt.NDArray[Any], documents: range, seq_length: int, seed: int, plan: EpochPlan
) -> SampleIndex:
    """Returns the three arrays for `documents` of a dataset. sizes: number of tokens of each of its
    documents."""
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
    _shuffle(generator, order)
    if last:
        _shuffle(generator, epoch)
        order = np.concatenate((order, epoch))
    return order


def build_sample_index(
    sizes: npt.NDArray[Any], document_index: npt.NDArray[Any], seq_length: int, num_samples: int
) -> npt.NDArray[Any]:
    """Returns the first token of each sample, followed by the last token of the last sample, [num_samples +
    1, 2].

    A row is (position in `document_index`, token offset in that document). The documents must have at least
    num_samples * seq_length + 1 tokens. Row 0 is in the first document, even if this document is empty. No
    other row is in an empty document.
    """
    dtype = _index_dtype(len(document_index))
    samples = np.empty((num_samples + 1, 2), dtype)
    if len(document_index) + num_samples >= _COMPILED_FROM and (helpers := compiled()) is not None:
        # The sizes may be unaligned, because they are mapped from the .idx file.
        lengths = np.require(sizes, np.int32, ("C", "A"))
        documents = np.require(document_index, dtype, ("C", "A"))
        walk = getattr(helpers, f"sample_index_{np.dtype(dtype).name}")
        walk.restype = ctypes.c_int64
        found = walk(
            address(lengths),
            address(documents),
            count(len(documents)),
            count(seq_length),
            count(len(samples)),
            address(samples),
        )
        if found < len(samples):
            raise ValueError(f"the documents have too few tokens for {num_samples:,} samples")
        return samples
    ends = np.cumsum(sizes[document_index], dtype=np.int64)
    boundaries = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    positions = np.searchsorted(ends, boundaries, side="right")
    positions[0] = 0
    starts = ends[positions] - sizes[document_index[positions]]
    samples[:, 0] = positions
    samples[:, 1] = boundaries - starts
    return samples


def build_shuffle_index(plan: EpochPlan, generator: np.random.RandomState) -> npt.NDArray[Any]:
    """Returns a permutation of the rows of the sample index, [total_samples]."""
    total = plan.total_samples
    order = np.arange(total, dtype=np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64)
    first = plan.samples_before_last_epoch if plan.separate_last_epoch else total
    _shuffle(generator, order[:first])
    if first < total:
        _shuffle(generator, order[first:])
    return order


def _shuffle(generator: np.random.RandomState, values: npt.NDArray[Any]) -> None:
    """Does what `generator.shuffle(values)` does. Long arrays are shuffled by compiled code: faster, without
    the GIL."""
    if not _COMPILED_FROM <= len(values) < 1 << 32 or (helpers := compiled()) is None:
        generator.shuffle(values)
        return
    source = generator._bit_generator.ctypes
    shuffle = getattr(helpers, f"shuffle_{values.itemsize}")
    shuffle.restype = None
    next_bits = ctypes.cast(source.next_uint32, ctypes.c_void_p)
    shuffle(ctypes.c_void_p(source.state_address), next_bits, count(len(values)), address(values))


def _index_dtype(limit: int) -> type[np.signedinteger[Any]]:
    return np.int32 if limit <= np.iinfo(np.int32).max else np.int64


@dataclass(frozen=True)
class IndexRequest:
    """Everything that determines the sample order of one split and the names of its index files."""

    dataset: IndexedDataset
    split_name: str
    documents: range
    num_samples: int
    seq_length: int
    seed: int
    cache_folder: str | None = None
    """The folder of the index files; None for the folder of the data."""
    order: DataOrder = DATA_ORDERS["native"]

    def plan(self) -> EpochPlan:
        """Returns the number of epochs and samples. Raises UserError if an epoch has fewer tokens than one
        sample has."""
        tokens = self.dataset.tokens_in(self.documents)
        if tokens < self.order.shortest(self.seq_length):
            raise UserError(
                f"{self.dataset.source}: the {self.split_name} split has {tokens:,} tokens in "
                f"{len(self.documents):,} documents, expected at least {self.seq_length + 1:,} for a sample: "
                "give the split more documents, or reduce --seq-length"
            )
        return plan_epochs(tokens, self.seq_length, self.num_samples, self.order.last_epoch_threshold)

    def paths(self) -> IndexPaths:
        """Returns the files of the document, sample and shuffle index. Their names contain everything that
        determines their contents: a longer run with equally many epochs finds them, and groups with equal
        documents share them."""
        plan = self.plan()
        length = f"{plan.num_epochs}epochs{'-last-apart' if plan.separate_last_epoch else ''}"
        stem = f"{self._data_name()}_documents{self.documents.start}-{self.documents.stop}"
        stem += f"_indexmap_{length}_{self.seq_length}sl_{self.seed}s"
        return f"{stem}_doc_idx.npy", f"{stem}_sample_idx.npy", f"{stem}_shuffle_idx.npy"

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the document, sample and shuffle index."""
        plan = self.plan()
        return (plan.num_epochs * len(self.documents),), (plan.total_samples + 1, 2), (plan.total_samples,)

    def _data_name(self) -> str:
        """Returns the prefix of the data. With a cache folder, returns a path in it that is unique to the
        prefix."""
        if self.cache_folder is None:
            return self.dataset.prefix
        path = os.path.abspath(self.dataset.prefix)
        digest = hashlib.sha256(path.encode()).hexdigest()[:12]
        return os.path.join(self.cache_folder, f"{os.path.basename(path)}-{digest}")


@stop_at_access_error()
def prepare_sample_index(request: IndexRequest) -> bool:
    """Builds the index files unless valid ones exist. Returns whether it has written them. Raises UserError
    if the folder is not writable."""
    if _is_valid(request):
        return False
    index = build_sample_order(
        request.dataset.sizes, request.documents, request.seq_length, request.seed, request.plan()
    )
    arrays = (index.documents, index.samples, index.shuffle)
    for path, array in zip(request.paths(), arrays, strict=True):
        write_array(path, array)
    return True


def _is_valid(request: IndexRequest) -> bool:
    """Returns whether the index files exist, are undamaged and were built from these data."""
    if not os.path.lexists(request.paths()[0]):
        return False
    try:
        _check_contents(request, _read_index(request))
    except IndexFileError as problem:
        logger.info("the %s index files of %s: %s", request.split_name, request.dataset.prefix, problem)
        return False
    return True


@stop_at_access_error()
def load_sample_index(request: IndexRequest) -> SampleIndex:
    """Returns the memory-mapped index. Raises UserError, naming the file, if a file is missing or damaged."""
    try:
        return _read_index(request)
    except IndexFileError as problem:
        raise UserError(
            f"{problem}: one process per node builds the index files of {request.dataset.source} before "
            "training, and every process needs access to their folder"
        ) from problem


def _read_index(request: IndexRequest) -> SampleIndex:
    arrays = [read_array(path, shape) for path, shape in zip(request.paths(), request.shapes(), strict=True)]
    return SampleIndex(*arrays)


def _check_contents(request: IndexRequest, index: SampleIndex) -> None:
    """Raises IndexFileError if files of the expected shape are damaged or were built from different data."""
    plan, (doc_path, sample_path, shuffle_path) = request.plan(), request.paths()
    documents, samples, shuffle = index.documents, index.samples, index.shuffle
    if documents.min() < request.documents.start or documents.max() >= request.documents.stop:
        raise IndexFileError(f"{doc_path} names documents outside {request.documents}")
    total, before_last = plan.total_samples, plan.samples_before_last_epoch
    # Comparing sums would not be enough: wrong numbers in a damaged file may have the expected sum.
    found = np.zeros(total, dtype=bool)
    if shuffle.min() >= 0 and shuffle.max() < total:
        found[shuffle] = True
    if not found.all():
        raise IndexFileError(f"{shuffle_path} is not a permutation of {total} samples")
    if plan.separate_last_epoch and before_last and shuffle[:before_last].max() >= before_last:
        # Other versions of Megatron have a different threshold for a separate last epoch, but the same file
        # names.
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
