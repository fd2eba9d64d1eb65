"""A checkpoint belongs to a run by id and digest, not by name. This decides what is resumed and what is
overwritten."""

import dataclasses
import json
import shutil

import pytest

from megatron.checkpoint import selection
from megatron.checkpoint.discovery import find_latest, open_checkpoint
from megatron.checkpoint.files import add_checksum
from megatron.checkpoint.formats.deepspeed_files import FIRST_MODEL_FILES
from megatron.checkpoint.lineage import start
from megatron.checkpoint.lineage.start import (
    check_load_folder,
    choose_checkpoint,
    origin_matches,
    origin_record,
)
from megatron.checkpoint.record import Checkpoint, TrainingState
from megatron.config import CheckpointConfig, TrainingConfig
from megatron.errors import UserError
from tests.support.layouts import Row, config_of, unconnected_run
from tests.unit.checkpoint.native_folder import change_run
from tests.unit.checkpoint.saved_runs import Killed, Run, damage, digest, old_folder, steps_in


def test_a_start_without_load_does_not_replace_another_runs_checkpoints(tmp_path):
    Run(tmp_path, tmp_path).save(2, 4, 6, 8)
    before = digest(tmp_path, 2)
    with pytest.raises(UserError, match="another run .global_step2, global_step4, global_step6 and 1 more"):
        Run(tmp_path)
    assert digest(tmp_path, 2) == before


def test_overwrite_checkpoints_replaces_those_of_the_same_name_and_deletes_no_others(tmp_path):
    first = Run(tmp_path, tmp_path).save(2, 4, 6, 8)
    second = Run(tmp_path, overwrite_checkpoints=True, keep_last=1).save(2, 4)
    assert steps_in(tmp_path) == [4, 6, 8]
    assert open_checkpoint(tmp_path / "global_step4").run_id == second.identity.run_id
    assert open_checkpoint(tmp_path / "global_step8").run_id == first.identity.run_id
    # The first run's checkpoint has a higher number, but the second run does not resume from it.
    found = find_latest(tmp_path)
    assert found.folder.name == "global_step4" and "global_step8 is of another run" in found.skip_reason
    with pytest.raises(UserError, match="another run .global_step6, global_step8. ahead of global_step4"):
        Run(tmp_path, tmp_path)
    again = Run(tmp_path, tmp_path, overwrite_checkpoints=True)
    assert again.identity.run_id == second.identity.run_id


def test_older_checkpoints_of_another_run_do_not_prevent_a_resume_and_are_kept(tmp_path):
    Run(tmp_path, tmp_path).save(2, 4)
    Run(tmp_path, overwrite_checkpoints=True).save(6)
    run = Run(tmp_path, tmp_path, keep_last=1).save(8, 10)
    assert run.started_from == "global_step6" and steps_in(tmp_path) == [2, 4, 10]


def test_a_checkpoint_that_cannot_be_read_is_not_overwritten(tmp_path):
    (tmp_path / "global_step3").mkdir()
    with pytest.raises(UserError, match="another run .global_step3."):
        Run(tmp_path)


def test_an_unfinished_checkpoint_does_not_prevent_a_resume_and_is_replaced(tmp_path):
    Run(tmp_path, tmp_path).save(2)
    (tmp_path / "global_step4").mkdir()
    run = Run(tmp_path, tmp_path).save(4)
    assert run.started_from == "global_step2" and Run(tmp_path, tmp_path).started_from == "global_step4"


def test_a_checkpoint_that_another_run_added_later_may_not_be_replaced(tmp_path):
    from megatron.checkpoint.lineage.start import may_replace

    run = Run(tmp_path, tmp_path).save(2)
    other = Run(tmp_path / "other", tmp_path / "other").save(4)
    (other.folder / "global_step4").rename(tmp_path / "global_step4")
    assert may_replace(tmp_path, "global_step2", run.identity)
    assert not may_replace(tmp_path, "global_step4", run.identity)
    assert may_replace(tmp_path, "global_step6", run.identity)


def test_a_checkpoint_with_another_digest_is_not_of_the_lineage(tmp_path):
    run = Run(tmp_path, tmp_path).save(2, 4)
    other = Run(tmp_path / "other", tmp_path / "other").save(2)
    (tmp_path / "global_step2").rename(tmp_path / "mine")
    (other.folder / "global_step2").rename(tmp_path / "global_step2")
    damage(tmp_path, 4)
    with pytest.raises(UserError, match="global_step2: it is not the one that this run saved"):
        find_latest(tmp_path)
    run.options = dataclasses.replace(run.options, keep_last=1)
    run.save(6)
    assert 2 in steps_in(tmp_path)


