"""The schedule's comparison, branches and rollbacks keep the end of a resumed run unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.arguments import parse_args
from megatron.arguments.checkpoint_args import add_branch_settings
from megatron.checkpoint.compatibility import check_data, check_schedule
from megatron.checkpoint.record import Checkpoint, TrainingState
from megatron.checkpoint.saved_config import SavedConfig
from megatron.data.vocabulary import Vocabulary
from megatron.errors import UserError
from megatron.optimizer.batch_schedule import Progress, RunLength
from megatron.optimizer.schedule import schedule_of
from megatron.run import Run
from megatron.training.stability import StabilityMonitor
from tests.support.trainers import Log, NoWatchdog
from tests.unit.config.command_lines import SMALL, WITHOUT_LENGTH

STATE = TrainingState(10, 40, 40 * 32)


def saved_by(flags: str) -> Checkpoint:
    config = parse_args([*WITHOUT_LENGTH, *flags.split()], {})
    return Checkpoint(Path("x"), STATE, {"config": config.to_dict()})


CONSTANT = "--lr-decay-style constant"
NO_DECAY = [
    (f"{CONSTANT} --train-iters 20", f"{CONSTANT} --train-iters 40"),
    (f"{CONSTANT} --train-iters 20 --min-lr 1e-4", f"{CONSTANT} --train-iters 20"),
    (f"{CONSTANT} --train-iters 20", f"{CONSTANT} --train-samples 400"),
    (f"{CONSTANT} --train-samples 160", f"{CONSTANT} --train-samples 160 --train-tokens 4000"),
    # The warm-up of 2 or 4 iterations is over.
    (f"{CONSTANT} --train-iters 20 --lr-warmup-fraction 0.1", f"{CONSTANT} --train-iters 40 "
     "--lr-warmup-fraction 0.1"),
    ("--min-lr 1e-3 --train-iters 20", "--min-lr 1e-3 --train-iters 40"),
    ("--min-lr 1e-3 --train-iters 20", f"{CONSTANT} --train-iters 40"),
]  # fmt: skip


@pytest.mark.parametrize(("saved", "now"), NO_DECAY)
def test_resumed_length_changes_no_schedule_without_a_decay(saved: str, now: str) -> None:
    for before, after in ((saved, now), (now, saved)):
        check_schedule(saved_by(before), parse_args([*WITHOUT_LENGTH, *after.split()], {}))


@pytest.mark.parametrize(
    ("saved", "now", "named"),
    [
        ("--train-iters 20", "--train-iters 40", "decay_length was 20, is 40"),
        (f"{CONSTANT} --train-iters 20", f"{CONSTANT} --train-iters 20 --lr 2e-3", "max_lr was 0.001"),
        (f"{CONSTANT} --train-iters 20", "--train-iters 20", "style was constant, is "),
        (
            f"{CONSTANT} --train-iters 40 --lr-warmup-iters 5",
            f"{CONSTANT} --train-iters 40 --lr-warmup-iters 30",
            "warmup was 5.0, is 30.0",
        ),
    ],
)
def test_a_schedule_that_changes_learning_rates_is_refused(saved: str, now: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        check_schedule(saved_by(saved), parse_args([*WITHOUT_LENGTH, *now.split()], {}))


def test_resumed_length_of_tokens_gives_no_other_schedule_with_longer_sequences() -> None:
    flags = "--train-samples 100 --train-tokens 5120 --lr-warmup-samples 20 --max-position-embeddings 64"
    now = parse_args([*WITHOUT_LENGTH, *flags.split(), "--seq-length", "64"], {})
    assert schedule_of(now).decay_unit == "tokens"
    check_schedule(saved_by(flags), now)


@pytest.mark.parametrize("base", ["--train-iters 20", "--train-samples 160", "--train-samples 400"])
def test_resumed_length_of_the_base_run_is_the_order_of_a_branch(base: str) -> None:
    """The base run had batches of 4 samples up to the branch point, and batches of 8 samples since."""
    config = parse_args([*WITHOUT_LENGTH, *f"{CONSTANT} {base}".split()], {})
    unit = "iters" if "iters" in base else "samples"
    settings: dict[str, Any] = {"checkpoint.branch_at": 10, f"schedule.lr_wsd_decay_{unit}": 4}
    add_branch_settings(settings, SavedConfig("x", config, STATE))
    planned = {"--train-iters 20": 120, "--train-samples 160": 160, "--train-samples 400": 400}[base]
    assert settings["data.data_order_samples"] == planned
    assert settings[f"training.train_{unit}"] == (10 if unit == "iters" else 40) + 4


def test_resumed_length_is_kept_by_a_rollback_to_before_the_resume() -> None:
    """The checkpoint is from a launch with batches of 4 samples, the state from a launch with batches of
    8."""
    config = parse_args([*SMALL, "--spike-policy", "rollback", "--save", "x", "--save-interval", "5"], {})
    checkpoint = Checkpoint(Path("x"), replace(STATE, skipped_iterations=1, recent_losses=(3.0,)), {})
    checkpoints: Any = SimpleNamespace(rollback=lambda: checkpoint)
    optimizer = SimpleNamespace(skipped=True, found_nonfinite=False, diagnosis="")
    run = Run.from_config(config, Vocabulary(100, None))
    engine = SimpleNamespace(optimizer=optimizer, run=run)
    parts: Any = (engine, Log(), checkpoints, NoWatchdog())
    monitor = StabilityMonitor(*parts)
    before = Progress(20, 80, 80 * 32)  # at the resume
    state = TrainingState(22, 96, 96 * 32)
    monitor.spikes.diagnosis = "loss 9"
    reached = monitor.post_step(state)
    assert (reached.iteration, reached.consumed_samples, reached.consumed_tokens) == (22, 96, 96 * 32)
    assert (reached.skipped_iterations, reached.rollbacks, reached.recent_losses) == (1 + 12, 1, (3.0,))
    assert RunLength.from_config(config, reached) == RunLength.from_config(config, before)


@pytest.mark.parametrize("mode", [[], ["--eval-only", "--load", "x"]])
def test_resumed_length_of_an_evaluation_is_named_if_the_order_differs(mode: list[str]) -> None:
    config = parse_args([*WITHOUT_LENGTH, "--train-iters", "20", *mode], {})
    run = {
        "config": parse_args([*WITHOUT_LENGTH, "--train-iters", "30"], {}).to_dict(),
        "data": {"epochs": [2]},
    }
    with pytest.raises(UserError, match="has 200 training samples, this run 120: .*--data-order-samples 200"):
        check_data(Checkpoint(Path("x"), STATE, run), config, {"epochs": [1]})
