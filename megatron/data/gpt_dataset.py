"""Map-style datasets of samples of consecutive tokens; each split has one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from megatron.config import DataConfig
from megatron.data.blended_dataset import BlendedDataset
from megatron.data.flags import SPLIT_NAMES
from megatron.data.index_files import remove_leftovers
from megatron.data.index_stamp import IndexStamp, statuses
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indices import (
    EpochPlan,
    IndexPaths,
    IndexRequest,
    SampleIndex,
    build_sample_order,
    load_sample_index,
    prepare_sample_index,
)
from megatron.data.sample import Sample, SampleDataset
from megatron.data.splits import DocumentGroup, document_groups
from megatron.errors import UserError

# For each split (train, valid, test): pairs (group, number of samples).
RequestedGroups = list[list[tuple[DocumentGroup, int]]]

# Largest number of samples. float64 represents such numbers exactly, and their sums fit into 64 bits.
_MOST_SAMPLES = 2**53
# A row has an int16 and an int64, see `greedy_blend.BlendTable`.
_TABLE_BYTES_PER_SAMPLE = 10


class GPTDataset:
    """The samples of one split in training order.

    In data with a loss mask, the tokens of a document that began in an earlier sample do not count as labels,
    because their context is not in the sample. The first token of a document does not count either: it has no
    context.
    """

    def __init__(
        self,
        name: str,
        dataset: IndexedDataset,
        load_index: Callable[[], SampleIndex],
        num_samples: int,
        seq_length: int,
    ) -> None:
        """load_index: called when the first sample is read. num_samples: number of samples in the index."""
        self.name = name
        self.seq_length = seq_length
        self.dataset = dataset
        self._load_index = load_index
        self._num_samples = num_samples

    @classmethod
    def from_files(cls, request: IndexRequest) -> GPTDataset:
        """Returns the dataset whose order is stored in the request's index files."""
        load_index = partial(load_sample_index, request)
        num_samples = request.plan().total_samples
        return cls(request.split_name, request.dataset, load_index, num_samples, request.seq_length)

    @cached_property
    def _index(self) -> SampleIndex:
        return self._load_index()

    def __len__(self) -> int:
        return self._num_samples

    @property
    def has_loss_mask(self) -> bool:
        return self.dataset.loss_mask is not None

    def __getitem__(self, i: int) -> npt.NDArray[np.int64]:
        return self._tokens(i, self.parts(i))

    def sample(self, i: int) -> Sample:
        parts = self.parts(i)
        tokens, mask = self._tokens(i, parts), self.dataset.loss_mask
        if mask is None:
            return Sample(tokens)
        counts = (
            np.concatenate([mask.get(document, start, end - start) for document, start, end in parts]) > 0
        )
        lengths = [end - start for _, start, end in parts]
        document_ids = np.repeat(np.arange(len(parts)), lengths)
        counts[1:] &= document_ids[1:] == document_ids[:-1]
        if parts[0][1] > 0:
            counts[: lengths[0]] = False
        return Sample(tokens, counts, document_ids)

    def _tokens(self, i: int, parts: list[tuple[int, int, int]]) -> npt.NDArray[np.int64]:
        found = [self.dataset.get(document, start, end - start) for document, start, end in parts]
        tokens = np.concatenate(found, dtype=np.int64)
        if len(tokens) != self.seq_length + 1:
            raise UserError(
                f"{self.dataset.source}: sample {i} of the {self.name} split has {len(tokens)} "
                f"tokens, expected {self.seq_length + 1}: delete the split's index files, "
                "which were built from different data"
            )
        return tokens

    def parts(self, i: int) -> list[tuple[int, int, int]]:
        """Returns (document, first token, end) for each part of sample i, in the order of its tokens."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of the {self.name} split, which has {len(self)}")
        row = int(self._index.shuffle[i])
        (first, offset), (last, final) = self._index.samples[row : row + 2].tolist()
        parts = []
        for position in range(first, last + 1):
            document = int(self._index.documents[position])
            # `final` is the offset of the sample's last token in its last document (inclusive).
            end = final + 1 if position == last else int(self.dataset.sizes[document])
            parts.append((document, offset if position == first else 0, end))
        return parts


class Datasets(NamedTuple):
    """The datasets of a run. A split that the run does not read has None.

    valid and test have one dataset, or one for each weighted group.
    """

    train: SampleDataset | None
    valid: tuple[SampleDataset, ...]
    test: tuple[SampleDataset, ...]


class _Requested(NamedTuple):
    """A group of documents, its number of samples, and the index request of each component."""

    group: DocumentGroup
    num_samples: int
    indices: list[IndexRequest]

    @property
    def folder(self) -> str:
        """The folder of the blend's table."""
        first = self.indices[0]
        return os.path.dirname(first.dataset.prefix) if first.cache_folder is None else first.cache_folder

    @property
    def table_paths(self) -> tuple[str, ...]:
        """The files of the blend's table; () if the group has no table."""
        blend = self.group.blend
        return () if blend is None else blend.table_paths(self.folder, self.num_samples)


