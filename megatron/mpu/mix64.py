"""A hash of 64-bit integers, for random numbers and digests. It imports only torch."""

import torch


def mix64(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of SplitMix64: a bijection on 64 bits with good mixing of all bits; int64 in and out.

    SplitMix: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014; its n-th
    output is the finalizer of seed + n * 0x9E3779B97F4A7C15. The constants are variant 13 of David Stafford's
    search (https://zimbry.blogspot.com/2011/09/better-bit-mixing-improving-on.html).
    """
    # In place: fewer buffers, which fit in a core's cache.
    x = _logical_shift(x, 30).bitwise_xor_(x).mul_(signed(0xBF58476D1CE4E5B9))
    x = _logical_shift(x, 27).bitwise_xor_(x).mul_(signed(0x94D049BB133111EB))
    return _logical_shift(x, 31).bitwise_xor_(x)


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def signed(x: int) -> int:
    """Returns the int64 with the same bits as an unsigned 64-bit number."""
    return x - (1 << 64) if x >= 1 << 63 else x
