"""Iterations that are counted without a step, wherever a run starts."""

import dataclasses

import pytest

from megatron.checkpoint.discovery import TrainingState
from megatron.config import BatchSchedule, parse_args
from megatron.config.parsing.curriculum import LengthCurriculum
from megatron.training.stability.skipped_ranges import advance_state, range_to_skip
from tests.unit.config.command_lines import SMALL

FLAGS = [*SMALL, "--skip-train-iteration-range", "3-5", "1-1", "6-7", "19-40"]
CONFIG = dataclasses.replace(
    parse_args(FLAGS, {}),
    curriculum=LengthCurriculum("fixed_discrete", 8, 32, lengths=(8, 16, 32), last_steps=(2, 4)),
)
BATCHES = BatchSchedule(8, (2, 2, 20))
TOTAL = 20


def counted(state):
    """The state after one more step that is taken."""
    size = BATCHES.global_batch_size_at(state.consumed_samples)
    tokens = size * CONFIG.seq_length_at(state.iteration + 1)
    return TrainingState(
        state.iteration + 1,
        state.consumed_samples + size,
        state.consumed_tokens + tokens,
        state.skipped_iterations,
    )


def run_from(state):
    """Iterations of steps that were taken, ranges that were passed over, and all states come by."""
    taken, skipped, states = [], [], [state]
    while state.iteration < TOTAL:
        found = range_to_skip(CONFIG, state.iteration, TOTAL)
        if found is None:
            state = counted(state)
            taken.append(state.iteration)
        else:
            state = advance_state(state, found[1], CONFIG, BATCHES)
            skipped.append(found)
        states.append(state)
    return taken, skipped, states


def test_every_range_is_passed_over_once_and_everything_else_is_counted_on():
    taken, skipped, states = run_from(TrainingState())
    assert taken == [2, *range(8, 19)]
    assert skipped == [(1, 1), (3, 5), (6, 7), (19, 20)]
    assert states[-1].skipped_iterations == 1 + 3 + 2 + 2
    trained = TrainingState()
    while trained.iteration < TOTAL:
        trained = counted(trained)
    assert dataclasses.replace(states[-1], skipped_iterations=0) == trained


@pytest.mark.parametrize("start", range(TOTAL))
def test_a_start_anywhere_skips_the_rest_of_the_ranges(start):
    state = TrainingState()
    for _ in range(start):
        state = counted(state)
    taken, _, states = run_from(state)
    assert taken == [step for step in (2, *range(8, 19)) if step > start]
    assert states[-1].consumed_tokens == run_from(TrainingState())[2][-1].consumed_tokens
