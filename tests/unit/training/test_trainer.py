"""Tests runs whose steps did not update the weights, failed saves, and evaluations that are stopped."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from operator import mul
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.arguments import parse_args
from megatron.checkpoint.manager import SaveError
from megatron.checkpoint.record import TrainingState
from megatron.cluster.exit_codes import RunStopped
from megatron.config import CheckpointConfig, Config
from megatron.data.vocabulary import Vocabulary
from megatron.errors import UserError
from megatron.run import Run
from megatron.training.trainer import Trainer, UpdateCount, after_failed_save, evaluate
from tests.unit.config.command_lines import SMALL, WITHOUT_LENGTH


def warnings_at_end(
    iteration: int, skipped_before: int, steps: str, fp16: bool = True, total: int = 100
) -> list[str]:
    """Returns the output of a run that ends at `iteration`. skipped_before: iterations without an update
    before this process, including ranges. steps: steps of this process (s: skipped, u: updated)."""
    printed: list[str] = []
    updates = UpdateCount()
    for step in steps:
        updates.add(step == "s")
    trainer: Any = SimpleNamespace(
        run=SimpleNamespace(
            config=SimpleNamespace(precision=SimpleNamespace(fp16=fp16)),
            length=SimpleNamespace(iterations=total),
        ),
        metrics=SimpleNamespace(print=printed.append),
        updates=updates,
    )
    state = TrainingState(iteration, 8 * iteration, 0, skipped_iterations=skipped_before + steps.count("s"))
    Trainer.check_updates(trainer, state)
    return printed


def test_early_exit_after_skipped_steps_only_is_warned_of() -> None:
    (warning,) = warnings_at_end(5, 0, "sssss")
    assert warning.startswith("WARNING: none of the 5 steps since the launch") and "fp16" in warning


@pytest.mark.parametrize(("iteration", "steps"), [(5, "ssssu"), (50, "")])
def test_updates_and_starts_without_a_step_are_not_warned_of(iteration: int, steps: str) -> None:
    assert warnings_at_end(iteration, iteration - len(steps), steps) == []


@pytest.mark.parametrize(("skipped_before", "steps"), [(90, "s" * 10), (0, "s" * 10), (99, "s")])
def test_run_that_ends_without_an_update_fails(skipped_before: int, steps: str) -> None:
    with pytest.raises(RunStopped, match=f"none of the {len(steps)} steps since the launch"):
        warnings_at_end(100, skipped_before, steps)


def test_few_overflows_at_the_end_of_a_resumed_run_are_no_failure() -> None:
    (warning,) = warnings_at_end(100, 3, "ss")
    assert warning.startswith("WARNING: none of the 2 steps")


@pytest.mark.parametrize(
    ("iteration", "load", "expected"),
    [
        (0, "a", "nothing has been saved before; fix this, then start again"),
        (7, "a", "fix this, then the run resumes from iteration 7"),
        (7, None, "fix this, then the run resumes from iteration 7 with --load a"),
    ],
)
def test_previous_checkpoint_is_named_after_a_failed_save_if_there_is_one(iteration, load, expected) -> None:
    assert after_failed_save(iteration, CheckpointConfig(save="a", load=load)) == expected


def test_failed_save_is_exit_code_2() -> None:
    def save(state: TrainingState, in_background: bool) -> None:
        raise SaveError("checkpoint a/global_step5 cannot be written (the disk is full)")

    trainer: Any = SimpleNamespace(
        run=SimpleNamespace(config=SimpleNamespace(checkpoint=CheckpointConfig(save="a"))),
        watchdog=SimpleNamespace(phase=lambda phase: nullcontext()),
        checkpoints=SimpleNamespace(save=save, finish_save=lambda: None),
        resumable_iteration=0,
        _announce_saves=lambda: None,
    )
    with pytest.raises(RunStopped, match="the disk is full.: nothing has been saved before") as caught:
        Trainer.checkpoint(trainer, TrainingState(5))
    assert caught.value.exit_code == 2 and not caught.value.on_all_ranks


def test_fp16_is_not_named_without_it() -> None:
    (warning,) = warnings_at_end(5, 0, "sssss", fp16=False)
    assert "fp16" not in warning and "--spike-policy" in warning


FLAGS = [*SMALL, "--global-batch-size", "6", "--eval-iters", "3"]


class Engine:
    """An engine in which the loss of a token is the number of its micro-batch. Micro-batches with odd numbers
    have two tokens, the others one."""

    def __init__(self, config: Config) -> None:
        self.run = SimpleNamespace(config=config)
        self.groups: list[list[int]] = []

    def evaluate_totals(self, micro_batches, num_micro_batches, heartbeat):
        group = list(islice(micro_batches, num_micro_batches))
        for _ in group:
            heartbeat()
        self.groups.append(group)
        tokens = [1 + number % 2 for number in group]
        return torch.tensor([sum(map(mul, tokens, group)), sum(tokens)], dtype=torch.float32)


def run(flags: str, stop_after: int = 99) -> tuple[float | None, list[list[int]], int]:
    config = parse_args([*FLAGS, *flags.split()], {})
    engine, heartbeats = Engine(config), []

    def micro_batches(first: int, samples: int) -> Iterator[int]:
        return iter(range(first, first + samples))

    loss = evaluate(
        engine,
        SimpleNamespace(micro_batches=micro_batches),
        100,
        stop_requested=lambda: len(engine.groups) >= stop_after,
        heartbeat=lambda: heartbeats.append(1),
    )
    return loss, engine.groups, len(heartbeats)


@pytest.mark.parametrize("stages", [1, 2])
def test_loss_is_the_mean_over_all_tokens(stages: int) -> None:
    loss, groups, heartbeats = run(f"--world-size {stages} --pipeline-model-parallel-size {stages}")
    assert loss == pytest.approx((sum(range(100, 118)) + sum(range(101, 118, 2))) / 27)
    assert [number for group in groups for number in group] == list(range(100, 118))
    assert {len(group) for group in groups[:-1]} == {4 * stages} and heartbeats == 18


def test_request_stops_between_groups_without_a_result() -> None:
    loss, groups, _ = run("", stop_after=2)
    assert loss is None and len(groups) == 2


@pytest.mark.parametrize(
    ("ranges", "logged"),
    [
        ("", [10, 20, 25]),
        ("8-12", [7, 20, 25]),
        ("8-9 10-12", [7, 20, 25]),
        ("3-4 18-19", [10, 20, 25]),
        ("19-25", [10, 18]),
    ],
)
def test_a_line_that_is_due_in_a_skipped_range_follows_the_step_before_it(
    ranges: str, logged: list[int]
) -> None:
    flags = ["--log-interval", "10", "--train-iters", "25"]
    flags += ["--skip-train-iteration-range", *ranges.split()] if ranges else []
    config = parse_args([*WITHOUT_LENGTH, *flags], {})
    trainer: Any = SimpleNamespace(run=Run.from_config(config, Vocabulary(100, None)))
    skipped = {i for first, last in config.stability.skipped_ranges for i in range(first, last + 1)}
    lines = [i for i in range(1, 26) if i not in skipped and Trainer.is_logged(trainer, i)]
    assert lines == logged


@pytest.mark.parametrize("is_evaluation", [True, False])
def test_an_evaluation_of_masked_tokens_only_is_an_error(is_evaluation: bool) -> None:
    config: Any = SimpleNamespace(
        training=SimpleNamespace(eval_iters=1, no_train=is_evaluation),
        batch=SimpleNamespace(global_batch_size=1),
        parallel=SimpleNamespace(num_stages=1),
        micro_batches_per_step=1,
    )
    engine: Any = SimpleNamespace(
        evaluate_totals=lambda *_, **__: torch.zeros(2), run=SimpleNamespace(config=config)
    )
    loader: Any = SimpleNamespace(micro_batches=lambda *_: iter([]))
    error = pytest.raises(UserError, match="all tokens are masked") if is_evaluation else nullcontext()
    with error:
        loss = evaluate(engine, loader, 0, stop_requested=lambda: False, heartbeat=lambda: None)
        assert math.isnan(loss or 0.0)
