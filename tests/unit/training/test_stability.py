"""Tests spike detection with its window of previous steps, and skipped ranges of iterations, from
any start."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from megatron.arguments import parse_args
from megatron.checkpoint.record import TrainingState
from megatron.config import StabilityConfig
from megatron.config.sections.curriculum import LengthCurriculum
from megatron.optimizer.batch_schedule import BatchSchedule, RunLength
from megatron.training.stability import SpikeDetector, advance_state, range_to_skip
from tests.unit.config.command_lines import SMALL

START = TrainingState()


def detect(policy, steps, state=START):
    """Runs a detector with a window of 3 over (loss, grad norm) pairs. Returns (diagnoses, decisions to skip,
    last state)."""
    detector = SpikeDetector(
        StabilityConfig(
            spike_policy=policy, spike_window=3, spike_loss_factor=1.5, spike_grad_norm_factor=4.0
        )
    )
    diagnoses, skips = [], []
    for loss, norm in steps:
        detector.begin(state)
        skips.append(detector.should_skip(loss, norm))
        diagnoses.append(detector.diagnosis)
        state = detector.update_window(TrainingState(state.iteration + 1), taken=not skips[-1])
    return diagnoses, skips, state


STEPS = [(9.0, 90.0), (4.0, 1.0), (3.0, 1.0), (2.0, 1.0), (4.6, 1.0), (2.0, 4.5), (2.0, 1.0)]


def test_spikes_need_a_full_window_and_exceed_its_median():
    diagnoses, skips, state = detect("skip", STEPS)
    # At step 5 the window has the losses 4, 3 and 2. Steps 5 and 6 are skipped and not added to the window.
    assert skips == [False, False, False, False, True, True, False]
    assert diagnoses[4] == "loss 4.6 (median of 3 steps: 3)"
    assert diagnoses[5] == "grad norm 4.5 (median of 3 steps: 1)"
    assert state.recent_losses == (3.0, 2.0, 2.0) and state.recent_grad_norms == (1.0, 1.0, 1.0)


def test_warn_skips_no_step_and_adds_it_to_the_window():
    diagnoses, skips, state = detect("warn", STEPS)
    assert not any(skips)
    assert [bool(diagnosis) for diagnosis in diagnoses] == [False] * 4 + [True, True, False]
    assert state.recent_losses == (4.6, 2.0, 2.0)


def test_diagnosis_names_loss_and_grad_norm():
    diagnoses, _, _ = detect("skip", [(1.0, 1.0)] * 3 + [(2.0, 5.0)])
    assert diagnoses[-1] == "loss 2 (median of 3 steps: 1) and grad norm 5 (median of 3 steps: 1)"


@pytest.mark.parametrize("interrupted_after", range(len(STEPS)))
def test_resumed_detector_decides_as_an_uninterrupted_one(interrupted_after):
    expected = detect("skip", STEPS)
    first = detect("skip", STEPS[:interrupted_after])
    saved = TrainingState(**json.loads(json.dumps(asdict(first[2]))))
    assert saved == first[2]
    second = detect("skip", STEPS[interrupted_after:], saved)
    assert (first[0] + second[0], first[1] + second[1], second[2]) == expected


def test_step_that_was_not_examined_does_not_change_the_window():
    detector = SpikeDetector(StabilityConfig(spike_policy="skip", spike_window=3))
    before = TrainingState(5, recent_losses=(1.0, 2.0), recent_grad_norms=(1.0, 1.0))
    detector.begin(before)
    after = detector.update_window(TrainingState(6), taken=False)
    assert (after.iteration, after.recent_losses, detector.diagnosis) == (6, (1.0, 2.0), "")


FLAGS = [*SMALL, "--skip-train-iteration-range", "3-5", "1-1", "6-7", "19-40"]
CONFIG = dataclasses.replace(
    parse_args(FLAGS, {}),
    curriculum=LengthCurriculum("fixed_discrete", 8, 32, lengths=(8, 16, 32), last_steps=(2, 4)),
)
BATCHES = BatchSchedule(8, (2, 2, 20))
TOTAL = 20
RUN = SimpleNamespace(config=CONFIG, batches=BATCHES, length=RunLength(TOTAL, 8 * TOTAL))


def after_one_step(state):
    """Returns the state after one more step."""
    size = BATCHES.global_batch_size_at(state.consumed_samples)
    tokens = size * CONFIG.seq_length_at(state.iteration + 1)
    return TrainingState(
        state.iteration + 1,
        state.consumed_samples + size,
        state.consumed_tokens + tokens,
        state.skipped_iterations,
    )


def run_from(state):
    """Returns the iterations with a step, the skipped ranges, and all states."""
    taken, skipped, states = [], [], [state]
    while state.iteration < TOTAL:
        found = range_to_skip(RUN, state.iteration)
        if found is None:
            state = after_one_step(state)
            taken.append(state.iteration)
        else:
            state = advance_state(state, found[1], RUN)
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
