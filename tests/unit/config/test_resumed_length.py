"""Compares the end of a run whose batch, sequence length or curriculum changes at a resume with a loop over
its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.arguments import read_command_line
from megatron.config import Config
from megatron.config.sections.curriculum import LengthCurriculum
from megatron.optimizer.batch_schedule import BEGIN, BatchSchedule, Progress, RunLength
from megatron.optimizer.schedule import schedule_of

FIXED = ("--global-batch-size 4", "--global-batch-size 8")
RAMPED = (
    "--global-batch-size 12 --rampup-batch-size 2 5 60",
    "--global-batch-size 9 --rampup-batch-size 1 2 100",
)
SAMPLES = ("--train-samples 160", "--train-samples 163", "--train-samples 300 --train-tokens 5120")
ITERATIONS = ("--train-iters 17", "--train-iters 40 --train-tokens 3000")
CURRICULA = (
    None,
    LengthCurriculum("fixed_linear", 8, 32, total_steps=12, multiple=8),
    LengthCurriculum("fixed_discrete", 8, 32, lengths=(8, 16, 32), last_steps=(3, 9)),
)
MODEL = "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rotary --dry-run"


def run_of(flags: str, seq_length: int = 32) -> Config:
    words = f"{MODEL} --micro-batch-size 1 --lr 1e-3 --min-lr 1e-4 --seq-length {seq_length} {flags}"
    return read_command_line(words.split(), {}).config


PAIRS = [*product(SAMPLES, (*FIXED, *RAMPED)), *product(ITERATIONS, FIXED)]
RUNS = [run_of(f"{length} {batch}", seq_length) for length, batch in PAIRS for seq_length in (32, 64)]


def step(config: Config, at: Progress) -> Progress:
    size = BatchSchedule.from_config(config.batch).global_batch_size_at(at.consumed_samples)
    tokens = size * config.seq_length_at(at.iteration + 1)
    return Progress(at.iteration + 1, at.consumed_samples + size, at.consumed_tokens + tokens)


def walk(config: Config, start: Progress) -> Iterator[Progress]:
    """Yields the progress of each step up to the end that the flags name."""
    training, at = config.training, start
    while training.train_tokens is None or at.consumed_tokens < training.train_tokens:
        following = step(config, at)
        if training.train_iters is not None and following.iteration > training.train_iters:
            return
        if training.train_samples is not None and following.consumed_samples > training.train_samples:
            return
        at = following
        yield at


runs = st.builds(
    lambda config, curriculum: replace(config, curriculum=curriculum),
    st.sampled_from(RUNS),
    st.sampled_from(CURRICULA),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(runs, st.integers(0, 15)), max_size=3), runs)
def test_resumed_length_is_reached_by_a_walk(before: list[tuple[Config, int]], config: Config) -> None:
    start = BEGIN
    for other, steps in before:  # earlier launches, each with different flags
        for _ in range(steps):
            start = step(other, start)
    on_the_way = [start, *walk(config, start)]
    end, length = on_the_way[-1], RunLength.from_config(config, start)
    assert max(length.iterations, start.iteration) == end.iteration
    assert length.train_samples == end.consumed_samples
    # A launch that is interrupted and resumed ends where the uninterrupted launch would have ended.
    assert {RunLength.from_config(config, at) for at in on_the_way} == {length}
    tokens = BatchSchedule.from_config(config.batch).tokens_of_samples
    for at in on_the_way:
        count = tokens(end.consumed_samples, config.model.seq_length, config.curriculum, at)
        assert count == end.consumed_tokens


@settings(max_examples=50, deadline=None)
@given(runs)
def test_resumed_length_without_a_change_gives_the_learning_rates_of_one_launch(config: Config) -> None:
    whole = schedule_of(config)
    for at in walk(config, BEGIN):
        assert schedule_of(config, replace(at, warmup_end=whole.warmup_end)) == whole


def test_resumed_length_keeps_the_end_of_a_warmup_of_shorter_sequences() -> None:
    flags = f"{FIXED[0]} --train-samples 1000 --train-tokens 5120 --lr-warmup-samples 20"
    short, long = (run_of(flags, seq_length) for seq_length in (32, 64))
    first = schedule_of(short)
    assert (first.decay_unit, first.decay_start) == ("tokens", 20 * 32)
    begun = Progress(2, 8, 256)
    assert schedule_of(long, begun).decay_start == 256 + 12 * 64
    over = Progress(10, 40, 1280, warmup_end=first.warmup_end)
    then = schedule_of(long, over)
    assert then == first
    later = Progress(15, 60, 1280 + 20 * 64, warmup_end=then.warmup_end)
    assert schedule_of(long, later) == then and schedule_of(short, later) == then
    assert then.lr(Progress(25, 100, 5120)) == pytest.approx(1e-4)


def test_resumed_length_decides_whether_samples_or_tokens_end_the_decay() -> None:
    config = run_of(f"--train-samples 100 --train-tokens 5120 {FIXED[0]}", 64)
    assert schedule_of(config).decay_unit == "tokens"
    # 40 samples of 32 tokens and 60 of 64 use all tokens, so the samples end the run.
    assert schedule_of(config, Progress(10, 40, 1280)).decay_unit == "samples"