def test_the_same_command_resumes_from_its_own_save_folder(tmp_path):
    load, save = tmp_path / "A", tmp_path / "B"
    Run(load, load).save(2, 4)
    first = Run(save, load).save(6)
    assert first.started_from == "global_step4"
    again = Run(save, load)
    assert again.start.folder == save / "global_step6" and "since it started from" in again.start.skip_reason
    assert again.identity.run_id == first.identity.run_id != open_checkpoint(load / "global_step4").run_id
    # This holds even after the run in A has saved more checkpoints.
    Run(load, load).save(8, 10)
    assert Run(save, load).save(8).started_from == "global_step6"
    assert Run(save, load).started_from == "global_step8"
    # With --load B the run also keeps its id.
    assert Run(save, save).identity.run_id == first.identity.run_id


def test_a_start_from_another_checkpoint_is_another_run(tmp_path):
    load, save = tmp_path / "A", tmp_path / "B"
    Run(load, load).save(2, 4)
    Run(save, load).save(6)
    other = tmp_path / "C"
    Run(other, other).save(4)
    for given in (other, load / "global_step2"):
        with pytest.raises(UserError, match=f"another run .global_step6.*a start from {given}"):
            Run(save, given)


def test_a_run_whose_checkpoints_are_all_damaged_restarts_from_its_origin(tmp_path):
    load, save = tmp_path / "A", tmp_path / "B"
    Run(load, load).save(2)
    first = Run(save, load).save(4)
    damage(save, 4, "run.json")
    again = Run(save, load).save(4)
    assert again.start.folder == load / "global_step2" and "global_step4" in again.start.skip_reason
    assert again.identity.run_id == first.identity.run_id


@pytest.mark.parametrize("place", ["", "deeper/run", "link"])
@pytest.mark.parametrize("file", ["run.json", *FIRST_MODEL_FILES])
def test_a_save_folder_inside_a_checkpoint_is_refused(file, place, tmp_path):
    checkpoint = Run(tmp_path / "A", tmp_path / "A").save(2).folder / "global_step2"
    (tmp_path / "link").symlink_to(checkpoint)
    if file != "run.json":  # another program's checkpoint
        (checkpoint / "run.json").rename(checkpoint / file)
    save = tmp_path / "link" if place == "link" else checkpoint / place
    with pytest.raises(UserError, match=rf"--save {save} is (inside )?the checkpoint {checkpoint}: give"):
        Run(save, checkpoint)
    assert not (checkpoint / "deeper").exists()


def test_no_folder_above_a_mount_point_is_searched_for_a_checkpoint(tmp_path, monkeypatch):
    searched, mount = [], tmp_path / "mount"
    monkeypatch.setattr(start, "_is_checkpoint", searched.append)
    monkeypatch.setattr(start.os.path, "ismount", lambda folder: folder == mount)
    mount.mkdir()
    Run(mount / "run")
    assert searched == [mount / "run", mount]


def test_an_older_checkpoint_of_the_same_folder_is_a_new_run_and_the_newest_is_not(tmp_path):
    run = Run(tmp_path, tmp_path).save(2, 4)
    assert Run(tmp_path, tmp_path / "global_step4").identity.run_id == run.identity.run_id
    with pytest.raises(UserError, match=r"\(global_step4\) ahead of .* write global_s"):
        Run(tmp_path, tmp_path / "global_step2")
    branch = Run(tmp_path, tmp_path / "global_step2", overwrite_checkpoints=True).save(3)
    again = Run(tmp_path, tmp_path / "global_step2", overwrite_checkpoints=True)
    assert again.started_from == "global_step3" and again.identity.run_id == branch.identity.run_id


def test_a_universal_checkpoint_in_the_same_folder_continues_the_run_it_was_made_from(tmp_path):
    run = Run(tmp_path, tmp_path).save(2, 4, 6)
    universal = tmp_path / "global_step4_universal"
    (universal / "zero").mkdir(parents=True)
    shutil.copy(tmp_path / "global_step4" / "run.json", universal)
    change_run(universal, lambda run: run.update(files={}))
    (tmp_path / "latest_universal").write_text(universal.name)
    for expected in (universal.name, "global_step5"):
        again = Run(tmp_path, tmp_path, universal_checkpoint=True)
        assert again.started_from == expected and again.identity.run_id == run.identity.run_id
        again.save(5 if expected == universal.name else 6)
    assert [entry.name for entry in again.identity.lineage] == ["global_step5", "global_step6"]


