"""The folder in which Megatron-Core keeps the indices of a run.

Megatron-Core names the files of an index by the MD5 digest of a description, which contains the tokenizer and
the path of the data as they were. The description is beside the files, so the index of a request is found by
reading the descriptions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from glob import escape, glob
from pathlib import Path
from typing import Any

from megatron.data.indices import IndexPaths, IndexRequest
from megatron.files import HostileFileError, read_json

_DESCRIPTION = "-description.txt"


class CoreCache:
    """The indices in the folder of --data-cache-path, or in Megatron-Core's folder beside the data."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._descriptions: dict[str, dict[str, list[tuple[str, dict[str, Any]]]]] = {}

    def index_files(self, request: IndexRequest) -> Iterator[IndexPaths]:
        """Yields the files of indices with the data set's name, and with the seed, sequence length and number
        of samples of the request (None: one epoch). Their contents may belong to other documents."""
        prefix = request.dataset.prefix
        folder = os.path.join(prefix, "cache", "GPTDataset_indices") if self._folder is None else self._folder
        wanted = {"class": "GPTDataset", "random_seed": request.seed, "sequence_length": request.seq_length}
        for stem, description in self._described(folder, prefix):
            samples = description.get("num_samples", 0)
            if samples in (None, request.num_samples) and wanted.items() <= description.items():
                yield (f"{stem}-document_index.npy", f"{stem}-sample_index.npy", f"{stem}-shuffle_index.npy")

    def blend_files(self, weights: list[float]) -> Iterator[tuple[str, str]]:
        """Yields the tables of blends with these weights."""
        for stem, description in [] if self._folder is None else self._described(self._folder, None):
            if description.get("class") == "BlendedDataset" and description.get("weights") == weights:
                yield f"{stem}-dataset_index.npy", f"{stem}-dataset_sample_index.npy"

    def _described(self, folder: str, dataset_path: Any) -> list[tuple[str, dict[str, Any]]]:
        """Returns stems and descriptions of the files of a data set; of blends if dataset_path is None."""
        if folder not in self._descriptions:
            by_name: dict[str, list[tuple[str, dict[str, Any]]]] = {}
            for stem, description in _read_descriptions(folder):
                name = _name_of(description.get("dataset_path"))
                by_name.setdefault(name, []).append((stem, description))
            self._descriptions[folder] = by_name
        return self._descriptions[folder].get(_name_of(dataset_path), [])


def _name_of(dataset_path: Any) -> str:
    return os.path.basename(str(dataset_path))


def _read_descriptions(folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the stems of the files of an index, and its description."""
    for path in sorted(glob(os.path.join(escape(folder), f"*{_DESCRIPTION}"))):
        try:
            description = read_json(Path(path))
        except (OSError, ValueError, HostileFileError):
            continue  # another program's file, or one that is being written
        if isinstance(description, dict):
            yield path.removesuffix(_DESCRIPTION), description
