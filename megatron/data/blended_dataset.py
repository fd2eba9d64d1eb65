"""Several datasets as one: which sample of which of them comes when.

Component j has the integer weight a_j, and A is the sum of all. Its sample k has the time
(2k + 1) A / (2 a_j), the middle of the stretch in which it is due if the blend reads one sample per unit of
time. The order of the blend is the order of these times, and at equal times that of the components:
Sainte-Laguë's method, by which parliaments share out seats. It is the same for every length and needs no
table: until the time T component j had (2 a_j T + A) // (2 A) samples, so a stretch of time can be sorted by
itself.

How even it is: no component is ever more than half a sample from its share of the time passed. Of the first n
samples, each of J components therefore has its share a_j n / A to within (1 + (J - 2) a_j / A) / 2 samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from megatron.data.gpt_dataset import GPTDataset

# Times of one chunk. Sorting it takes milliseconds, and holding it a megabyte.
CHUNK = 1 << 16
CHUNKS_KEPT = 4  # threads that read ahead may stand in neighbouring chunks
# Weights whose sum would be larger are rounded to parts of this: an error of a sample in 2**31, while the
# numerators below, up to CHUNK times the sum, stay whole numbers in float64.
LARGEST_SUM = 1 << 32


def integer_weights(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """The weights (above 0) as whole numbers in the same ratio, to 1 part in 2**32 where that takes more."""
    whole = lcm(*(weight.denominator for weight in weights))
    scaled = [int(weight * whole) for weight in weights]
    total = sum(scaled)
    if total // gcd(*scaled) > LARGEST_SUM:
        # Kept below the limit though every weight is at least 1.
        parts = LARGEST_SUM - len(scaled)
        scaled = [max(round(Fraction(parts * weight, total)), 1) for weight in scaled]
    divisor = gcd(*scaled)
    return tuple(weight // divisor for weight in scaled)


@dataclass(frozen=True)
class BlendOrder:
    """The order for these integer weights, each above 0."""

    weights: tuple[int, ...]

    def samples_until(self, time: int) -> list[int]:
        """How many samples of each component have a time of at most `time`."""
        total = sum(self.weights)
        return [(2 * weight * time + total) // (2 * total) for weight in self.weights]

    def samples_of_components(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` of the blend each component gives."""
        chunk, first = self._place(num_samples)
        components, _ = self.chunk(chunk)
        inside = np.bincount(components[: num_samples - first], minlength=len(self.weights))
        before = self.samples_until(chunk * CHUNK)
        return [start + int(count) for start, count in zip(before, inside, strict=True)]

    def find(self, sample: int) -> tuple[int, int]:
        """(component, number of the sample in it) of a sample of the blend."""
        chunk, first = self._place(sample)
        components, numbers = self.chunk(chunk)
        return int(components[sample - first]), int(numbers[sample - first])

    def _place(self, sample: int) -> tuple[int, int]:
        """The chunk that holds a sample, and the number of that chunk's first."""
        chunk = sample // CHUNK  # at most a few samples off: there is one per unit of time
        while _first_sample(self.weights, chunk) > sample:
            chunk -= 1
        while _first_sample(self.weights, chunk + 1) <= sample:
            chunk += 1
        return chunk, _first_sample(self.weights, chunk)

    def chunk(self, chunk: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Components and sample numbers of the times after chunk * CHUNK and up to (chunk + 1) * CHUNK."""
        return _sorted_chunk(self.weights, chunk)


@lru_cache(maxsize=4 * CHUNKS_KEPT)
def _first_sample(weights: tuple[int, ...], chunk: int) -> int:
    return sum(BlendOrder(weights).samples_until(chunk * CHUNK))


@lru_cache(maxsize=CHUNKS_KEPT)
def _sorted_chunk(
    weights: tuple[int, ...], chunk: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    order, total = BlendOrder(weights), sum(weights)
    start, end = chunk * CHUNK, (chunk + 1) * CHUNK
    times, components, numbers = [], [], []
    bounds = zip(weights, order.samples_until(start), order.samples_until(end), strict=True)
    for component, (weight, first, last) in enumerate(bounds):
        # Numerator and denominator are exact, so equal times are equal numbers.
        numerator = (2 * first + 1) * total - 2 * weight * start
        numerators = numerator + 2 * total * np.arange(last - first, dtype=np.int64)
        times.append(numerators / np.float64(2 * weight))
        components.append(np.full(last - first, component, dtype=np.int32))
        numbers.append(np.arange(first, last, dtype=np.int64))
    by_time = np.argsort(np.concatenate(times), kind="stable")
    return np.concatenate(components)[by_time], np.concatenate(numbers)[by_time]


class BlendedDataset:
    """Sample i of a blend of datasets, int64 [seq_length + 1]."""

    def __init__(
        self, name: str, components: Sequence[GPTDataset], weights: tuple[int, ...], num_samples: int
    ) -> None:
        """components: each of at least as many samples as `BlendOrder.samples_of_components` says."""
        self.name = name
        self._components = tuple(components)
        self._order = BlendOrder(weights)
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, i: int) -> npt.NDArray[np.int64]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of the {self.name} blend, which has {len(self)}")
        component, number = self._order.find(i)
        return self._components[component][number]
