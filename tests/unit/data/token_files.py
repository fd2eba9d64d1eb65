"""Small datasets for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.config import DataConfig
from megatron.data.indexed_dataset import IndexedDatasetBuilder


def write_documents(prefix: Path, documents: Sequence[Sequence[int]], dtype: str = "uint16") -> str:
    """Write token files through the builder; return their prefix."""
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_documents(np.array(document, dtype=np.int64), [len(document)])
        builder.finalize()
    return str(prefix)


def numbered_documents(sizes: Sequence[int]) -> list[list[int]]:
    """Documents of these sizes with consecutive tokens over all documents: a token is its position."""
    ends = np.cumsum(sizes)
    return [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def data_config(*prefixes: str, split: str = "1") -> DataConfig:
    """By default all documents are in the train split."""
    return DataConfig(data_path=prefixes, split=split)
