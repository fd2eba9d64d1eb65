"""Samples of consecutive tokens, for each split of the data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError, DataConfig
from megatron.config.parsing.split import SPLIT_NAMES
from megatron.data.blended_dataset import BlendedDataset, BlendOrder
from megatron.data.index_cache import IndexRequest, load_sample_index, prepare_sample_index
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indices import SampleIndex
from megatron.data.splits import DocumentGroup, document_groups, open_once


class GPTDataset:
    """Sample i of one split, in training order: int64 [seq_length + 1]."""

    def __init__(self, name: str, dataset: IndexedDataset, index: SampleIndex, seq_length: int) -> None:
        self.name = name
        self.seq_length = seq_length
        self._dataset = dataset
        self._index = index

    def __len__(self) -> int:
        return len(self._index.shuffle)

    def __getitem__(self, i: int) -> npt.NDArray[np.int64]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of the {self.name} split, which has {len(self)}")
        row = int(self._index.shuffle[i])
        (first, offset), (last, end) = self._index.samples[row : row + 2].tolist()
        # Both ends are inclusive: `end` is the place of the sample's last token in its document.
        parts = []
        for place in range(first, last + 1):
            start = offset if place == first else 0
            length = end + 1 - start if place == last else None
            parts.append(self._dataset.get(int(self._index.documents[place]), start, length))
        sample = np.concatenate(parts, dtype=np.int64)
        if len(sample) != self.seq_length + 1:
            raise ConfigError(
                f"{self._dataset.source}: sample {i} of the {self.name} split has {len(sample)} "
                f"tokens instead of {self.seq_length + 1}, its index files are of other data: delete them"
            )
        return sample


# The split's samples by number; their length is at least that asked for.
Samples = GPTDataset | BlendedDataset


class Datasets(NamedTuple):
    """The datasets of a run. train: None where nothing is read. valid, test: one per group, none if nothing
    is read."""

    train: Samples | None
    valid: tuple[Samples, ...]
    test: tuple[Samples, ...]


def prepare_index_files(
    data: DataConfig, seq_length: int, seed: int, num_samples: tuple[int, int, int]
) -> None:
    """Make the index files for `build_gpt_datasets` with the same arguments, unless good ones are there.

    To be run by one process per file system, with a barrier after it. It is safe to run it again, or on every
    node in turn: it makes what is missing.
    """
    for request in _all_requests(data, seq_length, seed, num_samples):
        prepare_sample_index(request)


def missing_index_files(
    data: DataConfig, seq_length: int, seed: int, num_samples: tuple[int, int, int]
) -> list[str]:
    """Those that `prepare_index_files` with the same arguments would have to make."""
    requests = _all_requests(data, seq_length, seed, num_samples)
    paths = dict.fromkeys(path for request in requests for path in request.paths())
    return [path for path in paths if not os.path.exists(path)]


def build_gpt_datasets(
    data: DataConfig, seq_length: int, seed: int, num_samples: tuple[int, int, int]
) -> Datasets:
    """The train, valid and test datasets, each of at least its `num_samples`, from prepared index files.

    There is none for a split of which no sample is asked for, that has no document, or whose weight is 0.
    Raises ConfigError for damaged data, missing index files, or a split with fewer tokens than one sample.
    """
    train, valid, test = (
        tuple(_build(group, wanted, seq_length, seed) for group, wanted in groups)
        for groups in _requested_groups(data, num_samples)
    )
    return Datasets(train[0] if train else None, valid, test)


def data_fingerprint(data: DataConfig, seq_length: int, seed: int, num_samples: int) -> dict[str, Any]:
    """What determines the order of `num_samples` training samples, in plain types, for a checkpoint.

    Two runs with equal fingerprints read the same samples in the same order. The number of samples itself is
    not in it, but the epochs that it takes: a longer run that fits the same epochs has the same order.
    """
    (group,) = document_groups(data, "train", open_once())
    datasets = [component.dataset for component in group.components]
    plans = [
        request.plan()
        for request in ([] if group.is_empty else _requests(group, num_samples, seq_length, seed))
    ]
    return {
        "paths": [dataset.prefix for dataset in datasets],
        "weights": list(group.weights),
        "split": group.fractions,
        "seed": seed,
        "seq_length": seq_length,
        "documents": [len(dataset) for dataset in datasets],
        "tokens": [dataset.num_tokens for dataset in datasets],
        "epochs": [plan.num_epochs for plan in plans] or None,
        "last_epoch_apart": [plan.separate_last_epoch for plan in plans] or None,
    }


# In a fingerprint, where the run has a tokenizer: `tokenizer.vocabulary_record.vocabulary_digest`. It says
# what the ids mean, not which samples are read.
VOCABULARY_KEY = "vocabulary_sha256"


def fingerprint_differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """One phrase per entry in which two fingerprints differ; empty if the sample order is the same.

    Data may move to another folder: of the paths only the last parts count.
    """

    def compared(fingerprint: dict[str, Any], name: str) -> Any:
        value = fingerprint.get(name)
        if name == "paths" and value:
            return [os.path.basename(path) for path in value]
        # Checkpoints that were saved before there were blends tell these without a list.
        return [value] if name in ("epochs", "last_epoch_apart") and isinstance(value, int) else value

    return [
        f"{name}: {saved.get(name)} in the checkpoint, {current.get(name)} now"
        for name in sorted((saved.keys() | current.keys()) - {VOCABULARY_KEY})
        if compared(saved, name) != compared(current, name)
    ]


def _requested_groups(
    data: DataConfig, num_samples: tuple[int, int, int]
) -> list[list[tuple[DocumentGroup, int]]]:
    """Of train, valid and test: the groups that have documents and of which samples are wanted, and how
    many."""
    open_dataset = open_once()
    return [
        [(group, wanted) for group in document_groups(data, name, open_dataset) if not group.is_empty]
        if wanted > 0
        else []
        for name, wanted in zip(SPLIT_NAMES, num_samples, strict=True)
    ]


def _all_requests(
    data: DataConfig, seq_length: int, seed: int, num_samples: tuple[int, int, int]
) -> Iterator[IndexRequest]:
    for groups in _requested_groups(data, num_samples):
        for group, wanted in groups:
            yield from _requests(group, wanted, seq_length, seed)


def _requests(group: DocumentGroup, num_samples: int, seq_length: int, seed: int) -> list[IndexRequest]:
    """One for each component of the group, of the samples that it gives to the first `num_samples`."""
    shares = BlendOrder(group.weights).samples_of_components(num_samples)
    return [
        # A component of a tiny weight may have its turn after the end: it is opened all the same.
        IndexRequest(
            component.dataset,
            group.name,
            component.documents,
            max(share, 1),
            seq_length,
            seed,
            component.index_name,
        )
        for component, share in zip(group.components, shares, strict=True)
    ]


def _build(group: DocumentGroup, num_samples: int, seq_length: int, seed: int) -> Samples:
    parts = [
        GPTDataset(group.name, request.dataset, load_sample_index(request), seq_length)
        for request in _requests(group, num_samples, seq_length, seed)
    ]
    return parts[0] if len(parts) == 1 else BlendedDataset(group.name, parts, group.weights, num_samples)
