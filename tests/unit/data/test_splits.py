"""Compares the flag --split with Megatron's arithmetic and with cases computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.registries import DATA_ORDERS
from megatron.data.flags import parse_split
from megatron.data.splits import split_documents
from megatron.errors import UserError

NATIVE = DATA_ORDERS["native"]


def megatron_bounds(weights: list[float], size: int) -> list[int]:
    total = sum(weights)
    bounds = [0, 0, 0, 0]
    for i in range(3):
        bounds[i + 1] = bounds[i] + int(round(weights[i] / total * float(size)))
    too_many = bounds[3] - size
    return [0] + [bound - too_many for bound in bounds[1:]]


@pytest.mark.parametrize("split", ["969, 30, 1", "969,30,1", "969/30/1", "0.969,0.03,0.001"])
def test_spellings_of_the_same_split(split: str) -> None:
    assert parse_split(split) == pytest.approx((0.969, 0.03, 0.001))


@pytest.mark.parametrize("split, expected", [("1", (1, 0, 0)), ("3,1", (0.75, 0.25, 0))])
def test_omitted_weights_are_zero(split: str, expected: tuple[float, ...]) -> None:
    assert parse_split(split) == expected


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "0,0,0", "-1,2", "nan,1", "inf", "1;2"])
def test_a_bad_split_is_refused_with_its_flag(split: str) -> None:
    with pytest.raises(UserError, match="--split"):
        parse_split(split)


@pytest.mark.parametrize(
    "split, size, expected",
    [
        ("949,50,1", 1000, (range(0, 949), range(949, 999), range(999, 1000))),
        ("969, 30, 1", 100, (range(0, 97), range(97, 100), None)),
        ("1", 5, (range(0, 5), None, None)),
        # Each share rounds to 0, so the first split gets the one document that remains.
        ("1,1,1", 1, (range(0, 1), None, None)),
        # Each share rounds to 1 of 2, so every bound loses one.
        ("1,1,1", 2, (None, range(0, 1), range(1, 2))),
        # 1.5 rounds to 2 twice: Megatron's first bound is -1, which names no document.
        ("0,1,1", 3, (None, range(0, 1), range(1, 3))),
    ],
)
def test_bounds_computed_by_hand(split: str, size: int, expected: tuple[range | None, ...]) -> None:
    assert split_documents(split, size, NATIVE) == expected


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any), st.integers(1, 5000))
def test_bounds_equal_megatrons(weights: list[int], size: int) -> None:
    bounds = megatron_bounds([float(weight) for weight in weights], size)
    for i, documents in enumerate(split_documents(",".join(map(str, weights)), size, NATIVE)):
        start, end = max(bounds[i], 0), bounds[i + 1]
        if weights[i] == 0 or end <= start:
            assert documents is None
        else:
            assert documents == range(start, end)
