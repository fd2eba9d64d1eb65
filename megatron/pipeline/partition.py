"""The partition of the layer list into stages, computed by dynamic programs over the stages.

The partition minimizes the cost of the heaviest stage, or with a V schedule the cost of the heaviest rank.
Among equal costs it takes the smallest sum of squared stage costs, and then the smallest bounds, so later
stages are heavier. Each stage has at least one layer with a cost. Layers without a cost belong to the stage
of the next layer with a cost, or to the last stage.

The cost of a layer may depend on its stage. Under 1F1B, for example, earlier stages store the activations of
more micro-batches. Costs are added as integer multiples of a common unit, so 0.1 + 0.2 equals 0.3.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np

Weight = float | Fraction

# Maximum numbers of bits of a partition's costs that are compared with a limit, squared, or added as floats.
# Costs with more bits lose their last bits.
_LIMIT_BITS, _SQUARE_BITS, _FLOAT_BITS = 62, 30, 52

# Maximum number of steps of a dynamic program, which take 10 to 30 s. It suffices for 300 to 400 layers with
# a V schedule, and for several thousand layers otherwise.
_MAX_STEPS = 1_000_000_000


class TooLongError(ValueError):
    """Raised if there are so many layers that the partition would take minutes."""


def partition(costs: Sequence[Sequence[Weight]]) -> list[int]:
    """Returns the bounds: stage s has the layers bounds[s] to bounds[s + 1] - 1. Raises TooLongError.

    costs[s][i] is the cost of layer i on stage s. The number of layers with a cost must be at least the
    number of stages.

    This is chains-on-chains partitioning (Pinar and Aykanat, J. Parallel Distrib. Comput. 64 (2004),
    974-996). A bisection finds the smallest possible cost of the heaviest stage. Among the partitions within
    this limit, a dynamic program finds the smallest sum of squares.
    """
    weighted = _layers_with_cost(costs)
    whole = _integer_costs(costs, weighted)
    sums = _prefix_sums(whole, _LIMIT_BITS)
    limit = _smallest_limit(sums)
    backward = {id(row): row[-1] - row[::-1] for row in sums}
    mirrored = _reachable([backward[id(row)] for row in reversed(sums)], limit)
    possible = [
        np.flatnonzero(a & b[::-1]) for a, b in zip(_reachable(sums, limit), mirrored[::-1], strict=True)
    ]
    # A stage that ends at ends[j] starts at one of starts[first[j]] to starts[stop[j] - 1].
    ranges = [
        (np.searchsorted(row[starts], row[ends] - limit), np.searchsorted(starts, ends))
        for row, (starts, ends) in zip(sums, pairwise(possible), strict=True)
    ]
    _check_steps(sum(len(first) * int((stop - first).max()) for first, stop in ranges))
    squares, choices = np.zeros(1, dtype=np.int64), []
    rounded = _prefix_sums(whole, _SQUARE_BITS)
    for row, (starts, ends), (first, stop) in zip(rounded, pairwise(possible), ranges, strict=True):
        window = first[:, None] + np.arange((stop - first).max())
        fits, window = window < stop[:, None], np.minimum(window, len(starts) - 1)
        sizes = row[ends][:, None] - row[starts][window]
        total = np.where(fits, squares[window] + sizes**2, np.iinfo(int).max)
        best = total.argmin(axis=1)  # among equal sums, takes the smallest bound
        choices.append(first + best)
        squares = total.min(axis=1)
    bounds, index = [], 0
    for choice, starts in zip(reversed(choices), reversed(possible[:-1]), strict=True):
        index = int(choice[index])
        bounds.append(int(starts[index]))
    return _bounds_of_all_layers([*reversed(bounds), len(weighted)], weighted, len(costs[0]))


def _smallest_limit(sums: Sequence[np.ndarray]) -> int:
    """Returns the smallest possible cost of the heaviest stage. sums: prefix sums of the costs on each
    stage."""
    different = {id(row): row for row in sums}
    layers = np.array([np.diff(row) for row in different.values()])
    largest = layers.max()
    rows = {key: row.tolist() for key, row in different.items()}

    def is_enough(limit: int) -> bool:
        if limit < largest:
            return bool(_reachable(sums, limit)[-1][-1])
        # Every stage can hold any layer, so the longest possible stages reach the farthest layer.
        end = 0
        for row in map(rows.__getitem__, map(id, sums)):
            end = bisect_right(row, row[end] + limit) - 1
        return end == layers.shape[1]

    # Lower bound: the most expensive layer is on some stage. Upper bound: one stage holds all layers.
    too_small, enough = int(layers.min(axis=0).max()) - 1, max(row[-1] for row in rows.values())
    while too_small + 1 < enough:
        limit = (too_small + enough) // 2
        if is_enough(limit):
            enough = limit
        else:
            too_small = limit
    return enough


def _reachable(sums: Sequence[np.ndarray], limit: int) -> list[np.ndarray]:
    """Returns, in row s and element j, whether the first s stages can hold the first j layers such that each
    stage has at least one layer and costs at most `limit`."""
    positions = np.arange(len(sums[0]))
    first: dict[int, np.ndarray] = {}  # the first layer of the longest stage that ends at each position
    rows = [positions == 0]
    for row in sums:
        if id(row) not in first:
            first[id(row)] = np.searchsorted(row, row - limit)
        before = np.concatenate([[0], np.cumsum(rows[-1])])
        rows.append(before[positions] > before[first[id(row)]])
    return rows


def partition_v(costs: Sequence[Sequence[Weight]]) -> list[int]:
    """Returns the bounds of 2 * ranks stages for a V schedule (DualPipeV), in which rank r holds the stages r
    and 2 * ranks - 1 - r. The cost of the heaviest rank is minimal. costs: see `partition`. Raises
    TooLongError.

    The dynamic program runs from the innermost rank, whose two stages are adjacent in the middle of the list,
    to the outermost rank. Its state is the range of layers that the inner ranks hold. It takes O(layers^4 /
    ranks) steps, which are vectorized.
    """
    weighted = _layers_with_cost(costs)
    _check_steps(len(weighted) ** 4 // len(costs))
    sums = [row.astype(float) for row in _prefix_sums(_integer_costs(costs, weighted), _FLOAT_BITS)]
    # Upper bound for pruning: the cost of the partition that balances the stages.
    places = [weighted.index(bound - 1) + 1 for bound in partition(costs)[1:-1]]
    stages = pairwise([0, *places, len(weighted)])
    even = np.array([row[b] - row[a] for row, (a, b) in zip(sums, stages, strict=True)])
    limit = float((even + even[::-1]).max())
    inside_out = range(len(costs) // 2 - 1, -1, -1)
    nothing = np.where(np.eye(len(weighted) + 1, dtype=bool), 0.0, np.inf)
    heaviest = nothing
    for rank in inside_out:
        heaviest, _ = _add_outer_rank(
            heaviest, sums[rank], sums[-1 - rank], limit, lambda a, b, inner: np.maximum(a + b, inner)
        )
    limit = heaviest[0, -1]
    squares, choices = nothing, []
    for rank in inside_out:
        squares, choice = _add_outer_rank(
            squares, sums[rank], sums[-1 - rank], limit, lambda a, b, inner: a**2 + b**2 + inner
        )
        choices.append(choice)
    left, right = [0], [len(weighted)]
    for choice in reversed(choices):
        taken_left, taken_right = choice[:, left[-1], right[-1]]
        left.append(left[-1] + int(taken_left))
        right.append(right[-1] - int(taken_right))
    return _bounds_of_all_layers([*left, *reversed(right[:-1])], weighted, len(costs[0]))


def _add_outer_rank(
    inner: np.ndarray,
    left_prefix: np.ndarray,
    right_prefix: np.ndarray,
    limit: float,
    combine: Callable[..., np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Adds the next outer rank, which has one stage on each side of the inner ranks' layers.

    inner[i, j]: the value if the inner ranks hold the layers i to j - 1. combine: returns the new value from
    the costs of the rank's two stages and the inner value. Returns the best value [i, j] if the inner ranks
    and the new rank hold the layers i to j - 1, and the number of layers in the new rank's left and right
    stage, [2, i, j].
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


def _check_steps(steps: int) -> None:
    if steps > _MAX_STEPS:
        raise TooLongError(f"{steps:,} steps")


def _layers_with_cost(costs: Sequence[Sequence[Weight]]) -> list[int]:
    """Returns the indices of the layers that have a cost on any stage."""
    columns = zip(*{id(row): row for row in costs}.values(), strict=True)
    return [index for index, column in enumerate(columns) if any(column)]


def _bounds_of_all_layers(bounds: Sequence[int], weighted: Sequence[int], layers: int) -> list[int]:
    """Converts bounds among the layers with a cost to bounds among all layers."""
    return [0, *(weighted[bound - 1] + 1 for bound in bounds[1:-1]), layers]


def _integer_costs(costs: Sequence[Sequence[Weight]], weighted: Sequence[int]) -> list[list[int]]:
    """Returns the costs of the layers `weighted` on each stage as multiples of a common unit. A float counts
    as the decimal number that Python prints for it. Equal rows share one list."""
    rows = {id(row): row for row in costs}
    exact = {key: [_ratio(row[index]) for index in weighted] for key, row in rows.items()}
    unit = math.lcm(*(denominator for row in exact.values() for _, denominator in row))
    whole = {
        key: [numerator * (unit // denominator) for numerator, denominator in row]
        for key, row in exact.items()
    }
    divisor = max(math.gcd(*(value for row in whole.values() for value in row)), 1)
    whole = {key: [value // divisor for value in row] for key, row in whole.items()}
    return [whole[id(row)] for row in costs]


def _ratio(value: Weight) -> tuple[int, int]:
    """Returns the value as (numerator, denominator)."""
    exact = value if isinstance(value, Fraction) else Decimal(str(value))
    return exact.as_integer_ratio()


def _prefix_sums(whole: Sequence[list[int]], bits: int) -> list[np.ndarray]:
    """Returns, in row s and element j, the cost of the first j layers on stage s. If the sum over a
    partition's stages could have more than `bits` bits, costs lose their last bits. Equal rows share one
    array."""
    rows = {id(row): row for row in whole}
    largest = sum(max(column) for column in zip(*rows.values(), strict=True))
    shift = max(largest.bit_length() - bits, 0)
    sums = {key: np.array([0, *accumulate(value >> shift for value in row)]) for key, row in rows.items()}
    return [sums[id(row)] for row in whole]
