"""What of the buckets' communication the passes hide, in cases that one can add up by hand."""

import pytest

from megatron.planner.timing.overlap import reduction_after_backward, wait_for_units, wait_for_weights

FOUR = [(100, 1.0)] * 4


def test_slow_passes_hide_all_but_the_last_bucket():
    assert reduction_after_backward(100.0, FOUR, 0.0) == pytest.approx(1.0)
    assert wait_for_weights(100.0, FOUR, 0.0, 0.0) == pytest.approx(1.0)


def test_fast_passes_hide_almost_nothing():
    # The first bucket is ready after 0.1 s, and then one after the other takes a second.
    assert reduction_after_backward(0.4, FOUR, 0.5) == pytest.approx(0.1 + 4 - 0.4 + 0.5)
    # The last layers run when the last bucket has arrived.
    assert wait_for_weights(0.4, FOUR, 0.5, 0.0) == pytest.approx(0.5 + 4 + 0.1 - 0.4)


def test_without_overlap_all_of_it_is_waited_for():
    assert reduction_after_backward(0.0, FOUR, 0.5) == pytest.approx(4.5)
    assert wait_for_weights(0.0, FOUR, 0.5, 0.0) == pytest.approx(4.5)
    assert reduction_after_backward(9.0, [], 0.5) == wait_for_weights(9.0, [], 0.5, 0.0) == 0.5


def test_a_stage_that_starts_later_waits_less():
    assert wait_for_weights(0.4, FOUR, 0.5, 100.0) == pytest.approx(0.0, abs=1e-9)
    assert wait_for_weights(0.0, [], 0.5, 0.3) == pytest.approx(0.2)


def test_a_pass_waits_for_the_first_layer_and_for_what_computation_does_not_hide():
    assert wait_for_units(compute=8.0, communication=4.0, units=4) == 1.0
    assert wait_for_units(compute=4.0, communication=8.0, units=4) == 2.0 + 3 * 1.0
    assert wait_for_units(compute=4.0, communication=8.0, units=1) == 8.0, "nothing to overlap with"
    assert wait_for_units(compute=4.0, communication=0.0, units=0) == 0.0
