"""The most even partition against all partitions, a plain dynamic program, and lists of known models."""

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate, combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline import partition as solver
from megatron.pipeline.partition import partition


def stage_weights(weights: Sequence, bounds: Sequence[int]) -> list:
    return [sum(weights[start:end]) for start, end in zip(bounds, bounds[1:], strict=False)]


def profile(weights: Sequence, bounds: Sequence[int]) -> list:
    return sorted(stage_weights(weights, bounds), reverse=True)


def best_of_all_partitions(weights: Sequence[int], num_stages: int) -> list[int]:
    """The documented partition, by the documented order: smallest profile, then smallest bounds."""
    size = len(weights)
    weights = weights if any(weights) else [1] * size
    partitions = [
        [0, *inner, size] for inner in combinations_with_replacement(range(size + 1), num_stages - 1)
    ]
    return min(partitions, key=lambda bounds: (profile(weights, bounds), bounds))


def smallest_maximum(weights: Sequence[int], num_stages: int) -> int:
    """The heaviest stage of the best partition: table over stages and positions, O(num_stages n^2)."""
    sums = list(accumulate(weights, initial=0))
    heaviest = sums
    for _ in range(num_stages - 1):
        heaviest = [
            min(max(heaviest[start], sums[end] - sums[start]) for start in range(end + 1))
            for end in range(len(sums))
        ]
    return heaviest[-1]


def smallest_profile(weights: Sequence[int], num_stages: int) -> list[int]:
    """The same table with whole profiles in its fields: taking a stage along keeps their order."""
    sums = list(accumulate(weights, initial=0))
    profiles = [[total] for total in sums]
    for _ in range(num_stages - 1):
        profiles = [
            min(sorted([*profiles[start], sums[end] - sums[start]], reverse=True) for start in range(end + 1))
            for end in range(len(sums))
        ]
    return profiles[-1]


def layer_weights(max_size: int, min_size: int = 0) -> st.SearchStrategy[list[int]]:
    """Few values for many ties, many values for none, zeros, giants, and blocks repeated or mirrored."""
    lists = [
        st.lists(values, min_size=min_size, max_size=max_size)
        for values in (
            st.integers(0, 1),
            st.integers(1, 3),
            st.integers(0, 12),
            st.integers(1, 10**12),
            st.sampled_from([1, 1, 1, 2, 40]),
        )
    ]
    block = st.lists(st.integers(0, 1000), min_size=(min_size + 1) // 2, max_size=max_size // 2)
    return st.one_of(*lists, block.map(lambda half: half * 2), block.map(lambda half: half + half[::-1]))


def test_example_with_zeros():
    assert partition([0, 2, 0, 1, 1, 1, 1, 0, 0, 2, 0], 4) == [0, 2, 5, 7, 11]


def test_heavy_embedding_and_head_stand_alone():
    layers = [0, 2, 0] + [1] * 60 + [0, 0, 2]
    assert partition(layers, 32) == [0, 2, 5, *range(7, 64, 2), 66]
    assert stage_weights(layers, partition(layers, 32)) == [2] * 32


def test_embedding_that_weighs_as_a_layer():
    layers = [0, 1, 0] + [1] * 62 + [0, 0, 1]
    assert partition(layers, 32) == [0, 4, *range(6, 65, 2), 68]
    assert stage_weights(layers, partition(layers, 32)) == [2] * 32


def test_bloom():
    layers = [0, 1, 0] + [1] * 70 + [0, 0, 1, 0]
    bounds = partition(layers, 12)
    assert stage_weights(layers, bounds) == [6] * 12
    assert bounds == [0, *range(8, 69, 6), 77]


def test_of_equally_even_partitions_the_one_with_heavier_later_stages_is_returned():
    assert partition([1] * 5, 3) == [0, 1, 3, 5]
    assert stage_weights([1] * 64, partition([1] * 64, 6)) == [10, 10, 11, 11, 11, 11]


def test_the_second_heaviest_stage_counts_too():
    assert profile([9, 1, 1, 1, 1], partition([9, 1, 1, 1, 1], 3)) == [9, 2, 2]


@pytest.mark.parametrize(
    ("weights", "num_stages", "bounds"),
    [
        ([], 2, [0, 0, 0]),
        ([], 1, [0, 0]),
        ([5], 1, [0, 1]),
        ([0, 3, 0, 4, 0], 4, [0, 0, 0, 2, 5]),
        ([0, 0, 0, 0], 2, [0, 2, 4]),
        ([0, 0], 3, [0, 0, 1, 2]),
        ([0, 0, 7], 1, [0, 3]),
    ],
    ids=str,
)
def test_fewer_weighted_layers_than_stages(weights, num_stages, bounds):
    assert partition(weights, num_stages) == bounds


@settings(max_examples=300, deadline=None)
@given(layer_weights(max_size=8), st.integers(1, 5))
def test_smallest_of_all_partitions(weights, num_stages):
    assert partition(weights, num_stages) == best_of_all_partitions(weights, num_stages)


@settings(max_examples=60, deadline=None)
@given(layer_weights(min_size=1, max_size=30), st.integers(1, 12))
def test_smallest_of_all_profiles(weights, num_stages):
    weights = [weight + 1 for weight in weights]
    assert profile(weights, partition(weights, num_stages)) == smallest_profile(weights, num_stages)


@settings(max_examples=30, deadline=None)
@given(layer_weights(min_size=20, max_size=100), st.integers(2, 20))
def test_smallest_maximum(weights, num_stages):
    assert max(profile(weights, partition(weights, num_stages))) == smallest_maximum(weights, num_stages)


@settings(max_examples=200, deadline=None)
@given(layer_weights(max_size=200), st.integers(1, 40))
def test_bounds(weights, num_stages):
    bounds = partition(weights, num_stages)
    assert len(bounds) == num_stages + 1
    assert (bounds[0], bounds[-1]) == (0, len(weights))
    assert bounds == sorted(bounds)
    assert partition(weights, num_stages) == bounds
    if any(weights):
        assert sum(weight > 0 for weight in stage_weights(weights, bounds)) == min(
            num_stages, sum(weight > 0 for weight in weights)
        )
        assert all(weights[bound - 1] > 0 for bound in bounds[1:-1] if bound > 0)


@settings(max_examples=100, deadline=None)
@given(layer_weights(max_size=60), st.integers(1, 10), st.fractions(Fraction(1, 1000), 1000))
def test_the_unit_of_the_weights_does_not_matter(weights, num_stages, unit):
    assert partition([unit * weight for weight in weights], num_stages) == partition(weights, num_stages)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.decimals(0, 10, places=2), max_size=40), st.integers(1, 8))
