"""Compares batch arithmetic with a loop over all steps of the run."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import ConfigError, TrainingConfig
from megatron.optimizer.batch_schedule import BatchSchedule

BLOOM = BatchSchedule(2048, (192, 16, 9_765_625))


@st.composite
def schedules(draw: st.DrawFn) -> BatchSchedule:
    start = draw(st.integers(1, 20))
    increment = draw(st.integers(1, 10))
    increments = draw(st.integers(0, 8))
    if increments == 0:
        return BatchSchedule(start)
    return BatchSchedule(start + increment * increments, (start, increment, draw(st.integers(1, 500))))


def walked_size(schedule: BatchSchedule, consumed: int) -> int:
    """Returns the batch size by Megatron's rule, in exact fractions."""
    if schedule.rampup is None:
        return schedule.global_batch_size
    start, increment, samples = schedule.rampup
    if consumed > samples:
        return schedule.global_batch_size
    per_increment = Fraction(samples, (schedule.global_batch_size - start) // increment)
    return start + int(Fraction(consumed) / per_increment) * increment


def walk(schedule: BatchSchedule, steps: int, consumed: int = 0) -> list[int]:
    """Returns the consumed samples after 0, 1, ... steps."""
    totals = [consumed]
    for _ in range(steps):
        totals.append(totals[-1] + walked_size(schedule, totals[-1]))
    return totals


@given(schedules(), st.integers(0, 1000))
def test_size_at_any_point_is_that_of_megatrons_rule(schedule: BatchSchedule, consumed: int) -> None:
    assert schedule.global_batch_size_at(consumed) == walked_size(schedule, consumed)
    assert schedule.global_batch_size_at(consumed) in schedule.sizes()


@given(schedules())
def test_each_size_begins_at_the_first_sample_at_which_a_step_has_it(schedule: BatchSchedule) -> None:
    for size in schedule.sizes():
        first = schedule.consumed_at_size(size)
        assert walked_size(schedule, first) >= size
        assert first == 0 or walked_size(schedule, first - 1) < size


@settings(max_examples=200)
@given(schedules(), st.integers(0, 60), st.integers(0, 300))
def test_consumed_samples_are_those_of_a_walk(schedule: BatchSchedule, steps: int, consumed: int) -> None:
    assert schedule.consumed_after(steps, consumed) == walk(schedule, steps, consumed)[-1]


@settings(max_examples=200)
@given(schedules(), st.integers(0, 300), st.integers(0, 700))
def test_iterations_are_those_of_a_walk(schedule: BatchSchedule, consumed: int, more: int) -> None:
    target = consumed + more
    totals = walk(schedule, more + 1, consumed)
    assert schedule.iterations_until(target, consumed) == next(i for i, t in enumerate(totals) if t >= target)
    assert schedule.iterations_within(target, consumed) == max(i for i, t in enumerate(totals) if t <= target)


def test_a_published_ramp_up_starts_small_and_ends_at_the_global_batch() -> None:
    assert list(BLOOM.sizes()[:3]) == [192, 208, 224]
    assert list(BLOOM.sizes(9_765_624)) == [2032, 2048] and list(BLOOM.sizes(9_765_625)) == [2048]
    assert BLOOM.num_increments == 116
    assert BLOOM.global_batch_size_at(0) == 192
    assert BLOOM.global_batch_size_at(9_765_624) == 2032
    assert BLOOM.global_batch_size_at(9_765_625) == 2048


def test_the_length_of_a_published_run_is_known_at_once() -> None:
    """As in Megatron, the expected length is a loop over the steps of the ramp-up, then full batches."""
    consumed = iterations = 0
    while consumed <= 9_765_625:
        consumed += walked_size(BLOOM, consumed)
        iterations += 1
    expected = iterations + (220_000_000 - consumed) // 2048
    assert BLOOM.total_iterations(TrainingConfig(train_samples=220_000_000), seq_length=2048) == expected


def test_tokens_end_a_run_where_that_comes_earlier() -> None:
    schedule = BatchSchedule(8)
    assert schedule.total_iterations(TrainingConfig(train_samples=83), seq_length=10) == 10
    assert schedule.total_iterations(TrainingConfig(train_samples=83, train_tokens=401), seq_length=10) == 6
    assert schedule.total_iterations(TrainingConfig(train_iters=3, train_tokens=10_000), seq_length=10) == 3


def test_a_run_without_a_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="--train-samples or --train-iters"):
        BatchSchedule(8).total_iterations(TrainingConfig(), seq_length=10)
