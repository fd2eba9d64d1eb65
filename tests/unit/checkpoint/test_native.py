"""Tests from which checkpoint a run starts."""

import dataclasses
import json

import pytest

from megatron.checkpoint.discovery import find_latest
from megatron.checkpoint.files import add_checksum
from megatron.checkpoint.record import TrainingState, describe_start
from megatron.errors import UserError

FILE = "layer_01-model_00-model_states.pt"


def write(folder, step, complete=True):
    path = folder / f"global_step{step}"
    path.mkdir(parents=True)
    (path / FILE).write_text("weights")
    if complete:
        state = dataclasses.asdict(TrainingState(iteration=step))
        files = {FILE: {"bytes": 7, "sha256": "not read here"}}
        (path / "run.json").write_text(json.dumps(add_checksum({"state": state, "files": files})))
    return path


def test_an_empty_folder_holds_no_checkpoint(tmp_path):
    assert find_latest(tmp_path) is None
    assert "holds no checkpoint" in describe_start(None, str(tmp_path))
    assert describe_start(None, None) == "initializing from scratch"


@pytest.mark.parametrize("latest", ["global_step10", None])
def test_instead_of_an_incomplete_checkpoint_the_newest_complete_one_is_selected(tmp_path, latest):
    write(tmp_path, 5)
    write(tmp_path, 9)
    write(tmp_path, 10, complete=False)
    if latest:
        (tmp_path / "latest").write_text(latest)
    found = find_latest(tmp_path)
    assert found.state.iteration == 9
    line = describe_start(found, str(tmp_path))
    assert "global_step9, iteration 9" in line
    assert "global_step10" in line


def test_a_folder_without_a_complete_checkpoint_is_refused(tmp_path):
    write(tmp_path, 10, complete=False)
    (tmp_path / "latest").write_text("global_step10")
    with pytest.raises(UserError, match="global_step10"):
        find_latest(tmp_path)


def test_an_interrupted_save_is_named_and_skipped(tmp_path):
    write(tmp_path, 5)
    (tmp_path / "saving-global_step3").mkdir()
    (tmp_path / "saving-global_step10").mkdir()
    line = describe_start(find_latest(tmp_path), str(tmp_path))
    assert "global_step5" in line and "saving-global_step10 was never finished" in line
    assert "global_step3" not in line


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda path: (path / FILE).write_text("weight"), f"{FILE} has 6 bytes and was written with 7"),
        (lambda path: (path / FILE).unlink(), f"{FILE} is missing"),
        (lambda path: (path / "run.json").write_text("{"), "run.json cannot be read"),
        (
            lambda path: (path / "run.json").write_text(
                (path / "run.json").read_text().replace('"iteration": 10', '"iteration": 11')
            ),
            "its checksum does not match",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_selected(tmp_path, damage, words):
    write(tmp_path, 5)
    damage(write(tmp_path, 10))
    (tmp_path / "latest").write_text("global_step10")
    found = find_latest(tmp_path)
    assert found.state.iteration == 5
    assert "global_step10" in found.skip_reason and words in found.skip_reason


def test_a_replaced_checkpoint_is_found_while_the_new_one_is_not_in_place(tmp_path):
    write(tmp_path, 5).rename(tmp_path / "global_step5.replaced")
    (tmp_path / "latest").write_text("global_step5")
    assert find_latest(tmp_path).folder.name == "global_step5.replaced"
