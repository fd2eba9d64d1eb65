"""Tests the order of samples in a blend of data sets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.data import blended_dataset
from megatron.data.blended_dataset import MAX_WEIGHT_SUM, BlendOrder, integer_weights

WEIGHTS = [(1,), (3, 7), (1, 1, 1), (5, 3, 2), (9, *[1] * 9), (999_999, 1), (123_457, 98_765, 4_321, 17)]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes chunks 16 units long, so that short orders cross the bounds of chunks."""
    caches = (blended_dataset._sorted_chunk, blended_dataset._first_sample)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(blended_dataset, "CHUNK", 16)
    yield
    for cache in caches:
        cache.cache_clear()


def sorted_by_time(weights: tuple[int, ...], length: int) -> list[tuple[int, int]]:
    """Returns (component, number) of all samples by the definition: sorted by their exact times."""
    total = sum(weights)
    due = [
        (Fraction((2 * k + 1) * total, 2 * weight), component, k)
        for component, weight in enumerate(weights)
        for k in range(length * weight // total + len(weights) + 1)
    ]
    return [(component, k) for _, component, k in sorted(due)[:length]]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("weights", WEIGHTS)
def test_samples_are_ordered_by_their_times(weights: tuple[int, ...]) -> None:
    order = BlendOrder(weights)
    assert [order.find(i) for i in range(200)] == sorted_by_time(weights, 200)


@pytest.mark.usefixtures("small_chunks")
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_every_prefix_has_the_share_of_each_weight(numbers: list[int]) -> None:
    weights, total = tuple(numbers), sum(numbers)
    order = BlendOrder(weights)
    counts = [0] * len(weights)
    for n in range(100):
        assert order.samples_of_components(n) == counts
        for weight, count in zip(weights, counts, strict=True):
            within = (1 + max(len(weights) - 2, 0) * Fraction(weight, total)) / 2
            assert abs(count - Fraction(n * weight, total)) <= within
        component, number = order.find(n)
        assert number == counts[component]  # each component is read in its own order, without a gap
        counts[component] += 1


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_distant_sample_is_found_without_computing_the_earlier_ones(weights: tuple[int, ...]) -> None:
    order = BlendOrder(weights)
    for sample in (2**16 - 1, 2**16, 10**9 + 7, 10**12):
        before, after = order.samples_of_components(sample), order.samples_of_components(sample + 1)
        component, number = order.find(sample)
        assert sum(before) == sample and number == before[component]
        assert after == [count + (index == component) for index, count in enumerate(before)]


def test_weights_become_integers_in_the_same_ratio() -> None:
    def weights_of(*weights: str) -> tuple[int, ...]:
        return integer_weights([Fraction(weight) for weight in weights])

    assert weights_of("0.3", "0.7") == (3, 7)
    assert weights_of("30", "7e1") == (3, 7)
    assert weights_of("1") == weights_of("0.25") == (1,)
    assert weights_of("0.1", "0.2", "0.15") == (2, 4, 3)
    assert weights_of("1e-9", "1") == (1, 10**9)


def test_weights_of_many_digits_are_rounded_but_never_to_zero() -> None:
    given = [Fraction(f"{1 / (k + 1.5):.17f}") for k in range(50)] + [Fraction("1e-15")]
    weights = integer_weights(given)
    assert min(weights) == weights[-1] == 1
    assert sum(weights) <= MAX_WEIGHT_SUM and math.gcd(*weights) == 1
    for exact, weight in zip(given, weights, strict=True):
        share = Fraction(weight, sum(weights)) - exact / sum(given)
        assert abs(share) < Fraction(30, MAX_WEIGHT_SUM)
