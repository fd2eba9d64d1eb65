"""A resumed ramp-up: the remaining batch sizes are checked, and a dry run lists them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.arguments import read_command_line
from megatron.checkpoint import selection
from megatron.config import Config
from megatron.errors import UserError
from megatron.planner import dry_run
from tests.support.layouts import VOCAB, unconnected_run
from tests.unit.checkpoint.native_folder import random_wholes, write_native
from tests.unit.config.command_lines import SMALL

STEP = 5
CONSUMED = 8 * STEP
"""Consumed samples of the checkpoint that `write_native` writes."""


def config_of(*words: object) -> Config:
    return read_command_line([*SMALL, *map(str, words)], {}).config


def ramp_up_notes(config: Config) -> list[str]:
    return dry_run.ramp_up_notes(unconnected_run(config), selection.planned_checkpoint(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    config = config_of("--dry-run", "--vocab-size", VOCAB)
    write_native(path, config, random_wholes(config), STEP)
    return path


def ramp(samples: int, micro: int = 4) -> list[object]:
    """Returns flags with batches of 2, 4, 6 and 8 samples. The size is 8 after `samples` samples."""
    return ["--dry-run", "--rampup-batch-size", 2, 2, samples, "--micro-batch-size", micro]


@pytest.mark.parametrize(
    ("samples", "micro", "sizes"),
    [
        (CONSUMED, 4, "batches of 8 remain"),
        (CONSUMED + 10, 2, "batches of 6 to 8 in steps of 2 remain"),
        (10 * CONSUMED, 2, "batches of 2 to 8 in steps of 2 remain"),
    ],
)
def test_a_dry_run_lists_the_sizes_that_remain(samples: int, micro: int, sizes: str, folder: Path) -> None:
    (note,) = ramp_up_notes(config_of(*ramp(samples, micro), "--load", folder))
    assert f"global_step{STEP} at {CONSUMED} consumed samples" in note and sizes in note


def test_a_dry_run_refuses_a_size_that_remains_and_does_not_fit(folder: Path) -> None:
    samples = CONSUMED + 10
    with pytest.raises(UserError, match=f"a batch of 6 is not divisible by .* at least {samples} consumed"):
        ramp_up_notes(config_of(*ramp(samples), "--load", folder))


@pytest.mark.parametrize("exists", [True, False])
def test_without_a_checkpoint_here_a_dry_run_names_the_first_sample(exists: bool, tmp_path: Path) -> None:
    load = tmp_path if exists else tmp_path / "absent"
    (note,) = ramp_up_notes(config_of(*ramp(30), "--load", load))
    assert "at least 30 consumed samples" in note and "batches of 8 remain" in note


def test_without_a_ramp_up_or_with_a_layout_for_all_of_it_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert ramp_up_notes(config_of("--dry-run", "--load", tmp_path)) == []
    assert ramp_up_notes(config_of(*ramp(30, micro=2), "--load", tmp_path)) == []
    assert ramp_up_notes(config_of(*ramp(30, micro=2))) == []


@pytest.mark.parametrize(
    ("samples", "accepted"), [(CONSUMED, True), (CONSUMED + 1, False), (10 * CONSUMED, False)]
)
def test_a_run_checks_the_sizes_after_its_checkpoint(samples: int, accepted: bool, folder: Path) -> None:
    config = config_of(*ramp(samples), "--load", folder, "--vocab-size", VOCAB, "--override-data")
    checks = replace(config.schedule, override_lr_scheduler=True)
    config = replace(config, schedule=checks)
    if accepted:
        found = selection.find_checkpoint(unconnected_run(config, fingerprint={"paths": ["other"]}))
        assert found is not None and found.state.consumed_samples == CONSUMED
        return
    with pytest.raises(UserError, match="a batch of [26] is not divisible"):
        selection.find_checkpoint(unconnected_run(config, fingerprint={"paths": ["other"]}))


def test_fine_tuning_begins_the_ramp_up_again(folder: Path) -> None:
    config = config_of(*ramp(CONSUMED), "--load", folder, "--finetune", "--vocab-size", VOCAB)
    run = unconnected_run(config, fingerprint={})
    for check in (lambda: ramp_up_notes(config), lambda: selection.find_checkpoint(run)):
        with pytest.raises(UserError, match="a batch of 2 is not divisible"):
            check()


def test_a_start_from_initial_weights_checks_all_sizes(tmp_path: Path) -> None:
    config = config_of(*ramp(30), "--load", tmp_path, "--save", tmp_path)
    with pytest.raises(UserError, match="a batch of 2 is not divisible .* at least 30 consumed samples"):
        selection.find_checkpoint(unconnected_run(config, fingerprint={}))
    evaluation = replace(config.training, no_train=True)
    with pytest.raises(UserError, match="--eval-only needs one"):
        selection.find_checkpoint(unconnected_run(replace(config, training=evaluation), fingerprint={}))
