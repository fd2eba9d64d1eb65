"""An evaluation of the live model in the middle of training changes nothing in the training."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.checkpoint.record import TrainingState
from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.signals import ExitReason
from megatron.model.inference.scoring import LanguageModel
from tests.support.layouts import DROPOUT, SEQ, VOCAB, Row, config_of
from tests.support.pool import run_world
from tests.support.trainers import make_trainer

DUE = {"eval_harness_tasks": ("toy",), "eval_harness_interval": 2}
ROWS: dict[str, tuple[Row, dict[str, Any]]] = {
    "TP 2 x PP 2": (Row(tp=2, pp=2), {}),
    "ZeRO-1 with buckets": (Row(dp=2, zero=1), {"ddp_bucket_size": 1}),
    "ZeRO-3": (Row(dp=2), {"zero_stage": 3}),
    "V schedule": (Row(pp=2), {"pipeline_schedule": "dualpipev"}),
}


class Tasks:
    """Replaces the evaluation harness: it seeds and draws random numbers as the harness does, and runs the
    model."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.losses = error, []

    def run(self, model: LanguageModel, batch_size: int) -> dict[str, dict[str, float]]:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        rows: Tensor = torch.randint(VOCAB, (batch_size + 1, SEQ))
        if self.error is not None:
            raise self.error
        self.losses.append(-model.score(rows[:, :-1], rows[:, 1:]).log_probs.mean().item())
        model.next_token_logits(rows[:2, :3].tolist())
        model.next_token_logits(rows[:2, :4].tolist())
        return {"toy": {"acc": self.losses[-1]}}


def train(name: str, tasks: Tasks | None, stops: bool = False) -> tuple[Any, ...]:
    row, parallel = ROWS[name]
    training = {} if tasks is None else DUE
    trainer = make_trainer(config_of(row, parallel=parallel, model=DROPOUT, training=training), steps=5)
    records: list[Any] = []
    trainer.metrics.log_tasks = lambda state, results: records.append((state, results))
    trainer.tasks = tasks
    if stops:
        request = ExitReason("stopped", ExitStatus.REQUEUE)
        trainer.exits = SimpleNamespace(
            install_handlers=frozenset,
            request=lambda iteration, _: request if iteration else None,
            reason=lambda *_: trainer.exit_reason,
            code_of_this_rank=int,
        )
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    state = trainer.train(TrainingState())
    drawn = random.random(), float(np.random.rand()), torch.rand(1).item()
    return trainer.metrics.steps, trainer.metrics.lines, records, drawn, state.iteration


@pytest.mark.full
@pytest.mark.parametrize("name", ROWS)
def test_losses_and_random_numbers_are_those_of_a_run_without(name: str) -> None:
    world_size = ROWS[name][0].world_size
    plain = run_world(world_size, train, name, None)
    evaluated = run_world(world_size, train, name, Tasks())
    for (steps, _, _, drawn, _), (same_steps, _, _, same_drawn, _) in zip(plain, evaluated, strict=True):
        assert same_steps == steps and len(steps) == 5
        assert same_drawn == drawn
    records = evaluated[0][2]
    assert [state.iteration for state, _ in records] == [2, 4]
    first, second = (results["toy"]["acc"] for _, results in records)
    assert first != second  # the weights have changed


def test_a_task_that_fails_is_a_warning() -> None:
    _, lines, _, _, iteration = run_world(2, train, "ZeRO-3", Tasks(ValueError("no metric")))[0]
    assert iteration == 5
    assert [line for line in lines if "tasks failed" in line] == 2 * [
        "WARNING: --eval-harness-tasks failed (ValueError: no metric)"
    ]


def test_a_request_to_stop_ends_the_tasks() -> None:
    for _, lines, records, _, iteration in run_world(4, train, "TP 2 x PP 2", Tasks(), stops=True):
        assert iteration == 2 and records == []
        assert "the tasks at iteration 2 were stopped" in lines
