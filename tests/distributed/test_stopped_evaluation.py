"""If an evaluation of several data sets is stopped in the middle, only the remaining data sets are evaluated
after the resume."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from megatron.checkpoint.record import TrainingState
from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.signals import ExitReason
from megatron.data.vocabulary import Vocabulary
from megatron.run import Run
from megatron.training.stability import advance_state
from tests.support.layouts import EOD, VOCAB, Row, config_of
from tests.support.pool import run_world
from tests.support.trainers import make_trainer

NAMES = ("a", "b", "c")


def train(state: TrainingState, stop_at: int | None) -> tuple[list[str], TrainingState]:
    """Trains to iteration 3, with an evaluation at iteration 2. stop_at: the number of the data set at which
    a signal arrives. Returns (the evaluated data sets, the last state)."""
    trainer = make_trainer(config_of(Row(), training={"eval_iters": 1, "eval_interval": 2}), steps=3)
    trainer.data.valid = {name: name for name in NAMES}
    trainer.metrics.log_validation = lambda *_: None
    stopped: list[ExitReason] = []
    evaluated: list[str] = []

    def request(*_: object) -> ExitReason | None:
        return stopped[0] if stopped else None

    def evaluate(engine, name, *_, stop_requested, **__) -> float | None:
        if len(evaluated) == stop_at:
            stopped.append(ExitReason("stopped", ExitStatus.REQUEUE))
        if stop_requested():
            return None
        evaluated.append(name)
        return 1.0

    trainer.exits = SimpleNamespace(
        install_handlers=frozenset, request=request, reason=request, code_of_this_rank=int
    )
    with mock.patch("megatron.training.trainer.evaluate", evaluate):
        return evaluated, trainer.train(state)


def resumed_after_stop(stop_at: int) -> tuple[list[str], list[str], TrainingState, TrainingState]:
    before, stopped = train(TrainingState(), stop_at)
    after, finished = train(stopped, None)
    return before, after, stopped, finished


@pytest.mark.parametrize("stop_at", range(len(NAMES)))
def test_each_data_set_is_evaluated_once(stop_at: int) -> None:
    ((before, after, stopped, finished),) = run_world(1, resumed_after_stop, stop_at)
    assert (*before, *after) == NAMES and len(before) == stop_at
    assert (stopped.iteration, stopped.pending_evaluations) == (2, len(NAMES) - stop_at)
    assert (finished.iteration, finished.pending_evaluations) == (3, 0)


def test_iterations_that_are_skipped_end_the_wait_for_an_evaluation() -> None:
    run = Run.from_config(config_of(Row()), Vocabulary(VOCAB, EOD))
    state = replace(TrainingState(2), pending_evaluations=2)
    assert advance_state(state, 4, run).pending_evaluations == 0