def test_floats_are_the_decimals_they_print_as(weights, num_stages):
    bounds = partition(weights, num_stages)
    assert partition([float(weight) for weight in weights], num_stages) == bounds
    assert partition(np.array([float(weight) for weight in weights]), num_stages) == bounds
    assert partition([Fraction(weight) for weight in weights], num_stages) == bounds


def test_sums_that_floats_round_are_equal():
    # As floats, 0.1 + 0.2 > 0.3: the first stage would look heavier than the second, and layer 1 would move.
    assert partition([0.3, 0.1, 0.2, 0.3], 3) == partition([3, 1, 2, 3], 3) == [0, 1, 3, 4]
    assert profile([1, 2, 3, 1, 2], partition([0.1, 0.2, 0.3, 0.1, 0.2], 3)) == [3, 3, 3]


def test_integers_of_numpy_do_not_overflow():
    weights = np.array([2**62, 2**62, 2**62, 1, 2**62], dtype=np.int64)
    assert partition(weights, 2) == partition([int(weight) for weight in weights], 2) == [0, 2, 5]


@settings(max_examples=100, deadline=None)
@given(layer_weights(min_size=1, max_size=40), st.integers(2, 10))
def test_beyond_the_limit_the_heaviest_stages_are_still_the_best(weights, num_stages):
    weights = [weight + 1 for weight in weights]
    exact = profile(weights, partition(weights, num_stages))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "_MAX_TIE_DIGITS", 0)
        bounds = partition(weights, num_stages)
    found = profile(weights, bounds)
    assert len(bounds) == num_stages + 1 and bounds == sorted(bounds)
    assert (found[0], found.count(found[0])) == (exact[0], exact.count(exact[0]))


def test_equally_good_places_beyond_the_limit(monkeypatch):
    # Either half can take the stage of weight 2 + 2, after which the rest is the same: nothing is lost.
    layers = [2, 2, 9, 2, 2]
    best = partition(layers, 4)
    monkeypatch.setattr(solver, "_MAX_TIE_DIGITS", 0)
    assert partition(layers, 4) == best == [0, 1, 2, 3, 5]


@pytest.mark.parametrize(
    "weight", [float("nan"), float("inf"), -float("inf"), Decimal("NaN"), np.float32("inf")]
)
def test_weight_that_is_not_finite(weight):
    with pytest.raises(ValueError, match=r"layer 1 has weight .*: expected a finite number"):
        partition([1, weight], 2)


@pytest.mark.parametrize("weight", [-1, -0.5, Fraction(-1, 3), np.int64(-2)])
def test_negative_weight(weight):
    with pytest.raises(ValueError, match=r"layer 2 has weight -.*: expected zero or more"):
        partition([1, 1, weight], 2)


@pytest.mark.parametrize("num_stages", [0, -1])
def test_no_stage(num_stages):
    with pytest.raises(ValueError, match=rf"{num_stages} stages: expected 1 or more"):
        partition([1, 2], num_stages)