def test_a_load_that_does_not_exist_is_a_mistake_unless_it_is_the_save_folder(tmp_path):
    missing = tmp_path / "chekpoints"
    with pytest.raises(UserError, match="chekpoints does not exist"):
        Run(tmp_path / "save", missing)
    training = TrainingConfig(no_train=True, train_iters=1)
    options = CheckpointConfig(load=str(missing), save=str(missing))
    config = dataclasses.replace(config_of(Row()), training=training, checkpoint=options)
    with pytest.raises(UserError, match="--eval-only needs a checkpoint"):
        check_load_folder(config)
    assert Run(missing, missing).start is None
    with pytest.raises(UserError, match="holds no checkpoint, and --save is"):
        Run(tmp_path / "save", missing)


def test_checkpoints_from_before_run_ids_belong_to_the_run_that_resumes_them(tmp_path):
    old_folder(tmp_path, 2, 4, 6)
    run = Run(tmp_path, tmp_path, keep_last=2).save(8)
    assert run.started_from == "global_step6" and steps_in(tmp_path) == [6, 8]
    assert Run(tmp_path, tmp_path).identity.run_id == run.identity.run_id


@pytest.mark.parametrize("which", ["folder", "checkpoint"])
@pytest.mark.parametrize("loss", ["deleted", "damaged"])
def test_a_requeued_job_does_not_need_the_checkpoint_that_it_started_from(which, loss, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    Run(old).save(2)
    load = old if which == "folder" else old / "global_step2"
    Run(new, load).save(4)
    if loss == "deleted":
        shutil.rmtree(load)
    else:
        damage(old, 2, "run.json")
    run = Run(new, load)
    assert run.start.folder == new / "global_step4"
    assert Run(new, new).save(6).identity.run_id == run.identity.run_id


@pytest.mark.parametrize("no_train", [False, True])
def test_an_evaluation_uses_load_and_training_resumes_from_save(no_train, tmp_path, monkeypatch):
    old, new = tmp_path / "old", tmp_path / "new"
    Run(old).save(2)
    Run(new, old).save(4)
    chosen = []

    def choose(options, damaged, path_of):
        chosen.append(choose_checkpoint(options, damaged))
        raise Killed

    monkeypatch.setattr(selection, "choose_checkpoint", choose)
    options = CheckpointConfig(load=str(old), save=str(new))
    with pytest.raises(Killed):
        selection.find_checkpoint(
            unconnected_run(
                config_of(Row(), training={"no_train": no_train}, checkpoint=vars(options)), 1, {}
            )
        )
    assert chosen[0].folder == (old / "global_step2" if no_train else new / "global_step4")


def test_another_universal_checkpoint_of_the_same_name_is_another_origin(tmp_path):
    one, other = (
        Checkpoint(tmp_path / name / "global_step5_universal", TrainingState(iteration=5), {})
        for name in ("one", "other")
    )
    options = CheckpointConfig(load=str(tmp_path), universal_checkpoint=True)
    assert origin_matches(origin_record(one), one, options)
    assert not origin_matches(origin_record(one), other, options)


def add_universal(folder, step):
    """Adds a universal checkpoint without parameters."""
    name = f"global_step{step}_universal"
    (folder / name / "zero").mkdir(parents=True)
    run = {"state": {"iteration": step}, "files": {}, "lineage": [], "run_id": "0" * 32}
    (folder / name / "run.json").write_text(json.dumps(add_checksum(run)))
    (folder / "latest_universal").write_text(name)


def test_a_universal_checkpoint_never_replaces_the_checkpoints_of_a_run(tmp_path):
    load, save = tmp_path / "load", tmp_path / "save"
    Run(load, load).save(1, 2)
    add_universal(load, 1)
    Run(save, load).save(3, 4)
    for folder in load.glob("global_step?"):
        shutil.rmtree(folder)
    (load / "latest").unlink()
    assert Run(save, load).started_from == "global_step4"
    with pytest.raises(UserError, match="no native one of the run that saved to it: add --universal_checkp"):
        Run(load, load)
    (load / "latest.json").unlink()
    assert Run(save, load).started_from == "global_step4"
    assert Run(save, load, overwrite_checkpoints=True).started_from == "global_step4"
    assert Run(load, load).started_from == "global_step1_universal"


def test_a_run_from_a_universal_checkpoint_resumes_after_another_run_saved_beside_it(tmp_path):
    base, save = tmp_path / "base", tmp_path / "save"
    add_universal(base, 0)
    Run(save, base).save(5, 6)
    Run(base, base).save(7)
    for overwrite in (False, True):
        run = Run(save, base, overwrite_checkpoints=overwrite)
        assert run.started_from == "global_step6"
        assert run.start.skip_reason.endswith(f"started from {base / 'global_step0_universal'}")
