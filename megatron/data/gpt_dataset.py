"""Map-style datasets of samples of consecutive tokens, one per split."""

from __future__ import annotations

import os
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config import DataConfig
from megatron.config.data import SPLIT_NAMES
from megatron.data.blended_dataset import BlendedDataset, SampleDataset
from megatron.data.core_cache import CoreCache
from megatron.data.index_files import no_other_files
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indices import (
    EpochPlan,
    IndexRequest,
    SampleIndex,
    build_sample_order,
    load_sample_index,
    prepare_sample_index,
)
from megatron.data.splits import DocumentGroup, dataset_opener, document_groups
from megatron.errors import UserError

# Per split (train, valid, test): pairs of a group and its number of samples.
RequestedGroups = list[list[tuple[DocumentGroup, int]]]

# Numbers of samples up to this one are exact in float64, and their sums fit 64 bits.
_MOST_SAMPLES = 2**53


class GPTDataset:
    """The samples of one split in training order, int64 [seq_length + 1] each."""

    def __init__(self, name: str, dataset: IndexedDataset, index: SampleIndex, seq_length: int) -> None:
        self.name = name
        self.seq_length = seq_length
        self.dataset = dataset
        self._index = index

    def __len__(self) -> int:
        return len(self._index.shuffle)

    def __getitem__(self, i: int) -> npt.NDArray[np.int64]:
        parts = [self.dataset.get(document, start, end - start) for document, start, end in self.parts(i)]
        sample = np.concatenate(parts, dtype=np.int64)
        if len(sample) != self.seq_length + 1:
            raise UserError(
                f"{self.dataset.source}: sample {i} of the {self.name} split has {len(sample)} "
                f"tokens, expected {self.seq_length + 1}: delete the split's index files, "
                "which were built from different data"
            )
        return sample

    def parts(self, i: int) -> list[tuple[int, int, int]]:
        """Returns (document, first token, end) of each part of sample i, in the order of its tokens."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of the {self.name} split, which has {len(self)}")
        row = int(self._index.shuffle[i])
        (first, offset), (last, final) = self._index.samples[row : row + 2].tolist()
        parts = []
        for position in range(first, last + 1):
            document = int(self._index.documents[position])
            # `final` is the offset of the sample's last token in the last document. It is inclusive.
            end = final + 1 if position == last else int(self.dataset.sizes[document])
            parts.append((document, offset if position == first else 0, end))
        return parts


class Datasets(NamedTuple):
    """The datasets of a run. A split that is not read has no dataset.

    valid and test have one dataset, or one per weighted group.
    """

    train: SampleDataset | None
    valid: tuple[SampleDataset, ...]
    test: tuple[SampleDataset, ...]


def prepare_index_files(
    data: DataConfig, seq_length: int, seed: int, num_samples: tuple[int, int, int]
) -> None:
    """Builds the index files that `build_gpt_datasets` reads if it has equal arguments.

    Valid index files are kept. One process per file system must call this, and then all processes a barrier.
    Concurrent and repeated calls are safe.
    """
    cache_folder = data.data_cache_path
    core_cache = CoreCache(cache_folder)
    for group, wanted in chain(*requested_groups(data, seq_length, num_samples)):
        is_core = group.order.is_core
        requests = index_requests(group, wanted, seq_length, seed, cache_folder)
        for request in requests:
            prepare_sample_index(request, core_cache.index_files if is_core else no_other_files)
        _prepare_table(group, wanted, requests, cache_folder, core_cache)


def _prepare_table(
    group: DocumentGroup,
    num_samples: int,
    requests: list[IndexRequest],
    cache_folder: str | None,
    core_cache: CoreCache,
) -> None:
    if group.blend is not None:
        available = [request.plan().total_samples for request in requests]
        others = core_cache.blend_files if group.order.is_core else no_other_files
        group.blend.prepare(_table_folder(group, cache_folder), num_samples, available, others)


def missing_index_files(
    data: DataConfig, seq_length: int, seed: int, num_samples: tuple[int, int, int]
) -> list[str]:
    """Returns the paths of the index files that `prepare_index_files` would build because they do not
    exist."""
    cache_folder = data.data_cache_path
    paths: list[str] = []
    for group, wanted in chain(*requested_groups(data, seq_length, num_samples)):
        for request in index_requests(group, wanted, seq_length, seed, cache_folder):
            paths += request.paths()
        if group.blend is not None:
            paths += group.blend.table_paths(_table_folder(group, cache_folder), wanted)
    return [path for path in dict.fromkeys(paths) if not os.path.exists(path)]


def _table_folder(group: DocumentGroup, cache_folder: str | None) -> str:
    """Returns the folder of the table of a blend."""
    return os.path.dirname(group.components[0].dataset.prefix) if cache_folder is None else cache_folder


def build_gpt_datasets(
    data: DataConfig, seq_length: int, seed: int, num_samples: tuple[int, int, int]
) -> Datasets:
    """Builds the train, valid and test datasets from the index files of `prepare_index_files`.

    num_samples: minimum length of the train, valid and test datasets. A split with 0 samples, without
    documents or with weight 0 has no dataset. Raises UserError for damaged data, missing index files and a
    split with fewer tokens than one sample.
    """
    train, valid, test = (
        tuple(_build(group, wanted, seq_length, seed, data.data_cache_path) for group, wanted in groups)
        for groups in requested_groups(data, seq_length, num_samples)
    )
    return Datasets(train[0] if train else None, valid, test)


class FoundSample(NamedTuple):
    """A sample of a group: sample `number` of a data set."""

    dataset: GPTDataset
    number: int
    plan: EpochPlan


def find_sample(
    data: DataConfig, group: DocumentGroup, num_samples: int, seq_length: int, seed: int, i: int
) -> FoundSample:
    """Returns the data set and the number of sample i of a group, from the index files of the run. Builds
    missing files of only this data set. group, num_samples: of `requested_groups`."""
    cache_folder, core_cache = data.data_cache_path, CoreCache(data.data_cache_path)
    requests = index_requests(group, num_samples, seq_length, seed, cache_folder)
    component, number = 0, i
    if group.blend is not None:
        _prepare_table(group, num_samples, requests, cache_folder, core_cache)
        component, number = group.blend.load(_table_folder(group, cache_folder), num_samples).find(i)
    request = requests[component]
    prepare_sample_index(request, core_cache.index_files if group.order.is_core else no_other_files)
    dataset = GPTDataset(group.name, request.dataset, load_sample_index(request), seq_length)
    return FoundSample(dataset, number, request.plan())


def one_epoch(dataset: IndexedDataset, name: str, documents: range, seq_length: int, seed: int) -> GPTDataset:
    """Returns all samples of one epoch over `documents`, in the order of a run with at most one epoch.

    Writes no index files. Raises UserError if the documents have fewer tokens than one sample.
    """
    plan = IndexRequest(dataset, name, documents, 1, seq_length, seed).plan()
    index = build_sample_order(dataset.sizes, documents, seq_length, seed, plan)
    return GPTDataset(name, dataset, index, seq_length)


def data_fingerprint(data: DataConfig, seq_length: int, seed: int, num_samples: int) -> dict[str, Any]:
    """Returns all that determines the order of the first `num_samples` training samples, as JSON types.

    Runs with equal fingerprints read equal samples in equal order. The fingerprint contains the number of
    epochs instead of `num_samples`: a longer run with an equal number of epochs has an equal order.
    """
    (group,) = document_groups(data, "train", dataset_opener(), seq_length, num_samples)
    datasets = [component.dataset for component in group.components]
    requests = (
        [] if group.is_empty else index_requests(group, num_samples, seq_length, seed, data.data_cache_path)
    )
    plans = [request.plan() for request in requests]
    order = {} if data.data_order == NATIVE_ORDER else {ORDER_KEY: data.data_order}
    capped = {} if group.renormalized_over is None else {_RENORMALIZED_KEY: group.renormalized_over}
    return {
        **order,
        **capped,
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


# Key of --data-order in a fingerprint. Checkpoints of runs with the native order have none.
ORDER_KEY, NATIVE_ORDER = "data_order", "native"
# Key of `DocumentGroup.renormalized_over` in a fingerprint. A run of another length has other weights.
_RENORMALIZED_KEY = "renormalized_over"
# Key of `tokenizer.vocabulary_record.vocabulary_digest` in a fingerprint, if the run has a tokenizer. The
# digest identifies the meaning of the token ids; the order of samples does not depend on it.
VOCABULARY_KEY = "vocabulary_sha256"


def fingerprint_differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Returns a phrase for each entry in which two fingerprints differ; [] if the orders are equal.

    Only the file names of the paths are compared, since data may have moved to a different folder.
    """

    def recorded(fingerprint: dict[str, Any], name: str) -> Any:
        return fingerprint.get(name, NATIVE_ORDER if name == ORDER_KEY else None)

    def compared(fingerprint: dict[str, Any], name: str) -> Any:
        value = recorded(fingerprint, name)
        if name == "paths" and value:
            return [os.path.basename(path) for path in value]
        # Checkpoints from before blends were supported hold a number here, not a list of one number.
        return [value] if name in ("epochs", "last_epoch_apart") and isinstance(value, int) else value

    return [
        f"{name}: {recorded(saved, name)} in the checkpoint, {recorded(current, name)} now"
        for name in sorted((saved.keys() | current.keys()) - {VOCABULARY_KEY})
        if compared(saved, name) != compared(current, name)
    ]


