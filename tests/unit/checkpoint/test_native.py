"""Which checkpoint a run starts from."""

import dataclasses
import json

import pytest

from megatron.checkpoint.native import TrainingState, describe_start, find_latest
from megatron.config import ConfigError


def write(folder, step, complete=True):
    path = folder / f"global_step{step}"
    path.mkdir(parents=True)
    (path / "layer_01-model_00-model_states.pt").touch()
    if complete:
        state = dataclasses.asdict(TrainingState(iteration=step))
        (path / "run.json").write_text(json.dumps({"state": state}))
    return path


def test_an_empty_folder_holds_no_checkpoint(tmp_path):
    assert find_latest(tmp_path) is None
    assert "holds no checkpoint" in describe_start(None, str(tmp_path))
    assert describe_start(None, None) == "starting from new weights"


def test_latest_names_the_checkpoint_even_if_a_newer_folder_is_there(tmp_path):
    write(tmp_path, 5)
    write(tmp_path, 10)
    (tmp_path / "latest").write_text("global_step5")
    assert find_latest(tmp_path).state.iteration == 5


@pytest.mark.parametrize("latest", ["global_step10", None])
def test_an_incomplete_checkpoint_is_passed_over_for_the_newest_complete_one(tmp_path, latest):
    write(tmp_path, 5)
    write(tmp_path, 9)
    write(tmp_path, 10, complete=False)
    if latest:
        (tmp_path / "latest").write_text(latest)
    found = find_latest(tmp_path)
    assert found.state.iteration == 9
    line = describe_start(found, str(tmp_path))
    assert "global_step9, iteration 9" in line
    assert ("global_step10" in line) == bool(latest)


def test_checkpoints_of_which_none_is_complete_are_refused(tmp_path):
    write(tmp_path, 10, complete=False)
    (tmp_path / "latest").write_text("global_step10")
    with pytest.raises(ConfigError, match="global_step10"):
        find_latest(tmp_path)


def test_a_checkpoint_can_be_given_itself(tmp_path):
    path = write(tmp_path, 5)
    write(tmp_path, 10)
    assert find_latest(path).state.iteration == 5
