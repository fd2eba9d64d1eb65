"""The learning rate against hand-computed values, published logs and its own continuity."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import ConfigError, ScheduleConfig, TrainingConfig
from megatron.optimizer.schedule import LearningRateSchedule, Progress

SEQ = 2048


def by_iterations(train_iters=110, **schedule):
    return LearningRateSchedule.from_config(
        ScheduleConfig(**{"lr": 1e-3, **schedule}), TrainingConfig(train_iters=train_iters), SEQ
    )


def by_samples(train_samples=1000, train_tokens=None, **schedule):
    return LearningRateSchedule.from_config(
        ScheduleConfig(**{"lr": 1e-3, **schedule}),
        TrainingConfig(train_samples=train_samples, train_tokens=train_tokens),
        SEQ,
    )


def at(iteration, batch=4):
    return Progress(iteration, iteration * batch, iteration * batch * SEQ)


def samples(count):
    return Progress(0, count, count * SEQ)


# (consumed samples, rate as logged) of BLOOM-176B's run.
@pytest.mark.parametrize(("consumed", "logged"), [(9_841_584, "5.969E-05"), (177_927_088, "7.610E-06")])
def test_rate_equals_the_one_in_published_logs(consumed, logged):
    schedule = by_samples(
        train_samples=220_000_000,
        lr=6e-5,
        min_lr=6e-6,
        lr_decay_style="cosine",
        lr_warmup_samples=183_105,
        lr_decay_samples=200_000_000,
    )
    assert schedule.lr(samples(consumed)) == pytest.approx(float(logged), rel=2e-4)


def test_first_step_of_a_warm_up_moves_and_its_last_has_the_full_rate():
    schedule = by_iterations(lr_warmup_iters=10)
    assert schedule.lr(at(1)) == pytest.approx(1e-4)
    assert schedule.lr(at(5)) == pytest.approx(5e-4)
    assert schedule.lr(at(10)) == pytest.approx(1e-3)


def test_linear_decay_passes_its_middle_and_stays_at_the_minimum():
    schedule = by_iterations(min_lr=1e-4, lr_warmup_iters=10, lr_decay_style="linear")
    assert schedule.lr(at(60)) == pytest.approx(5.5e-4)
    assert schedule.lr(at(110)) == 1e-4
    assert schedule.lr(at(5000)) == 1e-4


def test_cosine_decay_at_a_quarter():
    schedule = by_iterations(min_lr=1e-4, lr_warmup_iters=10, lr_decay_style="cosine")
    assert schedule.lr(at(35)) == pytest.approx(1e-4 + 9e-4 * (1 + math.sqrt(0.5)) / 2)


def test_constant_rate_has_a_warm_up_and_no_end():
    schedule = by_iterations(min_lr=1e-5, lr_warmup_iters=10, lr_decay_style="constant")
    assert [schedule.lr(at(n)) for n in (5, 10, 110, 10_000)] == [5e-4, 1e-3, 1e-3, 1e-3]


def test_without_a_warm_up_the_decay_starts_at_once():
    assert by_iterations(train_iters=100).lr(at(1)) == pytest.approx(1e-3 * 0.99)


def test_decay_length_given_in_iterations_wins_over_the_length_of_training():
    schedule = by_iterations(train_iters=1000, lr_decay_iters=50)
    assert schedule.lr(at(25)) == pytest.approx(5e-4)
    assert schedule.lr(at(51)) == 0


def test_warm_up_fraction_is_of_the_decay():
    schedule = by_iterations(train_iters=1000, lr_decay_iters=200, lr_warmup_fraction=0.1)
    assert (schedule.warmup, schedule.warmup_unit) == (20, "iterations")
    schedule = by_samples(train_samples=1000, lr_warmup_fraction=0.1)
    assert (schedule.warmup, schedule.warmup_unit) == (100, "samples")


def test_decay_by_tokens_starts_where_the_warm_up_in_samples_ends():
    schedule = by_samples(lr_warmup_samples=100, lr_decay_tokens=300 * SEQ, lr_decay_style="linear")
    assert schedule.lr(samples(50)) == pytest.approx(5e-4)
    assert schedule.lr(samples(100)) == pytest.approx(1e-3)
    assert schedule.lr(samples(200)) == pytest.approx(5e-4)
    assert schedule.lr(samples(300)) == 0


def test_decay_by_tokens_follows_tokens_and_not_samples():
    schedule = by_samples(lr_decay_tokens=1000, lr_decay_style="linear")
    assert schedule.lr(Progress(1, 999_999, 250)) == pytest.approx(7.5e-4)


def test_training_that_tokens_end_first_decays_over_them():
    assert by_samples(train_samples=1000, train_tokens=500 * SEQ).decay_unit == "tokens"
    assert by_samples(train_samples=1000, train_tokens=2000 * SEQ).decay_unit == "samples"


def test_describe_names_warm_up_style_and_end():
    line = by_iterations(
        train_iters=2000, min_lr=1e-4, lr_warmup_iters=100, lr_decay_style="cosine"
    ).describe()
    expected = "warm-up over 100 iterations, then cosine from 1.000E-03 to 1.000E-04 at 2,000 iterations"
    assert line == f"learning rate: {expected}"


@settings(max_examples=200, deadline=None)
@given(
    style=st.sampled_from(["linear", "cosine", "constant"]),
    warmup=st.integers(0, 300),
    decay=st.integers(1, 500),
    min_share=st.floats(0, 1),
    step=st.integers(0, 900),
)
def test_rate_has_no_jump_and_stays_in_range(style, warmup, decay, min_share, step):
    schedule = by_iterations(
        train_iters=warmup + decay, min_lr=1e-3 * min_share, lr_warmup_iters=warmup, lr_decay_style=style
    )
    first, second = schedule.lr(at(step)), schedule.lr(at(step + 1))
    steepest = max(1 / warmup if warmup else 0, (1 - min_share) * math.pi / 2 / decay)
    assert abs(second - first) <= 1e-3 * steepest * (1 + 1e-9) + 1e-15
    assert 0 <= first <= 1e-3
    if step >= warmup:
        assert second <= first
        assert first >= schedule.min_lr * (1 - 1e-12)


@pytest.mark.parametrize(
    ("make", "flags", "advice"),
    [
        (by_iterations, {"lr_warmup_iters": 110}, "--lr-warmup-iters or raise --lr-decay-iters"),
        (by_samples, {"lr_warmup_samples": 1000}, "--lr-warmup-samples or raise --lr-decay-samples"),
        (by_samples, {"lr_warmup_samples": 10, "lr_decay_tokens": 9 * SEQ}, "raise --lr-decay-tokens"),
    ],
)
def test_a_warm_up_that_outlasts_the_decay_is_refused(make, flags, advice):
    with pytest.raises(ConfigError, match=advice):
        make(**flags)


def test_a_constant_rate_may_warm_up_for_longer_than_the_run():
    assert by_iterations(lr_warmup_iters=220, lr_decay_style="constant").lr(at(110)) == pytest.approx(5e-4)


@pytest.mark.parametrize("style", ["exponential", "Cosine", "", None])
def test_an_unknown_decay_style_is_an_error_from_code_too(style):
    with pytest.raises(ConfigError, match="--lr-decay-style .* expected one of .*cosine"):
        replace(by_iterations(), style=style)


def test_an_unknown_unit_is_an_error():
    with pytest.raises(KeyError, match="epochs"):
        at(1).count("epochs")
