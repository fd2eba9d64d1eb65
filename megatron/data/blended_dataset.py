"""The weighted blend of datasets: each sample of the blend is a sample of one of its components.

A component is a dataset in the blend. Component j has the integer weight a_j, and A is the sum of the
weights. Sample k of component j has the time (2k + 1) A / (2 a_j). The blend reads the samples of all
components in the order of these times; at equal times, the component with the lower index is first. This is
the Sainte-Laguë (Webster) method of apportionment (https://en.wikipedia.org/wiki/Sainte-Lagu%C3%AB_method).

The order does not depend on the number of samples of the blend. Component j has (2 a_j T + A) // (2 A)
samples with a time of at most T, so the order in an interval of time is computed without earlier samples.

Error bound: at time T the number of samples of component j differs from a_j T / A by at most 1/2. Among the
first n samples of a blend of J components, it differs from a_j n / A by at most (1 + (J - 2) a_j / A) / 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from megatron.data.sample import Sample, SampleDataset

# Length of a chunk in units of time; there is one sample per unit. Sorting a chunk takes milliseconds and 1
# MB.
CHUNK = 1 << 16
# Number of cached chunks. It is above 1 because prefetching threads may be in neighboring chunks.
CACHED_CHUNKS = 4
# The integer weights are rounded if their sum exceeds this. The error is then one sample in 2**31. The
# numerators in `_sorted_chunk` are at most CHUNK times the sum, which float64 represents exactly.
MAX_WEIGHT_SUM = 1 << 32


class Finder(Protocol):
    """Finds where the samples of a blend are."""

    def find(self, sample: int) -> tuple[int, int]:
        """Returns (component, index of the sample in that component) for a sample of the blend."""


class Blend(Protocol):
    """The rule of a blend. It maps each sample of the blend to a component and to a sample of
    this component."""

    blends_one: ClassVar[bool]
    """Whether a single prefix with a weight is treated as a blend."""

    @property
    def weights(self) -> tuple[int, ...] | tuple[float, ...]:
        """The weights that determine the order."""

    @classmethod
    def from_fractions(cls, weights: Sequence[Fraction]) -> Blend:
        """Returns the blend of positive weights."""

    @classmethod
    def from_sizes(cls, sizes: Sequence[int]) -> Blend:
        """Returns the blend of data sets that have no weights. sizes: number of samples of each in one
        epoch."""

    def planned_samples(self, num_samples: int) -> list[int]:
        """Returns for each component the number of samples over which its order is planned, if the blend has
        `num_samples` samples."""

    def samples_of_components(self, num_samples: int) -> list[int]:
        """Returns the number of samples of each component among the first `num_samples` of the blend."""

    def table_paths(self, folder: str, num_samples: int) -> tuple[str, ...]:
        """Returns the paths of the files that store the order; () if it is computed."""

    def prepare(self, folder: str, num_samples: int, available: Sequence[int], is_verified: bool) -> bool:
        """Builds the files of `table_paths` unless they are valid. Returns whether it has written them. One
        process per file system calls it. available, is_verified: see `greedy_blend.GreedyBlend.prepare`."""

    def load(self, folder: str, num_samples: int) -> Finder:
        """Returns the order, which it reads from the files of `table_paths`."""


def integer_weights(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Returns positive weights as coprime integers, rounded if their sum exceeds MAX_WEIGHT_SUM."""
    whole = lcm(*(weight.denominator for weight in weights))
    scaled = [int(weight * whole) for weight in weights]
    total = sum(scaled)
    if total // gcd(*scaled) > MAX_WEIGHT_SUM:
        # The subtraction keeps the sum below the limit although every weight is raised to at least 1.
        parts = MAX_WEIGHT_SUM - len(scaled)
        scaled = [max(round(Fraction(parts * weight, total)), 1) for weight in scaled]
    divisor = gcd(*scaled)
    return tuple(weight // divisor for weight in scaled)


@dataclass(frozen=True)
class BlendOrder:
    """The order of a blend with these positive integer weights, as the docstring of this module defines it.
    It is computed, not stored in a table."""

    blends_one: ClassVar[bool] = False
    weights: tuple[int, ...]

    @classmethod
    def from_fractions(cls, weights: Sequence[Fraction]) -> BlendOrder:
        return cls(integer_weights(weights))

    @classmethod
    def from_sizes(cls, sizes: Sequence[int]) -> BlendOrder:
        # The first sum(sizes) samples are exactly one epoch of each data set. All sizes are 0 if the split is
        # empty, or if `IndexRequest.plan` rejects its data sets.
        return cls.from_fractions([Fraction(max(size, 1)) for size in sizes])

    def planned_samples(self, num_samples: int) -> list[int]:
        return self.samples_of_components(num_samples)

    def table_paths(self, folder: str, num_samples: int) -> tuple[str, ...]:
        return ()

    def prepare(self, *arguments: object) -> bool:
        return False

    def load(self, folder: str, num_samples: int) -> BlendOrder:
        return self

    def samples_until(self, time: int) -> list[int]:
        """Returns the number of samples of each component whose time is at most `time`."""
        total = sum(self.weights)
        return [(2 * weight * time + total) // (2 * total) for weight in self.weights]

    def samples_of_components(self, num_samples: int) -> list[int]:
        """Returns the number of samples of each component among the first `num_samples` of the blend."""
        chunk, first = self._chunk_of(num_samples)
        components, _ = _sorted_chunk(self.weights, chunk)
        counts = np.bincount(components[: num_samples - first], minlength=len(self.weights))
        before = self.samples_until(chunk * CHUNK)
        return [start + int(count) for start, count in zip(before, counts, strict=True)]

    def find(self, sample: int) -> tuple[int, int]:
        """Returns (component, index of the sample in that component) for a sample of the blend."""
        chunk, first = self._chunk_of(sample)
        components, numbers = _sorted_chunk(self.weights, chunk)
        return int(components[sample - first]), int(numbers[sample - first])

    def _chunk_of(self, sample: int) -> tuple[int, int]:
        """Returns (chunk that contains the sample, first sample of that chunk)."""
        # A unit of time has about one sample, so this estimate is wrong by at most one chunk.
        chunk = sample // CHUNK
        while _first_sample(self.weights, chunk) > sample:
            chunk -= 1
        while _first_sample(self.weights, chunk + 1) <= sample:
            chunk += 1
        return chunk, _first_sample(self.weights, chunk)


@lru_cache(maxsize=4 * CACHED_CHUNKS)
def _first_sample(weights: tuple[int, ...], chunk: int) -> int:
    return sum(BlendOrder(weights).samples_until(chunk * CHUNK))


@lru_cache(maxsize=CACHED_CHUNKS)
def _sorted_chunk(
    weights: tuple[int, ...], chunk: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Returns the samples with times in (chunk * CHUNK, (chunk + 1) * CHUNK], as (components, indices in
    them)."""
    order, total = BlendOrder(weights), sum(weights)
    start, end = chunk * CHUNK, (chunk + 1) * CHUNK
    times, components, numbers = [], [], []
    bounds = zip(weights, order.samples_until(start), order.samples_until(end), strict=True)
    for component, (weight, first, last) in enumerate(bounds):
        # Numerator and denominator are exact in float64, so equal times give equal quotients.
        numerator = (2 * first + 1) * total - 2 * weight * start
        numerators = numerator + 2 * total * np.arange(last - first, dtype=np.int64)
        times.append(numerators / np.float64(2 * weight))
        components.append(np.full(last - first, component, dtype=np.int32))
        numbers.append(np.arange(first, last, dtype=np.int64))
    by_time = np.argsort(np.concatenate(times), kind="stable")
    return np.concatenate(components)[by_time], np.concatenate(numbers)[by_time]


class BlendedDataset:
    """The first `num_samples` samples of a blend of datasets. Each sample is int64 [seq_length + 1]."""

    def __init__(
        self, name: str, components: Sequence[SampleDataset], order: Finder, num_samples: int
    ) -> None:
        """components: datasets that have at least the samples which `order` finds."""
        self.name = name
        self._components = tuple(components)
        self.has_loss_mask = any(component.has_loss_mask for component in components)
        self._order = order
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, i: int) -> npt.NDArray[np.int64]:
        return self.sample(i).tokens

    def sample(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of the {self.name} blend, which has {len(self)}")
        component, number = self._order.find(i)
        return self._components[component].sample(number)
