"""Tests which losses of a sweep must be equal, and which runs are named if they are not."""

from __future__ import annotations

import math

import pytest

from megatron.planner.sweep.summary import check_losses, group_numbers
from tests.unit.planner.sweep.made import make_result, make_row

A, B, C = make_row(0, "memory"), make_row(1, "time"), make_row(2, "uniform")
LOSSES = [5.0, 4.0, 3.0]


def results(*entries: tuple) -> dict:
    return {(row.index, repeat): make_result(row, repeat, 1.0, losses) for row, repeat, losses in entries}


def test_equal_losses_agree_up_to_the_end_of_the_shorter_run() -> None:
    close = [loss * (1 + 3e-6) for loss in LOSSES]
    (found,) = check_losses([A, B], results((A, 1, LOSSES), (A, 2, LOSSES[:1]), (B, 1, close)))
    assert found["agrees"] and found["rows"] == [0, 1] and found["runs"] == 3
    assert math.isclose(found["largest_difference"], 3e-6, rel_tol=1e-3)
    assert " agree: " in found["sentence"]


def test_the_run_that_differs_is_named_with_its_first_step() -> None:
    (found,) = check_losses([A, B, C], results((A, 1, LOSSES), (B, 1, [5.0, 4.001, 3.1]), (C, 1, LOSSES)))
    (sentence,) = found["disagreeing"]
    assert sentence.startswith("row 1, repeat 1 has loss 4.001 at step 2, row 0, repeat 1 has 4")
    assert "DISAGREE" in found["sentence"] and not found["agrees"]


@pytest.mark.parametrize("second", [(A, 2), (B, 1)], ids=["repeats", "rows"])
@pytest.mark.parametrize(("loss", "difference"), [(5.1, 0.0196), (math.nan, math.inf), (math.inf, math.inf)])
def test_of_two_runs_one_is_named_beside_the_other(second: tuple, loss: float, difference: float) -> None:
    (found,) = check_losses([A, B], results((A, 1, [5.0]), (*second, [loss])))
    assert len(found["disagreeing"]) == 1 and not found["agrees"]
    assert found["largest_difference"] == pytest.approx(difference, rel=0.01)


def test_rows_with_other_numbers_form_another_group() -> None:
    other = make_row(1, "time", numbers="other", tolerance=1e-2)
    found = check_losses([A, other, C], results((A, 1, LOSSES), (other, 1, [9.0]), (C, 1, LOSSES)))
    assert [group["rows"] for group in found] == [[0, 2], [1]]
    assert all(group["agrees"] for group in found)
    assert group_numbers([A, other, C]) == {0: 1, 1: 2, 2: 1}
