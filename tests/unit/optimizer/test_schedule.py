"""Compares the learning rate with values computed by hand, with published logs, and just before and after
each change of phase."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.arguments import parse_args
from megatron.config import ConfigError, ScheduleConfig, TrainingConfig
from megatron.optimizer.batch_schedule import BatchSchedule
from megatron.optimizer.schedule import LearningRateSchedule, Progress, schedule_of

SEQ = 2048
MODEL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --max-position-embeddings 2048 "
    f"--seq-length {SEQ} --vocab-size 64 --dry-run"
).split()
BATCH = ["--micro-batch-size=1", "--global-batch-size=1"]


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


# (Consumed samples, rate as logged) in BLOOM-176B's run.
@pytest.mark.parametrize(("consumed", "logged"), [(9_841_584, "5.969E-05"), (177_927_088, "7.610E-06")])
def test_the_lr_equals_the_published_logs(consumed, logged):
    schedule = by_samples(
        train_samples=220_000_000,
        lr=6e-5,
        min_lr=6e-6,
        lr_decay_style="cosine",
        lr_warmup_samples=183_105,
        lr_decay_samples=200_000_000,
    )
    assert schedule.lr(samples(consumed)) == pytest.approx(float(logged), rel=2e-4)


@pytest.mark.parametrize(
    ("flags", "rates"),
    [
        pytest.param({"lr_warmup_iters": 10}, {1: 1e-4, 5: 5e-4, 10: 1e-3}, id="the first step moves"),
        pytest.param(
            {"min_lr": 1e-4, "lr_warmup_iters": 10, "lr_decay_style": "linear"},
            {60: 5.5e-4, 110: 1e-4, 5000: 1e-4},
            id="linear: its middle, and the minimum",
        ),
        pytest.param(
            {"min_lr": 1e-4, "lr_warmup_iters": 10, "lr_decay_style": "cosine"},
            {35: 1e-4 + 9e-4 * (1 + math.sqrt(0.5)) / 2},
            id="cosine at a quarter",
        ),
        pytest.param(
            {"min_lr": 1e-5, "lr_warmup_iters": 10, "lr_decay_style": "constant"},
            {5: 5e-4, 10: 1e-3, 110: 1e-3, 10_000: 1e-3},
            id="constant has no end",
        ),
        pytest.param(
            {"lr_warmup_iters": 220, "lr_decay_style": "constant"},
            {110: 5e-4},
            id="constant may warm up for longer than the run",
        ),
        pytest.param({"train_iters": 100}, {1: 1e-3 * 0.99}, id="without a warm-up"),
        pytest.param(
            {"train_iters": 1000, "lr_decay_iters": 50}, {25: 5e-4, 51: 0}, id="a decay of its own length"
        ),
    ],
)
def test_rates_computed_by_hand(flags, rates):
    schedule = by_iterations(**flags)
    assert {n: schedule.lr(at(n)) for n in rates} == pytest.approx(rates, rel=1e-12, abs=0)


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


# --- WSD and inverse square root, by Megatron-LM's formulas ---

WSD_SHAPES = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "exponential": lambda done: 2 * 0.5**done - 1,
    "minus_sqrt": lambda done: 1 - math.sqrt(done),
}
# (Progress, completed part of the decay): warm-up of 10, stable up to 80, decay up to 120.
WSD_STABLE = (10, 11, 50, 79, 80)
WSD_DECAY = {81: 1 / 40, 90: 0.25, 100: 0.5, 119: 39 / 40, 120: 1.0, 121: 1.0, 5000: 1.0}


def wsd(kind, style):
    flags = {"min_lr": 1e-4, "lr_decay_style": "WSD", "lr_wsd_decay_style": style}
    if kind == "iterations":
        schedule = by_iterations(120, **flags, lr_warmup_iters=10, lr_wsd_decay_iters=40)
        return schedule, lambda n: Progress(n, 7 * n, 7 * n * SEQ)
    schedule = by_samples(9999, **flags, lr_warmup_samples=10, lr_decay_samples=120, lr_wsd_decay_samples=40)
    return schedule, lambda n: Progress(n // 3, n, n * SEQ)


@pytest.mark.parametrize("kind", ["iterations", "samples"])
@pytest.mark.parametrize("style", WSD_SHAPES)
def test_wsd_warms_up_stays_and_decays_in_its_shape(style, kind):
    schedule, progress = wsd(kind, style)
    assert [schedule.lr(progress(n)) for n in (1, 5)] == pytest.approx([1e-4, 5e-4])
    assert {schedule.lr(progress(n)) for n in WSD_STABLE} == {1e-3}  # to the last bit
    for n, done in WSD_DECAY.items():
        expected = 1e-4 + 9e-4 * WSD_SHAPES[style](done)
        assert schedule.lr(progress(n)) == pytest.approx(expected, rel=1e-12)


def test_wsd_follows_samples_through_a_batch_size_ramp_up():
    """The steps have 2, 4, 6 and then 8 samples. The decay of 20 samples begins in the middle of a step."""
    config = parse_args(
        [*MODEL, "--micro-batch-size=2", "--global-batch-size=8", "--rampup-batch-size", "2", "2", "24"]
        + "--train-samples 80 --lr 1e-3 --lr-decay-style WSD --lr-wsd-decay-samples 30".split()
        + "--lr-wsd-decay-style linear --lr-warmup-samples 8".split(),
        {},
    )
    schedule, batches = schedule_of(config), BatchSchedule.from_config(config.batch)
    steps = batches.total_iterations(config.training, SEQ)
    consumed = [batches.consumed_after(step) for step in range(1, steps + 1)]
    rates = [schedule.lr(Progress(step, n, n * SEQ)) for step, n in enumerate(consumed, 1)]
    expected = [1e-3 * min(n / 8, 1, (80 - n) / 30) for n in consumed]
    assert rates == pytest.approx(expected, rel=1e-12) and rates[:2] == [2.5e-4, 5e-4]
    assert {48 < n < 56 for n in consumed} == {True, False}


def test_a_wsd_decay_of_0_stays_at_the_maximum_up_to_its_end():
    """Such a schedule fits a base run, whose checkpoints are the starts of runs that decay."""
    schedule = by_iterations(100, lr_decay_style="WSD", lr_wsd_decay_iters=0, lr_warmup_iters=10)
    assert [schedule.lr(at(n)) for n in (5, 10, 99, 100, 101)] == [5e-4, 1e-3, 1e-3, 1e-3, 0]


@pytest.mark.parametrize("make", [by_iterations, by_samples])
def test_inverse_square_root(make):
    unit = "iters" if make is by_iterations else "samples"
    schedule = make(1000, lr_decay_style="inverse-square-root", min_lr=2e-4, **{f"lr_warmup_{unit}": 10})
    progress = at if unit == "iters" else samples
    rates = [schedule.lr(progress(n)) for n in (5, 10, 40, 90, 160, 251, 1000, 1001)]
    expected = [1e-3 / 2, 1e-3, 1e-3 / 2, 1e-3 / 3, 1e-3 / 4, 2e-4, 2e-4, 2e-4]
    assert rates == pytest.approx(expected, rel=1e-12)
    assert make(1000, lr_decay_style="inverse-square-root", **{f"lr_warmup_{unit}": 10}).lr(
        progress(1000)
    ) == pytest.approx(1e-4)


def test_inverse_square_root_of_tokens_continues_a_warm_up_of_samples():
    schedule = by_samples(
        lr_decay_style="inverse-square-root", lr_warmup_samples=10, lr_decay_tokens=1000 * SEQ
    )
    assert [schedule.lr(samples(n)) for n in (10, 40, 1000, 1001)] == pytest.approx([1e-3, 5e-4, 1e-4, 0])


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--train-iters 9 --lr-decay-style WSD", "without --lr-wsd-decay-iters: set it"),
        ("--train-samples 90 --lr-decay-style WSD", "without --lr-wsd-decay-samples: set it"),
        ("--train-iters 9 --lr-decay-style WSD --lr-wsd-decay-samples 4", "iterations or samples"),
        (
            "--train-iters 9 --lr-decay-style WSD --lr-wsd-decay-iters 6 --lr-warmup-iters 4",
            "--lr-wsd-decay-iters 6: .*9 iterations .*warm-up .4 iterations.: shorten",
        ),
        (
            "--train-samples 90 --lr-decay-tokens 999 --lr-decay-style WSD --lr-wsd-decay-samples 4",
            "ends by tokens .*set --lr-decay-iters or --lr-decay-samples",
        ),
        (
            "--train-samples 90 --train-tokens 900 --lr-decay-style WSD --lr-wsd-decay-samples 4",
            "ends by tokens .*set --lr-decay-iters or --lr-decay-samples",
        ),
        ("--train-iters 9 --lr-decay-style inverse-square-root", "without a warm-up: .*--lr-warmup-iters"),
        (
            "--train-iters 9 --lr-decay-style WSD --lr-wsd-decay-iters 1 --lr-wsd-decay-style no",
            "expected one of .*minus_sqrt",
        ),
    ],
)
def test_a_decay_that_cannot_be_is_one_sentence(words, advice):
    with pytest.raises(ConfigError, match=advice) as caught:
        schedule_of(parse_args([*MODEL, *BATCH, "--lr", "1e-3", *words.split()], {}))
    assert "\n" not in str(caught.value)


def test_describe_names_the_phases_of_wsd():
    line = wsd("iterations", "minus_sqrt")[0].describe()
    expected = "constant at 1.000E-03 up to 80 iterations, then minus_sqrt to 1.000E-04 at 120 iterations"
    assert line == f"learning rate: warm-up over 10 iterations, then {expected} (WSD)"


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


@pytest.mark.parametrize("style", ["exponential", "Cosine", "", None])
def test_an_unknown_decay_style_is_an_error_from_code_too(style):
    with pytest.raises(ConfigError, match="--lr-decay-style .* expected one of .*cosine"):
        replace(by_iterations(), style=style)


def test_an_unknown_unit_is_an_error():
    with pytest.raises(KeyError, match="epochs"):
        at(1).count("epochs")
