"""A hash of 64-bit integers, for random numbers and digests. It imports only numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

_MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(x: torch.Tensor) -> torch.Tensor:
    """Returns the finalizer of SplitMix64 for each int64 of x: a bijection on 64 bits that mixes all bits
    well.

    SplitMix: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014. Its n-th
    output is the finalizer of seed + n * 0x9E3779B97F4A7C15. The constants are variant 13 of David Stafford's
    search (https://zimbry.blogspot.com/2011/09/better-bit-mixing-improving-on.html).
    """
    # Operations in place need fewer buffers, which then fit in a core's cache.
    x = _logical_shift(x, 30).bitwise_xor_(x).mul_(signed(_MULTIPLIERS[0]))
    x = _logical_shift(x, 27).bitwise_xor_(x).mul_(signed(_MULTIPLIERS[1]))
    return _logical_shift(x, 31).bitwise_xor_(x)


def mix64_in_place(x: npt.NDArray[np.uint64]) -> None:
    """Replaces each element with its `mix64`. On a CPU this is faster than torch's operations: numpy shifts
    unsigned integers, and multiplies with AVX-512."""
    shifted = np.empty_like(x)
    for bits, multiplier in zip((30, 27, 31), (*_MULTIPLIERS, 1), strict=True):
        np.right_shift(x, np.uint64(bits), out=shifted)
        np.bitwise_xor(x, shifted, out=x)
        if multiplier != 1:
            np.multiply(x, np.uint64(multiplier), out=x)


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def signed(x: int) -> int:
    """Returns the int64 with the same bits as an unsigned 64-bit number."""
    return x - (1 << 64) if x >= 1 << 63 else x
