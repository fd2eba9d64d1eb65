"""Spike detection, and its window of previous steps."""

import json
from dataclasses import asdict

import pytest

from megatron.checkpoint.record import TrainingState
from megatron.config import StabilityConfig
from megatron.training.stability import SpikeDetector

START = TrainingState()


def detect(policy, steps, state=START):
    """Runs a detector with a window of 3 over (loss, grad norm) pairs; returns diagnoses, decisions to skip
    and the last state."""
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
    # Medians at step 5: of 4, 3, 2. Steps 5 and 6 are skipped and not added to the window.
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
