"""Distributes items by their sizes."""

from collections.abc import Mapping
from typing import TypeVar

_Item = TypeVar("_Item", int, str)


def share_out(sizes: Mapping[_Item, int], shares: int) -> dict[_Item, int]:
    """Returns item -> number of its share, so that the largest sum of sizes of a share is about as small as
    possible. It takes the largest item first, and assigns each item to the share with the smallest sum."""
    sums = [0] * shares
    chosen: dict[_Item, int] = {}
    for item in sorted(sizes, key=lambda item: (-sizes[item], item)):
        chosen[item] = sums.index(min(sums))
        sums[chosen[item]] += sizes[item]
    return chosen
