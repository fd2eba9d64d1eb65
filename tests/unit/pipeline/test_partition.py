"""Compares the partition with an exhaustive search, also on layer lists of known models."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.partition import partition, partition_v


def even(weights: Sequence, num_stages: int) -> list[int]:
    """Returns the partition of layers whose weights do not depend on the stage."""
    return partition([weights] * num_stages)


def stage_weights(weights: Sequence, bounds: Sequence[int]) -> list:
    return [sum(weights[start:end]) for start, end in pairwise(bounds)]


def all_partitions(costs: Sequence[Sequence]) -> list[list[int]]:
    """Yields all bounds of the documented form: each stage but the last ends with a layer that has a cost."""
    ends = [index + 1 for index, column in enumerate(zip(*costs, strict=True)) if any(column)]
    inner = combinations(ends[:-1], len(costs) - 1)
    return [[0, *bounds, len(costs[0])] for bounds in inner]


def rule(costs: Sequence[Sequence], bounds: list[int], ranks: int | None = None) -> tuple:
    """Returns the key that the partition minimizes. ranks: the number of ranks of a V schedule, in which a
    rank holds two stages; None if each rank holds one."""
    sums = [sum(row[a:b]) for row, (a, b) in zip(costs, pairwise(bounds), strict=True)]
    loads = [a + b for a, b in zip(sums, sums[::-1], strict=True)][:ranks] if ranks else sums
    return max(loads), sum(value**2 for value in sums), bounds


def smallest_maximum(weights: Sequence[int], num_stages: int) -> int:
    """Returns the heaviest stage of the best partition, with a table over stages and positions, in
    O(num_stages n^2)."""
    sums = list(accumulate(weights, initial=0))
    heaviest = sums
    for _ in range(num_stages - 1):
        heaviest = [
            min(max(heaviest[start], sums[end] - sums[start]) for start in range(end + 1))
            for end in range(len(sums))
        ]
    return heaviest[-1]


def layer_weights(max_size: int, min_size: int, most: int = 10**12) -> st.SearchStrategy[list[int]]:
    """Draws weights: few values (many ties), many values, zeros, giants, and blocks repeated or mirrored."""
    lists = [
        st.lists(values, min_size=min_size, max_size=max_size)
        for values in (
            st.integers(0, 1),
            st.integers(1, 3),
            st.integers(0, 12),
            st.integers(1, most),
            st.sampled_from([1, 1, 1, 2, 40]),
        )
    ]
    block = st.lists(st.integers(0, 1000), min_size=(min_size + 1) // 2, max_size=max_size // 2)
    return st.one_of(*lists, block.map(lambda half: half * 2), block.map(lambda half: half + half[::-1]))


@st.composite
def stage_costs(draw, most_stages: int, even_number: bool = False) -> list[list[int]]:
    """Draws the costs of each layer on each stage, equal on all stages or not."""
    stages = draw(st.integers(1, most_stages))
    stages *= 1 + even_number
    costs = st.integers(0, draw(st.sampled_from([1, 9, 10**6])))
    columns = draw(st.lists(st.lists(costs, min_size=stages, max_size=stages), min_size=stages, max_size=8))
    if draw(st.booleans()):
        columns = [[column[0]] * stages for column in columns]
    return [
        [*row]
        for row in zip(*([value + (not any(column)) for value in column] for column in columns), strict=True)
    ]


@pytest.mark.parametrize(
    ("layers", "bounds", "weights"),
    [
        pytest.param([0, 2, 0, 1, 1, 1, 1, 0, 0, 2, 0], [0, 2, 5, 7, 11], [2] * 4, id="zeros"),
        pytest.param(
            [0, 2, 0] + [1] * 60 + [0, 0, 2],
            [0, 2, 5, *range(7, 64, 2), 66],
            [2] * 32,
            id="heavy embedding and head stand alone",
        ),
        pytest.param(
            [0, 1, 0] + [1] * 62 + [0, 0, 1],
            [0, 4, *range(6, 65, 2), 68],
            [2] * 32,
            id="an embedding that weighs as a layer",
        ),
        pytest.param([0, 1, 0] + [1] * 70 + [0, 0, 1, 0], [0, *range(8, 69, 6), 77], [6] * 12, id="BLOOM"),
        pytest.param([1] * 5, [0, 1, 3, 5], [1, 2, 2], id="heavier stages come later"),
        pytest.param(
            [1] * 64, [0, 10, 20, 31, 42, 53, 64], [10, 10, 11, 11, 11, 11], id="so do many of them"
        ),
        pytest.param([9, 1, 1, 1, 1], [0, 1, 3, 5], [9, 2, 2], id="lighter stages are even too"),
    ],
)
def test_known_partitions(layers, bounds, weights):
    assert even(layers, len(weights)) == bounds
    assert stage_weights(layers, bounds) == weights


@settings(max_examples=300, deadline=None)
@given(stage_costs(most_stages=5))
def test_the_partition_is_the_documented_one_of_all(costs):
    assert partition(costs) == min(all_partitions(costs), key=lambda bounds: rule(costs, bounds))


@settings(max_examples=100, deadline=None)
@given(stage_costs(most_stages=3, even_number=True))
def test_a_v_balances_the_ranks(costs):
    ranks = len(costs) // 2
    found = rule(costs, partition_v(costs), ranks)
    assert found[:2] == min(rule(costs, bounds, ranks) for bounds in all_partitions(costs))[:2]


@settings(max_examples=200, deadline=None)
@given(layer_weights(max_size=100, min_size=1), st.integers(1, 20))
def test_long_lists(weights, num_stages):
    weighted = sum(weight > 0 for weight in weights)
    if not weighted:
        return
    num_stages = min(num_stages, weighted)
    bounds = even(weights, num_stages)
    assert len(bounds) == num_stages + 1
    assert (bounds[0], bounds[-1]) == (0, len(weights))
    assert all(weights[bound - 1] > 0 for bound in bounds[1:-1])
    assert min(stage_weights(weights, bounds)) > 0
    assert max(stage_weights(weights, bounds)) == smallest_maximum(weights, num_stages)


@settings(max_examples=100, deadline=None)
@given(layer_weights(max_size=60, min_size=10), st.integers(1, 10), st.fractions(Fraction(1, 1000), 1000))
def test_the_unit_of_the_weights_does_not_matter(weights, num_stages, unit):
    weights = [weight + 1 for weight in weights]
    assert even([unit * weight for weight in weights], num_stages) == even(weights, num_stages)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.decimals("0.01", 10, places=2), min_size=8, max_size=40), st.integers(1, 8))
def test_floats_are_the_decimals_they_print_as(weights, num_stages):
    bounds = even([Fraction(weight) for weight in weights], num_stages)
    assert even([float(weight) for weight in weights], num_stages) == bounds
    assert even(np.array([float(weight) for weight in weights]), num_stages) == bounds


def test_sums_that_floats_round_are_equal():
    # As floats, 0.1 + 0.2 > 0.3. The first stage would look heavier than the second, and layer 1 would move.
    assert even([0.3, 0.1, 0.2, 0.3], 3) == even([3, 1, 2, 3], 3) == [0, 1, 3, 4]
    assert stage_weights([1, 2, 3, 1, 2], even([0.1, 0.2, 0.3, 0.1, 0.2], 3)) == [3, 3, 3]


def test_integers_of_numpy_do_not_overflow():
    weights = np.array([2**62, 2**62, 2**62, 1, 2**62], dtype=np.int64)
    assert even(weights, 2) == even([int(weight) for weight in weights], 2) == [0, 2, 5]
