"""Small data sets for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.config import DataConfig
from megatron.data.dataset_builder import IndexedDatasetBuilder
from megatron.data.gpt_dataset import Datasets, build_gpt_datasets, list_index_files, prepare_index_files
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indices import IndexRequest


def write_documents(prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "uint16") -> str:
    """Writes token files with the builder. Returns their prefix."""
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_documents(np.array(document, dtype=np.int64), [len(document)])
        builder.finalize()
    return str(prefix)


def numbered_documents(sizes: Sequence[int]) -> list[list[int]]:
    """Returns documents of these sizes. Each token is its position in the concatenated documents."""
    ends = np.cumsum(sizes)
    return [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def data_config(*prefixes: str, split: str = "1") -> DataConfig:
    """Returns a data configuration. The default split puts all documents into train."""
    return DataConfig(data_path=prefixes, split=split)


def build(data: DataConfig, seq_length: int, seed: int, num_samples: tuple[int, int, int]) -> Datasets:
    """Builds the index files. Returns the data sets of a run."""
    prepare_index_files(data, seq_length, seed, num_samples)
    return build_gpt_datasets(data, seq_length, seed, num_samples)


def missing_files(
    data: DataConfig, seq_length: int, seed: int, num_samples: tuple[int, int, int]
) -> list[str]:
    """Returns the index files of a run that do not exist."""
    files = list_index_files(data, seq_length, seed, num_samples)
    return [path for index in files for path in index.paths if not os.path.exists(path)]


def index_request(folder: Path) -> IndexRequest:
    """Returns a request for 25 samples of the training split of 8 documents, which take 3 epochs."""
    documents = numbered_documents([5, 0, 7, 3, 9, 11, 2, 6])
    dataset = IndexedDataset(write_documents(folder / "data", documents))
    return IndexRequest(dataset, "train", range(0, 8), num_samples=25, seq_length=4, seed=1234)