def _requested(
    groups: Iterable[tuple[DocumentGroup, int]], seq_length: int, seed: int, cache_folder: str | None
) -> list[_Requested]:
    """Returns the index requests of groups. groups: see `RequestedGroups`."""
    return [
        _Requested(group, wanted, index_requests(group, wanted, seq_length, seed, cache_folder))
        for group, wanted in groups
    ]


def prepare_index_files(
    data: DataConfig,
    seq_length: int,
    seed: int,
    num_samples: tuple[int, int, int],
    stamp: IndexStamp | None = None,
    threads: int = 1,
    reads_back: bool = False,
) -> tuple[int, int]:
    """Builds the index files that `build_gpt_datasets` reads for equal arguments. Returns (number of indices
    and tables, how many of them it has written).

    Valid files are kept. Files that are unchanged since the stamp recorded them are not read. stamp: the
    stamp of a shard of the data sets; only the shard's indices are built, and the first shard builds the
    tables of blends. reads_back: whether indices are verified after they were written. One process per file
    system must call this function; after that all processes must wait at a barrier. Concurrent and repeated
    calls are safe.
    """
    stamp = stamp or IndexStamp(data)
    of_shard = {prefix for _, prefix in stamp.prefixes}
    found = chain(*requested_groups(data, seq_length, num_samples, stamp))
    groups = _requested(found, seq_length, seed, data.data_cache_path)
    requests = {
        request.paths(): request
        for requested in groups
        for request in requested.indices
        if request.dataset.prefix in of_shard
    }
    new = _prepare_indices(requests, stamp, threads, reads_back)
    tables = [requested for requested in groups if requested.table_paths and stamp.shard[0] == 0]
    new += sum([_prepare_table(requested, stamp) for requested in tables])
    stamp.write()
    return len(requests) + len({requested.table_paths for requested in tables}), new


def _prepare_indices(
    requests: dict[IndexPaths, IndexRequest], stamp: IndexStamp, threads: int, reads_back: bool
) -> int:
    """Builds the indices that are not valid, several at a time. Returns how many it has built. Raises
    UserError if one of them is not valid after it was written."""
    unknown = [
        paths for paths, request in requests.items() if not stamp.vouches(request.dataset.prefix, paths)
    ]
    for folder in {os.path.dirname(paths[0]) for paths in unknown}:
        remove_leftovers(folder or ".")

    def prepare(paths: IndexPaths) -> bool:
        request, found = requests[paths], statuses(paths)
        is_new = prepare_sample_index(request)
        if is_new and reads_back and prepare_sample_index(request):
            raise UserError(
                f"{paths[0]} is damaged after it was written: prepare the indices on a different machine, or "
                "set --data-cache-path to a different folder"
            )
        stamp.record(request.dataset.prefix, paths, statuses(paths) if is_new else found)
        return is_new

    with ThreadPoolExecutor(threads) as pool:
        try:
            results = pool.map(prepare, unknown)
            return sum(tqdm(results, "preparing indices", len(unknown), leave=False, disable=None))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _prepare_table(requested: _Requested, stamp: IndexStamp) -> bool:
    """Builds a blend's table unless it is valid. Returns whether it has built it."""
    group, num_samples, indices = requested
    assert group.blend is not None
    paths = requested.table_paths
    is_verified, found = stamp.vouches(None, paths), statuses(paths)
    available = [request.plan().total_samples for request in indices]
    is_new = group.blend.prepare(requested.folder, num_samples, available, is_verified)
    stamp.record(None, paths, statuses(paths) if is_new else found)
    return is_new


class IndexFiles(NamedTuple):
    """The files of an index, or of a blend's table."""

    paths: tuple[str, ...]
    num_bytes: int
    """Size of all files in bytes without their headers; for indices this assumes 32-bit integers."""
    is_prepared: bool
    """Whether the files are unchanged since the stamp recorded them."""