def same_data(saved: dict[str, Any], current: dict[str, Any]) -> bool:
    """Returns whether two fingerprints differ at most in what the length of a run determines, such as the
    number of epochs. (It also changes the order of the samples.)"""
    per_length = dict.fromkeys(("epochs", "last_epoch_apart", _RENORMALIZED_KEY))
    if saved.get(_RENORMALIZED_KEY) or current.get(_RENORMALIZED_KEY):
        per_length["weights"] = None
    return not fingerprint_differences({**saved, **per_length}, {**current, **per_length})


def requested_groups(data: DataConfig, seq_length: int, num_samples: tuple[int, int, int]) -> RequestedGroups:
    """Returns, per split (train, valid, test), pairs of a group and its number of samples.

    Groups without documents and splits with 0 samples have no pairs.
    """
    open_dataset = dataset_opener()
    return [
        [
            (group, wanted)
            for group in document_groups(data, name, open_dataset, seq_length, wanted)
            if not group.is_empty
        ]
        if wanted > 0
        else []
        for name, wanted in zip(SPLIT_NAMES, num_samples, strict=True)
    ]


def index_requests(
    group: DocumentGroup, num_samples: int, seq_length: int, seed: int, cache_folder: str | None
) -> list[IndexRequest]:
    """Returns a request per component, for its number of samples among the first `num_samples` of the group.

    cache_folder: see `IndexRequest`. Raises UserError for a number of samples that no file can hold.
    """
    if num_samples > _MOST_SAMPLES:
        raise UserError(
            f"the run reads {num_samples:,} samples of the {group.name} data, expected {_MOST_SAMPLES:,} at "
            "most: reduce --train-samples or --train-iters, --eval-iters, or --global-batch-size"
        )
    shares = [num_samples] if group.blend is None else group.blend.planned_samples(num_samples)
    return [
        # A component with a tiny weight can have 0 samples in a short run. Its dataset has at least one.
        IndexRequest(
            component.dataset,
            group.name,
            component.documents,
            max(share, 1),
            seq_length,
            seed,
            component.index_name,
            cache_folder,
            group.order,
        )
        for component, share in zip(group.components, shares, strict=True)
    ]


def _build(
    group: DocumentGroup, num_samples: int, seq_length: int, seed: int, cache_folder: str | None
) -> SampleDataset:
    parts = [
        GPTDataset(group.name, request.dataset, load_sample_index(request), seq_length)
        for request in index_requests(group, num_samples, seq_length, seed, cache_folder)
    ]
    if group.blend is None:
        return parts[0]
    order = group.blend.load(_table_folder(group, cache_folder), num_samples)
    return BlendedDataset(group.name, parts, order, num_samples)
