"""Samples of consecutive tokens, for each split of the data."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError, DataConfig
from megatron.data.index_cache import IndexRequest, load_sample_index, prepare_sample_index
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indices import SampleIndex
from megatron.data.splits import SPLIT_NAMES, parse_split, split_documents


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
                f"--data-path {self._dataset.prefix}: sample {i} of the {self.name} split has {len(sample)} "
                f"tokens instead of {self.seq_length + 1}, its index files are of other data: delete them"
            )
        return sample


def prepare_index_files(
    data: DataConfig, seq_length: int, seed: int, num_samples: tuple[int, int, int]
) -> None:
    """Make the index files for `build_gpt_datasets` with the same arguments, unless good ones are there.

    To be run by one process per file system, with a barrier after it. It is safe to run it again, or on every
    node in turn: it makes what is missing.
    """
    for request in _requests(data, seq_length, seed, num_samples):
        if request is not None:
            prepare_sample_index(request)


def missing_index_files(
    data: DataConfig, seq_length: int, seed: int, num_samples: tuple[int, int, int]
) -> list[str]:
    """Those that `prepare_index_files` with the same arguments would have to make."""
    requests = filter(None, _requests(data, seq_length, seed, num_samples))
    return [path for request in requests for path in request.paths() if not os.path.exists(path)]


def build_gpt_datasets(
    data: DataConfig, seq_length: int, seed: int, num_samples: tuple[int, int, int]
) -> tuple[GPTDataset | None, GPTDataset | None, GPTDataset | None]:
    """The train, valid and test datasets, each of at least its `num_samples`, from prepared index files.

    None for a split of which no sample is asked for, that has no document, or whose weight is 0. Raises
    ConfigError for damaged data, missing index files, or a split with fewer tokens than one sample.
    """
    train, valid, test = (
        None
        if request is None
        else GPTDataset(request.split_name, request.dataset, load_sample_index(request), seq_length)
        for request in _requests(data, seq_length, seed, num_samples)
    )
    return train, valid, test


def data_fingerprint(data: DataConfig, seq_length: int, seed: int, num_samples: int) -> dict[str, Any]:
    """What determines the order of `num_samples` training samples, in plain types, for a checkpoint.

    Two runs with equal fingerprints read the same samples in the same order. The number of samples itself is
    not in it, but the epochs that it takes: a longer run that fits the same epochs has the same order.
    """
    request = _requests(data, seq_length, seed, (num_samples, 0, 0))[0]
    plan = None if request is None else request.plan()
    dataset = IndexedDataset(_single_prefix(data)) if request is None else request.dataset
    return {
        "paths": [dataset.prefix],
        "weights": [1.0],
        "split": list(parse_split(data.split)),
        "seed": seed,
        "seq_length": seq_length,
        "documents": [len(dataset)],
        "tokens": [dataset.num_tokens],
        "epochs": None if plan is None else plan.num_epochs,
        "last_epoch_apart": None if plan is None else plan.separate_last_epoch,
    }


def fingerprint_differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """One phrase per entry in which two fingerprints differ; empty if the sample order is the same.

    Data may move to another folder: of the paths only the last parts count.
    """

    def compared(fingerprint: dict[str, Any], name: str) -> Any:
        value = fingerprint.get(name)
        return [os.path.basename(path) for path in value] if name == "paths" and value else value

    return [
        f"{name}: {saved.get(name)} in the checkpoint, {current.get(name)} now"
        for name in sorted(saved.keys() | current.keys())
        if compared(saved, name) != compared(current, name)
    ]


def _requests(
    data: DataConfig, seq_length: int, seed: int, num_samples: tuple[int, int, int]
) -> list[IndexRequest | None]:
    dataset = IndexedDataset(_single_prefix(data))
    return [
        IndexRequest(dataset, name, documents, wanted, seq_length, seed) if documents and wanted > 0 else None
        for name, documents, wanted in zip(
            SPLIT_NAMES, split_documents(data.split, len(dataset)), num_samples, strict=True
        )
    ]


def _single_prefix(data: DataConfig) -> str:
    if len(data.data_path) != 1:
        raise ConfigError(
            f"--data-path has {len(data.data_path)} values, expected one prefix of a .bin and an .idx file"
        )
    return data.data_path[0]