def list_index_files(
    data: DataConfig,
    seq_length: int,
    seed: int,
    num_samples: tuple[int, int, int],
    stamp: IndexStamp | None = None,
) -> list[IndexFiles]:
    """Returns the files that `build_gpt_datasets` reads for equal arguments. The files need not exist."""
    stamp = stamp or IndexStamp(data)
    found: dict[tuple[str, ...], IndexFiles] = {}
    groups = chain(*requested_groups(data, seq_length, num_samples, stamp))
    for requested in _requested(groups, seq_length, seed, data.data_cache_path):
        for request in requested.indices:
            paths, prefix = request.paths(), request.dataset.prefix
            num_bytes = 4 * sum(map(math.prod, request.shapes()))
            found[paths] = IndexFiles(paths, num_bytes, stamp.vouches(prefix, paths))
        if table := requested.table_paths:
            num_bytes = _TABLE_BYTES_PER_SAMPLE * requested.num_samples
            found[table] = IndexFiles(table, num_bytes, stamp.vouches(None, table))
    return list(found.values())


def build_gpt_datasets(
    data: DataConfig,
    seq_length: int,
    seed: int,
    num_samples: tuple[int, int, int],
    stamp: IndexStamp | None = None,
) -> Datasets:
    """Builds the train, valid and test datasets from the index files of `prepare_index_files`.

    num_samples: minimum number of samples of the train, valid and test datasets. A split with 0 samples,
    without documents or with weight 0 has no dataset. Raises UserError for damaged data, missing index files,
    and a split with fewer tokens than one sample has.
    """
    train, valid, test = (
        tuple(map(_build, _requested(groups, seq_length, seed, data.data_cache_path)))
        for groups in requested_groups(data, seq_length, num_samples, stamp)
    )
    return Datasets(train[0] if train else None, valid, test)


class FoundSample(NamedTuple):
    """Where a sample of a group is: it is sample `number` of a data set."""

    dataset: GPTDataset
    number: int
    plan: EpochPlan


def find_sample(
    data: DataConfig, group: DocumentGroup, num_samples: int, seq_length: int, seed: int, i: int
) -> FoundSample:
    """Returns where sample i of a group is: in which data set, and under which number. Reads the run's index
    files, and builds missing files of this data set. group, num_samples: a pair of `requested_groups`."""
    (requested,) = _requested([(group, num_samples)], seq_length, seed, data.data_cache_path)
    component, number = 0, i
    if group.blend is not None:
        if requested.table_paths:
            _prepare_table(requested, IndexStamp(data))
        component, number = group.blend.load(requested.folder, num_samples).find(i)
    request = requested.indices[component]
    prepare_sample_index(request)
    dataset = GPTDataset.from_files(request)
    return FoundSample(dataset, number, request.plan())


def one_epoch(dataset: IndexedDataset, name: str, documents: range, seq_length: int, seed: int) -> GPTDataset:
    """Returns all samples of one epoch over `documents`, in the order of a run of at most one epoch.

    Writes no index files. Raises UserError if the documents have fewer tokens than one sample has.
    """
    plan = IndexRequest(dataset, name, documents, 1, seq_length, seed).plan()
    index = build_sample_order(dataset.sizes, documents, seq_length, seed, plan)
    return GPTDataset(name, dataset, lambda: index, plan.total_samples, seq_length)


def data_fingerprint(
    data: DataConfig, seq_length: int, seed: int, num_samples: int, stamp: IndexStamp | None = None
) -> dict[str, Any]:
    """Returns everything that determines the order of the first `num_samples` training samples, as JSON
    types.

    Runs with equal fingerprints read equal samples in equal order. The fingerprint contains the number of
    epochs, not `num_samples`: a longer run with the same number of epochs has the same order.
    """
    (group,) = document_groups(data, "train", stamp or IndexStamp(data), seq_length, num_samples)
    datasets = [component.dataset for component in group.components]
    requests = (
        [] if group.is_empty else index_requests(group, num_samples, seq_length, seed, data.data_cache_path)
    )
    plans = [request.plan() for request in requests]
    order = {} if data.data_order == NATIVE_ORDER else {ORDER_KEY: data.data_order}
    masked = [dataset.loss_mask is not None for dataset in datasets]
    capped = {} if group.renormalized_over is None else {_RENORMALIZED_KEY: group.renormalized_over}
    return {
        **order,
        **capped,
        **({"loss_mask": masked} if any(masked) else {}),
        "paths": [dataset.prefix for dataset in datasets],
        "weights": [1] if group.blend is None else list(group.blend.weights),
        "split": group.fractions,
        "seed": seed,
        "seq_length": seq_length,
        "documents": [len(dataset) for dataset in datasets],
        "tokens": [dataset.num_tokens for dataset in datasets],
        "epochs": [plan.num_epochs for plan in plans] or None,
        "last_epoch_apart": [plan.separate_last_epoch for plan in plans] or None,
    }


