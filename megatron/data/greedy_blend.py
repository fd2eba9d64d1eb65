"""Blends as in other Megatron programs: a table that is built greedily, in double precision.

Sample i of the blend comes from the component that lacks most samples: the one with the largest weight_j *
max(i, 1) - count_j, where count_j is its number of samples among the first i. At equal values the component
with the lower index is chosen. The choices depend on rounding in double precision, so a table is always built
from its first sample. The table depends only on the weights: the table of a longer run begins with the table
of a shorter run.

The order of each component is planned over 0.5 % more samples than its share, so that the greedy choice finds
enough.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.data.helpers import address, compiled, count
from megatron.data.index_files import IndexFileError, read_array, write_array
from megatron.errors import UserError, stop_at_access_error

logger = logging.getLogger(__name__)

# Tables have 2^n samples, at least this many, so that runs of many lengths use tables of the same name and
# content.
_SHORTEST_TABLE = 1 << 12
# Number of samples from which compiling the loop pays off. numpy takes microseconds per sample.
_COMPILED_FROM = 1 << 15
# Number of samples that are checked at a time, to limit the memory.
_BLOCK = 1 << 22


class BlendTable(NamedTuple):
    """For each sample of the blend, its component (Megatron's dataset_index) and its index in the component
    (dataset_sample_index)."""

    components: npt.NDArray[Any]
    numbers: npt.NDArray[Any]

    def find(self, sample: int) -> tuple[int, int]:
        """Returns (component, index of the sample in that component) for a sample of the blend."""
        return int(self.components[sample]), int(self.numbers[sample])


TablePaths = tuple[str, str]


@dataclass(frozen=True)
class GreedyBlend:
    """A blend in the order of another Megatron program. weights: normalized like that program's weights,
    before it plans the samples of each component."""

    blends_one: ClassVar[bool] = True
    weights: tuple[float, ...]

    def samples_of_components(self, num_samples: int) -> list[int]:
        """Returns each component's number of samples among the first `num_samples`, exact to about one
        sample."""
        return [round(weight * num_samples) for weight in self.weights]

    def table_paths(self, folder: str, num_samples: int) -> TablePaths:
        """Returns the files of the table that has at least `num_samples` samples."""
        digest = hashlib.sha256(self._table_weights().tobytes()).hexdigest()[:12]
        stem = os.path.join(folder, f"blend-{digest}_{_table_length(num_samples)}")
        return f"{stem}_dataset_index.npy", f"{stem}_dataset_sample_index.npy"

    @stop_at_access_error()
    def prepare(
        self, folder: str, num_samples: int, available: Sequence[int], is_verified: bool = False
    ) -> bool:
        """Builds the table unless its files are valid. Returns whether it has written them. available: the
        number of samples that each component has. is_verified: whether the files were verified before.

        Raises UserError if the blend needs more samples than are available.
        """
        paths, length = self.table_paths(folder, num_samples), _table_length(num_samples)
        table = self._valid_table(paths, length, is_verified)
        is_new = table is None
        if table is None:
            table = self.table(length)
            for path, array in zip(paths, table, strict=True):
                write_array(path, array)
        used = _counts(table.components[:num_samples], len(self.weights))
        for component, (needs, has) in enumerate(zip(used.tolist(), available, strict=True)):
            if needs > has:
                raise UserError(
                    f"the blend reads {needs:,} samples of its component number {component + 1}, whose order "
                    f"is planned over {has:,}, and Megatron would stop too: change the weights, or choose "
                    "--data-order native"
                )
        return is_new

    def load(self, folder: str, num_samples: int) -> BlendTable:
        """Returns the memory-mapped table. Raises UserError, naming the file, if one is missing or
        damaged."""
        try:
            return _read_table(self.table_paths(folder, num_samples), _table_length(num_samples))
        except IndexFileError as problem:
            raise UserError(
                f"{problem}: one process per node builds the table of the blend before training, and every "
                "process needs access to its folder"
            ) from problem

    def table(self, length: int) -> BlendTable:
        """Returns the first `length` samples of the table."""
        weights = self._table_weights()
        table = BlendTable(np.empty(length, np.int16), np.empty(length, np.int64))
        if length >= _COMPILED_FROM and (helpers := compiled()) is not None:
            counts = np.zeros(len(weights), np.int64)
            helpers.build_blend.restype = None
            helpers.build_blend(
                count(len(weights)), address(weights), address(counts), count(length), *map(address, table)
            )
            return table
        # Whole numbers are exact in double precision.
        counts_so_far, lacking = np.zeros(len(weights)), np.empty(len(weights))
        for sample in range(length):
            np.multiply(weights, max(sample, 1), out=lacking)
            chosen = np.subtract(lacking, counts_so_far, out=lacking).argmax()
            table.components[sample], table.numbers[sample] = chosen, counts_so_far[chosen]
            counts_so_far[chosen] += 1
        return table

    def _table_weights(self) -> npt.NDArray[np.float64]:
        """Returns the weights with which the table is built: the weights of the blend, normalized once
        more."""
        weights = np.array(self.weights)
        return weights / np.sum(weights)

    def _valid_table(self, paths: TablePaths, length: int, is_verified: bool) -> BlendTable | None:
        """Returns the table in the files; None if a file is missing or damaged."""
        if not os.path.lexists(paths[0]):
            return None
        try:
            table = _read_table(paths, length)
            if not is_verified:
                _check_table(table, len(self.weights), paths)
        except IndexFileError as problem:
            logger.info("the table of a blend: %s", problem)
            return None
        return table


class DeepSpeedBlend(GreedyBlend):
    """The blend of BigScience's and Microsoft's Megatron-DeepSpeed."""

    @classmethod
    def from_fractions(cls, weights: Sequence[Fraction]) -> DeepSpeedBlend:
        total = 0.0
        for weight in weights:
            total += float(weight)
        return cls(tuple(float(weight) / total for weight in weights))

    def planned_samples(self, num_samples: int) -> list[int]:
        return [math.ceil(num_samples * weight * 1.005) for weight in self.weights]


class CoreBlend(GreedyBlend):
    """The blend of Megatron-Core."""

    @classmethod
    def from_fractions(cls, weights: Sequence[Fraction]) -> CoreBlend:
        given = np.array([float(weight) for weight in weights])
        return cls(tuple((given / np.sum(given)).tolist()))

    @classmethod
    def from_sizes(cls, sizes: Sequence[int]) -> CoreEpochBlend:
        return CoreEpochBlend(tuple(float(size) for size in sizes))

    def planned_samples(self, num_samples: int) -> list[int]:
        return [math.ceil(math.ceil(num_samples * weight) * (1 + 0.005)) for weight in self.weights]


class CoreEpochBlend(GreedyBlend):
    """The blend of Megatron-Core for data sets without weights. It ends after one epoch of each data set.
    weights: the number of samples of each data set in one epoch."""

    def samples_of_components(self, num_samples: int) -> list[int]:
        return [round(weight * num_samples / sum(self.weights)) for weight in self.weights]

    def planned_samples(self, num_samples: int) -> list[int]:
        if num_samples > sum(self.weights):
            raise UserError(
                f"the run reads {num_samples:,} samples of data sets without weights, which have "
                f"{int(sum(self.weights)):,} samples in one epoch, and Megatron-Core ends there: set weights "
                "or --data-order native, or reduce --train-iters, --train-samples or --eval-iters"
            )
        return [int(weight) for weight in self.weights]


def _table_length(num_samples: int) -> int:
    return max(_SHORTEST_TABLE, 1 << (num_samples - 1).bit_length())


def _read_table(paths: TablePaths, length: int) -> BlendTable:
    return BlendTable(*(read_array(path, (length,)) for path in paths))


def _check_table(table: BlendTable, num_components: int, paths: TablePaths) -> None:
    """Raises IndexFileError if the files are damaged."""
    components, numbers = table
    if len(components) and not 0 <= components.min() <= components.max() < num_components:
        raise IndexFileError(f"{paths[0]} names components outside {range(num_components)}")
    counts = np.zeros(num_components, np.int64)
    for first in range(0, len(components), _BLOCK):
        block = components[first : first + _BLOCK]
        by_component = np.argsort(block, kind="stable")
        used = _counts(block, num_components)
        before = np.repeat(counts - (np.cumsum(used) - used), used)
        if np.any(numbers[first : first + _BLOCK][by_component] != before + np.arange(len(block))):
            raise IndexFileError(f"{paths[1]} does not count the samples of each component of {paths[0]}")
        counts += used


def _counts(components: npt.NDArray[Any], num_components: int) -> npt.NDArray[np.int64]:
    """Returns each component's number of samples in `components`."""
    blocks = range(0, len(components), _BLOCK)
    counts = (np.bincount(components[i : i + _BLOCK], minlength=num_components) for i in blocks)
    return sum(counts, np.zeros(num_components, np.int64))
