"""Cuts where a layer does not weigh the same everywhere, or a rank holds two stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np

from megatron.pipeline.partition import partition

# Sums of measured times and bytes are compared in float64.
_ROUNDING = 1 + 1e-12


def partition_by_stage(costs: Sequence[Sequence[float]]) -> list[int]:
    """Bounds of the stages when layer i costs costs[s][i] on stage s: under 1F1B early stages keep the
    activations of more micro-batches.

    The largest stage is minimal; among such cuts the sum of squares is. Each stage has a layer with a cost;
    layers without go with the one after them, or with the last stage. A dynamic program over (stage, layer):
    O(stages x layers^2), vectorised.
    """
    stages = len(costs)
    heavy = [index for index, column in enumerate(zip(*costs, strict=True)) if any(column)]
    layers = len(heavy)
    sums = [np.concatenate([[0.0], np.cumsum(np.asarray(row, dtype=float)[heavy])]) for row in costs]
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
    return _uncompressed(bounds[::-1], heavy, len(costs[0]))


def _uncompressed(bounds: Sequence[int], heavy: Sequence[int], layers: int) -> list[int]:
    """Bounds among all layers, from bounds among the heavy ones."""
    return [0, *(heavy[bound - 1] + 1 for bound in bounds[1:-1]), layers]


def _stage_costs(prefix: np.ndarray) -> np.ndarray:
    """Cost of a stage of layers i to j - 1 at [i, j]; infinite where it would be empty."""
    return np.where(np.tri(len(prefix), dtype=bool), np.inf, prefix[None, :] - prefix[:, None])


def partition_v(weights: Sequence[Fraction | float], num_ranks: int) -> list[int]:
    """Bounds of 2 * num_ranks stages of which rank r holds stages r and 2 * num_ranks - 1 - r.

    The heaviest rank is as light as can be; among such cuts the sum of squares over the ranks is least. Each
    stage has a weighted layer; zero-weight layers go with the weighted layer after them, trailing ones with
    the last stage. ValueError if the weighted layers are too few.

    A dynamic program from the innermost rank, which holds a middle of the list, to the outermost, over the
    first and last layer of the middle that ranks further in have taken: O(layers^4 / ranks), vectorised.
    """
    heavy = [index for index, weight in enumerate(weights) if weight > 0]
    if len(heavy) < 2 * num_ranks:
        raise ValueError(
            f"{len(heavy)} layers of a weight above 0 cannot fill {2 * num_ranks} stages: give fewer ranks"
        )
    prefix = np.array([0.0, *accumulate(float(weights[index]) for index in heavy)])
    # No cut is needed that is worse than the even one.
    even = np.diff(prefix[partition([weights[index] for index in heavy], 2 * num_ranks)])
    limit = float((even + even[::-1]).max()) * _ROUNDING
    middle = prefix[None, :] - prefix[:, None]
    middle[np.tri(len(prefix), k=1, dtype=bool)] = np.inf  # two stages need two layers
    heaviest = middle
    for _ in range(num_ranks - 1):
        heaviest, _ = _around(heaviest, prefix, limit, np.maximum)
    limit = heaviest[0, -1] * _ROUNDING
    squares, choices = np.where(middle <= limit, middle, np.inf) ** 2, []
    for _ in range(num_ranks - 1):
        squares, choice = _around(squares, prefix, limit, lambda outer, inner: outer**2 + inner)
        choices.append(choice)
    left, right = [0], [len(heavy)]
    for choice in reversed(choices):
        taken_left, taken_right = choice[:, left[-1], right[-1]]
        left.append(left[-1] + int(taken_left))
        right.append(right[-1] - int(taken_right))
    half = (prefix[left[-1]] + prefix[right[-1]]) / 2
    turn = min(max(int(np.abs(prefix - half).argmin()), left[-1] + 1), right[-1] - 1)
    return _uncompressed([*left, turn, *reversed(right)], heavy, len(weights))


def _around(
    inner: np.ndarray,
    prefix: np.ndarray,
    limit: float,
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Puts one more rank around a middle: at [i, j] the best value for layers i to j - 1, and how many layers the
    rank takes on the left and on the right, [2, i, j]. inner[i, j] is the value without it."""
    size = len(prefix)
    best, taken = np.full_like(inner, np.inf), np.zeros((2, *inner.shape), dtype=int)
    for left in range(1, size - 1):
        left_weight = prefix[left:] - prefix[: size - left]
        if left_weight.min() > limit:
            break
        for right in range(1, size - left):
            weight = left_weight[:, None] + (prefix[right:] - prefix[: size - right])[None, :]
            if weight.min() > limit:
                break
            value = combine(np.where(weight <= limit, weight, np.inf), inner[left:, : size - right])
            part = (slice(0, size - left), slice(right, size))
            better = value < best[part]
            best[part][better] = value[better]
            taken[0][part][better], taken[1][part][better] = left, right
    return best, taken
