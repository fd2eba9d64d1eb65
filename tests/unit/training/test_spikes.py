"""What is a spike, and what is remembered of steps."""

import json
from dataclasses import asdict

import pytest

from megatron.checkpoint.discovery import TrainingState
from megatron.config import StabilityConfig
from megatron.training.stability.spikes import SpikeDetector

START = TrainingState()


def watch_over(policy, steps, state=START):
    """Findings, refusals and the last state of (loss, grad norm) pairs with a window of 3."""
    watch = SpikeDetector(
        StabilityConfig(
            spike_policy=policy, spike_window=3, spike_loss_factor=1.5, spike_grad_norm_factor=4.0
        )
    )
    findings, refusals = [], []
    for loss, norm in steps:
        watch.begin(state)
        refusals.append(watch.should_skip(loss, norm))
        findings.append(watch.diagnosis)
        state = watch.update_window(TrainingState(state.iteration + 1), taken=not refusals[-1])
    return findings, refusals, state


STEPS = [(9.0, 90.0), (4.0, 1.0), (3.0, 1.0), (2.0, 1.0), (4.6, 1.0), (2.0, 4.5), (2.0, 1.0)]


def test_nothing_is_a_spike_before_the_window_is_full_and_medians_decide():
    findings, refusals, state = watch_over("skip", STEPS)
    # Medians at step 5: of 4, 3, 2. Steps 5 and 6 are dropped and not remembered.
    assert refusals == [False, False, False, False, True, True, False]
    assert findings[4] == "loss 4.6 (median of 3 steps: 3)"
    assert findings[5] == "grad norm 4.5 (median of 3 steps: 1)"
    assert state.recent_losses == (3.0, 2.0, 2.0) and state.recent_grad_norms == (1.0, 1.0, 1.0)


def test_a_warning_refuses_nothing_and_remembers_the_step():
    findings, refusals, state = watch_over("warn", STEPS)
    assert not any(refusals)
    assert [bool(finding) for finding in findings] == [False] * 4 + [True, True, False]
    assert state.recent_losses == (4.6, 2.0, 2.0)


def test_both_numbers_are_told():
    findings, _, _ = watch_over("skip", [(1.0, 1.0)] * 3 + [(2.0, 5.0)])
    assert findings[-1] == "loss 2 (median of 3 steps: 1) and grad norm 5 (median of 3 steps: 1)"


@pytest.mark.parametrize("interrupted_after", range(len(STEPS)))
def test_a_resumed_watch_finds_what_an_uninterrupted_one_does(interrupted_after):
    expected = watch_over("skip", STEPS)
    first = watch_over("skip", STEPS[:interrupted_after])
    saved = TrainingState(**json.loads(json.dumps(asdict(first[2]))))
    assert saved == first[2]
    second = watch_over("skip", STEPS[interrupted_after:], saved)
    assert (first[0] + second[0], first[1] + second[1], second[2]) == expected


def test_a_step_that_was_not_looked_at_leaves_the_window():
    watch = SpikeDetector(StabilityConfig(spike_policy="skip", spike_window=3))
    before = TrainingState(5, recent_losses=(1.0, 2.0), recent_grad_norms=(1.0, 1.0))
    watch.begin(before)
    after = watch.update_window(TrainingState(6), taken=False)
    assert (after.iteration, after.recent_losses, watch.diagnosis) == (6, (1.0, 2.0), "")
