"""Cuts where a layer does not weigh the same everywhere, or a rank holds two stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from megatron.pipeline.partition import Weight

# Sums of measured times and bytes are compared in float64.
_ROUNDING = 1 + 1e-12


def partition_by_stage(costs: Sequence[Sequence[Weight]]) -> list[int]:
    """Bounds of the stages when layer i costs costs[s][i] on stage s: under 1F1B early stages keep the
    activations of more micro-batches.

    The largest stage is minimal; among such cuts the sum of squares is. Each stage has a layer with a cost;
    layers without go with the one after them, or with the last stage. A dynamic program over (stage, layer):
    O(stages x layers^2), vectorised.
    """
    heavy = _heavy(costs)
    layers = len(heavy)
    sums = [_prefix(row, heavy) for row in costs]
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
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return _uncompressed(bounds[::-1], heavy, len(costs[0]))


def _uncompressed(bounds: Sequence[int], heavy: Sequence[int], layers: int) -> list[int]:
    """Bounds among all layers, from bounds among the heavy ones."""
    return [0, *(heavy[bound - 1] + 1 for bound in bounds[1:-1]), layers]


def _stage_costs(prefix: np.ndarray) -> np.ndarray:
    """Cost of a stage of layers i to j - 1 at [i, j]; infinite where it would be empty."""
    return np.where(np.tri(len(prefix), dtype=bool), np.inf, prefix[None, :] - prefix[:, None])


def partition_v(costs: Sequence[Sequence[Weight]]) -> list[int]:
    """Bounds of the 2 * ranks stages of which rank r holds stages r and 2 * ranks - 1 - r, when layer i costs
    costs[s][i] on stage s.

    The heaviest rank is as light as can be; among such cuts the sum of squares over the stages is least. Each
    stage has a layer with a cost, as in `partition_by_stage`.

    A dynamic program from the innermost rank, which holds a middle of the list, to the outermost, over the
    first and last layer of the middle that is taken: O(layers^4 / ranks), vectorised.
    """
    num_ranks = len(costs) // 2
    heavy = _heavy(costs)
    sums = [_prefix(row, heavy) for row in costs]
    # No cut is of interest that is worse than the one that balances the stages.
    stages = partition_by_stage(costs)
    even = np.array([sum(row[a:b]) for row, (a, b) in zip(costs, pairwise(stages), strict=True)], dtype=float)
    limit = float((even + even[::-1]).max()) * _ROUNDING
    inside_out = range(num_ranks - 1, -1, -1)
    nothing = np.where(np.eye(len(heavy) + 1, dtype=bool), 0.0, np.inf)
    heaviest = nothing
    for rank in inside_out:
        heaviest, _ = _around(
            heaviest, sums[rank], sums[-1 - rank], limit, lambda a, b, inner: np.maximum(a + b, inner)
        )
    limit = heaviest[0, -1] * _ROUNDING
    squares, choices = nothing, []
    for rank in inside_out:
        squares, choice = _around(
            squares, sums[rank], sums[-1 - rank], limit, lambda a, b, inner: a**2 + b**2 + inner
        )
        choices.append(choice)
    left, right = [0], [len(heavy)]
    for choice in reversed(choices):
        taken_left, taken_right = choice[:, left[-1], right[-1]]
        left.append(left[-1] + int(taken_left))
        right.append(right[-1] - int(taken_right))
    return _uncompressed([*left, *reversed(right[:-1])], heavy, len(costs[0]))


def _around(
    inner: np.ndarray,
    left_prefix: np.ndarray,
    right_prefix: np.ndarray,
    limit: float,
    combine: Callable[..., np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Puts one more rank around a middle: at [i, j] the best value for layers i to j - 1, and how many layers
    the rank takes on the left and on the right, [2, i, j]. inner[i, j] is the value without it; `combine`
    makes the new one of the weights of the rank's two stages and the middle's value."""
    size = len(left_prefix)
    best, taken = np.full_like(inner, np.inf), np.zeros((2, *inner.shape), dtype=int)
    for left in range(1, size - 1):
        left_weight = (left_prefix[left:] - left_prefix[: size - left])[:, None]
        if left_weight.min() > limit:
            break
        for right in range(1, size - left):
            right_weight = (right_prefix[right:] - right_prefix[: size - right])[None, :]
            fits = left_weight + right_weight <= limit
            if not fits.any():
                break
            value = combine(left_weight, right_weight, inner[left:, : size - right])
            part = (slice(0, size - left), slice(right, size))
            better = fits & (value < best[part])
            best[part][better] = value[better]
            taken[0][part][better], taken[1][part][better] = left, right
    return best, taken


def _heavy(costs: Sequence[Sequence[Weight]]) -> list[int]:
    return [index for index, column in enumerate(zip(*costs, strict=True)) if any(column)]


def _prefix(row: Sequence[Weight], heavy: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.asarray(row, dtype=float)[heavy])])
