"""Cuts where a layer does not weigh the same everywhere, or a rank holds two stages."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np

# Sums of measured times and bytes are compared in float64.
_ROUNDING = 1 + 1e-12


def partition_by_stage(costs: Sequence[Sequence[float]]) -> list[int]:
    """Bounds of the stages when layer i costs costs[s][i] on stage s: under 1F1B early stages keep the
    activations of more micro-batches.

    The largest stage is minimal; among such cuts the sum of squares is. No stage is empty. A dynamic program
    over (stage, layer): O(stages x layers^2), vectorised.
    """
    stages, layers = len(costs), len(costs[0])
    sums = [np.concatenate([[0.0], np.cumsum(np.asarray(row, dtype=float))]) for row in costs]
    largest = np.full(layers + 1, np.inf)
    largest[0] = 0.0
    for prefix in sums:
        largest = np.maximum(largest[:, None], _stage_costs(prefix)).min(axis=0)
    limit = largest[layers] * _ROUNDING
    squares = np.full(layers + 1, np.inf)
    squares[0] = 0.0
    choices = []
    for prefix in sums:
        stage = _stage_costs(prefix)
        total = squares[:, None] + np.where(stage <= limit, stage, np.inf) ** 2
        choices.append(total.argmin(axis=0))
        squares = total.min(axis=0)
    bounds = [layers]
    for stage in reversed(range(stages)):
        bounds.append(int(choices[stage][bounds[-1]]))
    return bounds[::-1]


def _stage_costs(prefix: np.ndarray) -> np.ndarray:
    """Cost of a stage of layers i to j - 1 at [i, j]; infinite where it would be empty."""
    return np.where(np.tri(len(prefix), dtype=bool), np.inf, prefix[None, :] - prefix[:, None])


def partition_v(weights: Sequence[Fraction | float], num_ranks: int) -> list[int]:
    """Bounds of 2 * num_ranks stages of which rank r holds stages r and 2 * num_ranks - 1 - r.

    The heaviest rank is as light as can be; no stage is empty. Where that leaves a choice, each rank from the
    outermost in takes what is nearest to an even share of the rest. Zero-weight layers go with the weighted
    layer after them, trailing ones with the last stage. ValueError if the weighted layers are too few.
    """
    heavy = [index for index, weight in enumerate(weights) if weight > 0]
    if len(heavy) < 2 * num_ranks:
        raise ValueError(
            f"{len(heavy)} layers of a weight above 0 cannot fill {2 * num_ranks} stages: give fewer ranks"
        )
    prefix = np.array([0.0, *accumulate(float(weights[index]) for index in heavy)])
    limit = _lightest_limit(prefix, num_ranks)
    ends = _inner_ends(prefix, num_ranks, limit)
    assert ends is not None
    first, last = 0, len(heavy)
    left, right = [0], [last]
    for rank in range(num_ranks - 1):
        share = (prefix[last] - prefix[first]) / (num_ranks - rank)
        first, last = _nearest_to_share(prefix, first, last, ends[rank + 1], limit, share)
        left.append(first)
        right.append(last)
    middle = (prefix[first] + prefix[last]) / 2
    inner = min(max(int(np.abs(prefix - middle).argmin()), first + 1), last - 1)
    compressed = [*left, inner, *reversed(right)]
    return [0, *(heavy[bound - 1] + 1 for bound in compressed[1:-1]), len(weights)]


def _lightest_limit(prefix: np.ndarray, num_ranks: int) -> float:
    """The smallest weight of the heaviest rank, by bisection between the mean and everything, to rounding."""
    low, high = prefix[-1] / num_ranks, prefix[-1]
    if _inner_ends(prefix, num_ranks, low * _ROUNDING) is not None:
        return low * _ROUNDING
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _inner_ends(prefix, num_ranks, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _inner_ends(prefix: np.ndarray, num_ranks: int, limit: float) -> list[np.ndarray] | None:
    """Per rank r and first layer i, the largest j such that layers i to j - 1 fit on ranks r and further in,
    none of them heavier than `limit` (-1 if none does); None if not all layers fit on all ranks."""
    layers = len(prefix) - 1
    last = (
        np.searchsorted(prefix, prefix + limit, side="right") - 1
    )  # the innermost rank takes a whole middle
    last = np.where(last >= np.arange(layers + 1) + 2, last, -1)
    ends = [last]
    starts = np.arange(layers + 1)
    for _ in range(num_ranks - 1):
        inner = ends[0]
        # [i, k]: the left stage is layers i to k - 1; what is left of the limit is for the right stage.
        left_over = limit - (prefix[None, :] - prefix[:, None])
        reach = np.searchsorted(prefix, prefix[inner][None, :] + left_over, side="right") - 1
        fits = (starts[None, :] > starts[:, None]) & (inner[None, :] >= 0) & (reach > inner[None, :])
        ends.insert(0, np.where(fits, reach, -1).max(axis=1))
    return ends if ends[0][0] >= layers else None


def _nearest_to_share(
    prefix: np.ndarray, first: int, last: int, inner_ends: np.ndarray, limit: float, share: float
) -> tuple[int, int]:
    """The middle that a rank leaves to the ranks further in, so that it weighs nearest to `share` itself."""
    best, best_distance = (first, last), np.inf
    for start in range(first + 1, last):
        ends = np.arange(start + 2, min(last - 1, inner_ends[start]) + 1)
        weight = prefix[start] - prefix[first] + prefix[last] - prefix[ends]
        distance = np.where(weight <= limit, np.abs(weight - share), np.inf)
        if len(ends) and distance.min() < best_distance * (1 - 1e-12):
            best, best_distance = (start, int(ends[distance.argmin()])), distance.min()
    return best
