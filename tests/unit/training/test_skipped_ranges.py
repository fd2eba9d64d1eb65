"""Skipped iteration ranges, from any start."""

import dataclasses

import pytest

from megatron.checkpoint.record import TrainingState
from megatron.config import BatchSchedule, parse_args
from megatron.config.curriculum import LengthCurriculum
from megatron.training.stability import advance_state, range_to_skip
from tests.unit.config.command_lines import SMALL

FLAGS = [*SMALL, "--skip-train-iteration-range", "3-5", "1-1", "6-7", "19-40"]
CONFIG = dataclasses.replace(
    parse_args(FLAGS, {}),
    curriculum=LengthCurriculum("fixed_discrete", 8, 32, lengths=(8, 16, 32), last_steps=(2, 4)),
)
BATCHES = BatchSchedule(8, (2, 2, 20))
TOTAL = 20


def after_one_step(state):
    """The state after one more step."""
    size = BATCHES.global_batch_size_at(state.consumed_samples)
    tokens = size * CONFIG.seq_length_at(state.iteration + 1)
    return TrainingState(
        state.iteration + 1,
        state.consumed_samples + size,
        state.consumed_tokens + tokens,
        state.skipped_iterations,
    )


def run_from(state):
    """Iterations with a step, skipped ranges, and all states."""
    taken, skipped, states = [], [], [state]
    while state.iteration < TOTAL:
        found = range_to_skip(CONFIG, state.iteration, TOTAL)
        if found is None:
            state = after_one_step(state)
            taken.append(state.iteration)
        else:
            state = advance_state(state, found[1], CONFIG, BATCHES)
            skipped.append(found)
        states.append(state)
    return taken, skipped, states


def test_each_range_is_skipped_once_and_the_state_advances():
    taken, skipped, states = run_from(TrainingState())
    assert taken == [2, *range(8, 19)]
    assert skipped == [(1, 1), (3, 5), (6, 7), (19, 20)]
    assert states[-1].skipped_iterations == 1 + 3 + 2 + 2
    trained = TrainingState()
    while trained.iteration < TOTAL:
        trained = after_one_step(trained)
    assert dataclasses.replace(states[-1], skipped_iterations=0) == trained


@pytest.mark.parametrize("start", range(TOTAL))
def test_start_inside_a_range_skips_its_rest(start):
    state = TrainingState()
    for _ in range(start):
        state = after_one_step(state)
    taken, _, states = run_from(state)
    assert taken == [step for step in (2, *range(8, 19)) if step > start]
    assert states[-1].consumed_tokens == run_from(TrainingState())[2][-1].consumed_tokens
