"""Sentences at the start about what a resume changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoint.compatibility import resumed_schedule
from megatron.checkpoint.record import Checkpoint, TrainingState
from megatron.config import BatchSchedule, Config, parse_args, read_command_line
from megatron.data.indexed_dataset import IndexedDatasetBuilder
from megatron.errors import UserError
from megatron.tokenizer.vocabulary import find_vocabulary
from megatron.training.run_report import planned_start, start_notes
from megatron.training.trainer import run_length
from tests.support.layouts import VOCAB
from tests.unit.checkpoint.native_folder import random_wholes, write_native
from tests.unit.config.command_lines import SMALL

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --dry-run"
).split()


def notes(flags: str, saved_flags: str = "", iteration: int = 0, finetune: bool = False) -> list[str]:
    """The notes of a run, started from a checkpoint of a run with other flags at an iteration."""
    config, checkpoint = parse_args([*FLAGS, *flags.split()], {}), None
    if iteration:
        saved = parse_args([*FLAGS, *saved_flags.split()], {})
        state = TrainingState(iteration, 8 * iteration, 8 * 32 * iteration)
        checkpoint = Checkpoint(Path("x"), state, {"config": saved.to_dict()}, weights_only=finetune)
    batches = BatchSchedule.from_config(config.batch)
    schedule = resumed_schedule(checkpoint, config)
    return start_notes(checkpoint, config, run_length(config, batches), batches, schedule)


@pytest.mark.parametrize("iteration", [0, 50, 99])
def test_ordinary_start_and_resume_have_no_notes(iteration: int) -> None:
    assert notes("--train-iters 100", "--train-iters 100", iteration) == []


@pytest.mark.parametrize("flags", ["--train-samples 125", "--train-samples 800 --train-tokens 4000"])
def test_rounded_last_batch_is_not_a_learning_rate_of_0(flags: str) -> None:
    assert notes(flags) == []


@pytest.mark.parametrize("iteration", [50, 100, 120])
def test_fine_tuning_starts_at_0_whatever_the_checkpoint_has_reached(iteration: int) -> None:
    assert notes("--train-iters 100", "--train-iters 100 --global-batch-size 16", iteration, True) == []


@pytest.mark.parametrize("iteration", [100, 120])
def test_nothing_to_train(iteration: int) -> None:
    (note,) = notes("--train-iters 100", "--train-iters 100", iteration)
    assert f"nothing to train: the checkpoint is at iteration {iteration}" in note and "iteration 100" in note
    assert notes("--train-iters 100 --no-train", "--train-iters 100", iteration) == []


@pytest.mark.parametrize(
    ("now", "parts"),
    [
        (
            "--global-batch-size 16",
            ("8 samples there (up to 8)", "16 samples from iteration 51 on (up to 16)"),
        ),
        ("--rampup-batch-size 4 4 1000", ("8 samples there", "4 samples from iteration 51 on (up to 8)")),
    ],
)
def test_changed_batch_size(now: str, parts: tuple[str, ...]) -> None:
    (note,) = notes(f"--train-samples 8000 {now}", "--train-samples 8000", 50)
    assert all(part in note for part in parts)


def test_changed_settings_of_the_updates_are_one_line() -> None:
    saved = "--hidden-dropout 0.2 --adam-beta2 0.95 --clip-grad 0.5 --init-method-std 0.02 --sgd-momentum 0.5"
    now = "--hidden-dropout 0 --adam-beta2 0.98 --clip-grad 1 --init-method-std 0.01"
    (note,) = notes(f"--train-iters 100 {now}", f"--train-iters 100 {saved}", 50)
    assert note == (
        "the run continues with other settings than the checkpoint's: --hidden-dropout was 0.2, is 0.0; "
        "--init-method-std was 0.02, is 0.01; --adam-beta2 was 0.95, is 0.98; --clip-grad was 0.5, is 1.0"
    )
    assert notes(f"--train-iters 100 {now}", f"--train-iters 100 {saved}", 50, finetune=True) == []


@pytest.mark.parametrize(
    ("now", "saved", "warned"),
    [
        ("--train-iters 200 --use-checkpoint-lr-scheduler", "--train-iters 100", True),
        ("--train-iters 200 --override-lr-scheduler", "--train-iters 100", False),
        ("--train-iters 200 --use-checkpoint-lr-scheduler", "--train-iters 100 --min-lr 1e-5", False),
        ("--train-iters 200 --use-checkpoint-lr-scheduler", "--train-iters 300", False),
    ],
)
def test_checkpoint_schedule_that_ends_before_the_run(now: str, saved: str, warned: bool) -> None:
    found = notes(now, saved, 100)
    assert len(found) == warned
    for note in found:
        assert "learning rate is 0 from 100 iterations on and the run ends at 200" in note
        assert "--override-lr-scheduler" in note


def test_decay_that_ends_before_a_new_run() -> None:
    (note,) = notes("--train-iters 200 --lr-decay-iters 100")
    assert "WARNING: the learning rate is 0" in note and "--min-lr" in note


# --- the checkpoint of a dry run ---


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with a checkpoint at iteration 5, and the prefix of data that it was not trained on."""
    folder = tmp_path_factory.mktemp("places")
    config = read_command_line([*SMALL, "--dry-run", "--vocab-size", str(VOCAB)], {}).config
    write_native(folder / "checkpoints", config, random_wholes(config), 5)
    with IndexedDatasetBuilder(folder / "data", np.uint16) as builder:
        builder.add_documents([1] * 1000, [100] * 10)
        builder.finalize()
    return folder / "checkpoints", folder / "data"


def start_of(load: Path, data: Path, *flags: str) -> list[str]:
    words = [*SMALL, "--dry-run", "--vocab-size", str(VOCAB), "--load", str(load), "--data-path", str(data)]
    config: Config = read_command_line([*words, *flags], {}).config
    length = run_length(config, BatchSchedule.from_config(config.batch))
    return planned_start(config, length, find_vocabulary(config))[1]


def test_dry_run_names_the_checkpoint_that_a_run_starts_from(places: tuple[Path, Path]) -> None:
    (note,) = start_of(*places, "--override-data")
    assert f"starting from {places[0] / 'global_step5'}, iteration 5" in note


@pytest.mark.parametrize(
    ("flags", "named"),
    [((), "trained on other data"), (("--override-data", "--lr", "1"), "trained with another schedule")],
)
def test_dry_run_refuses_what_a_run_refuses(flags, named: str, places: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match=named):
        start_of(*places, *flags)


def test_dry_run_without_the_folder_or_the_data_says_so(places: tuple[Path, Path]) -> None:
    load, data = places
    (note,) = start_of(load.parent / "absent", data)
    assert "not checked" in note and "absent does not exist here" in note
    (note,) = start_of(load, data.parent / "absent")
    assert f"--load {load} is not checked: --data-path" in note