# Key of --data-order in a fingerprint. Fingerprints of runs with the native order lack it.
ORDER_KEY, NATIVE_ORDER = "data_order", "native"
# Key of `DocumentGroup.renormalized_over` in a fingerprint. Runs of different lengths have different weights.
_RENORMALIZED_KEY = "renormalized_over"
# Key of `tokenizer.vocabulary_record.vocabulary_digest` in a fingerprint, if the run has a tokenizer. The
# digest identifies the meaning of the token ids. It does not affect the order of samples.
VOCABULARY_KEY = "vocabulary_sha256"


def fingerprint_differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Returns a phrase for each entry in which two fingerprints differ; [] if the orders are equal.

    Of paths only the file names are compared, because data may have moved to a different folder.
    """

    def recorded(fingerprint: dict[str, Any], name: str) -> Any:
        return fingerprint.get(name, NATIVE_ORDER if name == ORDER_KEY else None)

    def compared(fingerprint: dict[str, Any], name: str) -> Any:
        value = recorded(fingerprint, name)
        if name == "paths" and value:
            return [os.path.basename(path) for path in value]
        # Checkpoints of versions without blends contain a number, not a list with one number.
        return [value] if name in ("epochs", "last_epoch_apart") and isinstance(value, int) else value

    return [
        f"{name}: {recorded(saved, name)} in the checkpoint, {recorded(current, name)} now"
        for name in sorted((saved.keys() | current.keys()) - {VOCABULARY_KEY})
        if compared(saved, name) != compared(current, name)
    ]


def same_data(saved: dict[str, Any], current: dict[str, Any]) -> bool:
    """Returns whether two fingerprints are equal except for entries that the length of a run determines, such
    as the number of epochs. (The order of the samples may still differ.)"""
    per_length = dict.fromkeys(("epochs", "last_epoch_apart", _RENORMALIZED_KEY))
    if saved.get(_RENORMALIZED_KEY) or current.get(_RENORMALIZED_KEY):
        per_length["weights"] = None
    return not fingerprint_differences({**saved, **per_length}, {**current, **per_length})


def requested_groups(
    data: DataConfig, seq_length: int, num_samples: tuple[int, int, int], stamp: IndexStamp | None = None
) -> RequestedGroups:
    """Returns for each split (train, valid, test) pairs (group, number of samples).

    Groups without documents and splits with 0 samples have no pairs. stamp: the stamp of the token files;
    None: it is read from its file.
    """
    stamp = stamp or IndexStamp(data)
    return [
        [
            (group, wanted)
            for group in document_groups(data, name, stamp, seq_length, wanted)
            if not group.is_empty
        ]
        if wanted > 0
        else []
        for name, wanted in zip(SPLIT_NAMES, num_samples, strict=True)
    ]


def index_requests(
    group: DocumentGroup, num_samples: int, seq_length: int, seed: int, cache_folder: str | None
) -> list[IndexRequest]:
    """Returns an index request for each component, for the number of samples that it has among the first
    `num_samples` of the group.

    cache_folder: see `IndexRequest`. Raises UserError for a number of samples that no file can hold.
    """
    if num_samples > _MOST_SAMPLES:
        raise UserError(
            f"the run reads {num_samples:,} samples of the {group.name} data, expected {_MOST_SAMPLES:,} at "
            "most: reduce --train-samples or --train-iters, --eval-iters, or --global-batch-size"
        )
    shares = [num_samples] if group.blend is None else group.blend.planned_samples(num_samples)
    return [
        # In a short run a component with a tiny weight may have 0 samples. Its dataset has at least one.
        IndexRequest(
            component.dataset,
            group.name,
            component.documents,
            max(share, 1),
            seq_length,
            seed,
            cache_folder,
            group.order,
        )
        for component, share in zip(group.components, shares, strict=True)
    ]


def _build(requested: _Requested) -> SampleDataset:
    group, num_samples, indices = requested
    parts = [GPTDataset.from_files(request) for request in indices]
    if group.blend is None:
        return parts[0]
    return BlendedDataset(group.name, parts, group.blend.load(requested.folder, num_samples), num_samples)
