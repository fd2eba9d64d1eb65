"""Partitions by dynamic programming, for costs that depend on the stage, and for two stages per rank.

Why there are two solvers: `megatron.pipeline.partition` needs one weight per layer, which makes its greedy
bounds valid, so it is exact in integers and partitions 10,000 layers in half a second. Memory depends on the
stage, and the two stages of a rank in a V schedule are not adjacent, so these cases need tables whose cost
grows with the square (V schedules: the fourth power) of the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from megatron.pipeline.partition import Weight

# Sums of measured times and bytes are compared in float64.
_ROUNDING = 1 + 1e-12


def partition_by_stage(costs: Sequence[Sequence[Weight]]) -> list[int]:
    """Bounds of the stages if layer i costs costs[s][i] on stage s. Example: memory under 1F1B, where earlier
    stages keep the activations of more micro-batches.

    The cost of the largest stage is minimal; among such partitions the sum of squares is minimal. Each stage
    has at least one layer with a cost. Layers without cost belong to the stage of the next layer with a cost,
    or to the last stage. Chains-on-chains partitioning (Pinar and Aykanat, J. Parallel Distrib. Comput. 64
    (2004), 974-996) by a dynamic program over (stage, layer): O(stages x layers^2), vectorized.
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
    """Converts bounds among the layers with a cost to bounds among all layers."""
    return [0, *(heavy[bound - 1] + 1 for bound in bounds[1:-1]), layers]


def _stage_costs(prefix: np.ndarray) -> np.ndarray:
    """Element [i, j]: cost of a stage with layers i to j - 1; infinite if the stage is empty."""
    return np.where(np.tri(len(prefix), dtype=bool), np.inf, prefix[None, :] - prefix[:, None])


def partition_v(costs: Sequence[Sequence[Weight]]) -> list[int]:
    """Bounds of 2 * ranks stages for a V schedule (DualPipeV): rank r holds stages r and
    2 * ranks - 1 - r. Layer i costs costs[s][i] on stage s.

    The cost of the heaviest rank is minimal; among such partitions the sum of squares over the stages is
    minimal. Each stage has at least one layer with a cost, as in `partition_by_stage`.

    A dynamic program from the innermost rank, whose two stages are adjacent in the middle of the list, to the
    outermost. Its state is the range of layers that the inner ranks hold: O(layers^4 / ranks), vectorized.
    """
    num_ranks = len(costs) // 2
    heavy = _heavy(costs)
    sums = [_prefix(row, heavy) for row in costs]
    # Upper bound for pruning: the partition that balances the stages.
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
    """Adds the next outer rank, with one stage on each side of the inner ranks' layers.

    inner[i, j]: value if the inner ranks hold layers i to j - 1. `combine`: new value from the costs of the
    rank's two stages and the inner value. Returns the best value [i, j] for layers i to j - 1 including the
    new rank, and the number of layers in its left and right stage, [2, i, j].
    """
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
    """Indices of the layers that have a cost on any stage."""
    return [index for index, column in enumerate(zip(*costs, strict=True)) if any(column)]


def _prefix(row: Sequence[Weight], heavy: Sequence[int]) -> np.ndarray:
    """Element j: the cost of the first j layers of `heavy`, of the costs `row` of one stage."""
    return np.concatenate([[0.0], np.cumsum(np.asarray(row, dtype=float)[heavy])])
