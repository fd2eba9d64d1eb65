"""A checkpoint belongs to a run by digests, not by its name: what is resumed, kept, replaced and deleted."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint import manager, publishing
from megatron.checkpoint.discovery import (
    Checkpoint,
    TrainingState,
    describe_start,
    find_latest,
    open_checkpoint,
)
from megatron.checkpoint.integrity.layout_files import missing_files
from megatron.checkpoint.integrity.manifest import add_checksum, describe_file
from megatron.checkpoint.lineage import latest as latest_module
from megatron.checkpoint.lineage.identity import MAX_LINEAGE, LineageEntry, RunIdentity, lineage_record
from megatron.checkpoint.lineage.latest import read_record
from megatron.checkpoint.lineage.start import (
    check_load_folder,
    check_save_folder,
    choose_checkpoint,
    origin_record,
    start_identity,
    started_from,
)
from megatron.config import CheckpointConfig, ConfigError, TrainingConfig
from tests.distributed.layouts import Row, config_of

FILE = "layer_01-model_00-model_states.pt"


class Killed(BaseException):
    """As SIGKILL: nothing handles it."""


class Run:
    """A run that saves checkpoints of one small file, with the program's own functions around them."""

    def __init__(self, save, load=None, checkpoint=None, old_format=False, **flags):
        self.folder, self.old_format = Path(save), old_format
        self.folder.mkdir(exist_ok=True)
        load = None if load is None else str(load)
        self.options = CheckpointConfig(save=str(save), load=load, **flags)
        self.config = dataclasses.replace(config_of(Row()), checkpoint=self.options)
        check_load_folder(self.config)
        self.start = checkpoint or choose_checkpoint(self.options, None)
        check_save_folder(self.start, self.config)
        self.identity = start_identity(self.start, self.options)

    @property
    def started_from(self):
        return None if self.start is None else self.start.folder.name

    def save(self, *steps, protected=None):
        for step in steps:
            publishing.clean_leftovers(self.folder)
            entry = self.write(step)
            saving = self.folder / publishing.saving_name(entry.name, self.identity)
            self.identity = publishing.publish(saving, entry, self.identity)
            publishing.delete_old_checkpoints(self.folder, self.identity, self.options, protected)
        return self

    def write(self, step):
        """An unpublished checkpoint, of which it returns the entry."""
        name = f"global_step{step}"
        saving = self.folder / publishing.saving_name(name, self.identity)
        saving.mkdir()
        (saving / FILE).write_text(f"weights of {self.identity.run_id} at {step} in {self.identity.attempt}")
        run = {
            "state": dataclasses.asdict(TrainingState(iteration=step)),
            "files": {FILE: describe_file(saving / FILE)},
            "run_id": self.identity.run_id,
            "origin": self.identity.origin,
            "lineage": lineage_record(self.identity.lineage),
        }
        if self.old_format:
            run["lineage"] = [entry.name for entry in self.identity.lineage]
            del run["run_id"], run["origin"]
        run = add_checksum(run)
        (saving / "run.json").write_text(json.dumps(run))
        run_id = None if self.old_format else self.identity.run_id
        return LineageEntry(name, step, run_id, run["sha256"])


def old_folder(folder, *steps):
    """Checkpoints as they were before run ids."""
    run = Run(folder, folder, old_format=True).save(*steps)
    (folder / "latest.json").unlink()
    return run


def steps_in(folder):
    return sorted(int(re.sub(r"\D", "", path.name)) for path in folder.glob("global_step*"))


def digest(folder, step):
    return open_checkpoint(folder / f"global_step{step}").run["sha256"]


def damage(folder, step, file=FILE):
    (folder / f"global_step{step}" / file).write_text("{")


# --- another run's checkpoints in --save ---


def test_a_start_without_load_does_not_replace_another_runs_checkpoints(tmp_path):
    Run(tmp_path, tmp_path).save(2, 4, 6, 8)
    before = digest(tmp_path, 2)
    with pytest.raises(ConfigError, match="another run .global_step2, global_step4, global_step6 and 1 more"):
        Run(tmp_path)
    assert digest(tmp_path, 2) == before


def test_with_the_flag_only_checkpoints_of_the_same_name_are_replaced_and_the_rest_is_never_deleted(tmp_path):
    first = Run(tmp_path, tmp_path).save(2, 4, 6, 8)
    second = Run(tmp_path, overwrite_checkpoints=True, keep_last=1).save(2, 4)
    assert steps_in(tmp_path) == [4, 6, 8]
    assert open_checkpoint(tmp_path / "global_step4").run_id == second.identity.run_id
    assert open_checkpoint(tmp_path / "global_step8").run_id == first.identity.run_id
    # What the first run left has a higher number, and is not taken for the second's.
    found = find_latest(tmp_path)
    assert found.folder.name == "global_step4" and "global_step8 is of another run" in found.skip_reason
    with pytest.raises(ConfigError, match="another run .global_step6, global_step8. ahead of global_step4"):
        Run(tmp_path, tmp_path)
    again = Run(tmp_path, tmp_path, overwrite_checkpoints=True)
    assert again.identity.run_id == second.identity.run_id


def test_checkpoints_of_another_run_behind_do_not_hinder_a_resume_and_stay(tmp_path):
    Run(tmp_path, tmp_path).save(2, 4)
    Run(tmp_path, overwrite_checkpoints=True).save(6)
    run = Run(tmp_path, tmp_path, keep_last=1).save(8, 10)
    assert run.started_from == "global_step6" and steps_in(tmp_path) == [2, 4, 10]


def test_a_folder_that_cannot_be_read_is_nobodys_to_overwrite(tmp_path):
    (tmp_path / "global_step3").mkdir()
    with pytest.raises(ConfigError, match="another run .global_step3."):
        Run(tmp_path)


def test_a_folder_that_was_never_finished_does_not_hinder_a_resume_and_is_replaced(tmp_path):
    Run(tmp_path, tmp_path).save(2)
    (tmp_path / "global_step4").mkdir()
    run = Run(tmp_path, tmp_path).save(4)
    assert run.started_from == "global_step2" and Run(tmp_path, tmp_path).started_from == "global_step4"


def test_a_checkpoint_that_another_run_put_there_meanwhile_is_not_this_runs(tmp_path):
    from megatron.checkpoint.lineage.start import may_replace

    run = Run(tmp_path, tmp_path).save(2)
    other = Run(tmp_path / "other", tmp_path / "other").save(4)
    (other.folder / "global_step4").rename(tmp_path / "global_step4")
    assert may_replace(tmp_path, "global_step2", run.identity)
    assert not may_replace(tmp_path, "global_step4", run.identity)
    assert may_replace(tmp_path, "global_step6", run.identity)


# --- latest ---


def test_latest_set_by_hand_is_obeyed_and_the_branch_that_is_left_is_replaced_name_by_name(tmp_path):
    run = Run(tmp_path, tmp_path).save(2, 4, 6, 8)
    (tmp_path / "latest").write_text("global_step2\n")
    back = Run(tmp_path, tmp_path)
    assert back.started_from == "global_step2" and back.identity.run_id == run.identity.run_id
    line = describe_start(back.start, str(tmp_path))
    assert "set by hand" in line and "global_step8" in line
    left_behind = digest(tmp_path, 4)
    back.save(4)
    assert digest(tmp_path, 4) != left_behind and steps_in(tmp_path) == [2, 4, 6, 8]
    assert Run(tmp_path, tmp_path).started_from == "global_step4"
    # Only the line of descent is deleted: 6 and 8 are of the branch that was left.
    Run(tmp_path, tmp_path, keep_last=1).save(5)
    assert steps_in(tmp_path) == [5, 6, 8]


def test_going_back_survives_a_kill_before_the_first_save(tmp_path):
    Run(tmp_path, tmp_path).save(2, 4, 6)
    (tmp_path / "latest").write_text("global_step2")
    run = Run(tmp_path, tmp_path)
    run.write(4)
    assert Run(tmp_path, tmp_path).started_from == "global_step2"


@pytest.mark.parametrize("at", ["rename", "latest", "record"])
@pytest.mark.parametrize("first", [False, True])
def test_a_kill_while_a_checkpoint_gets_its_name_leaves_the_newest_complete_one(
    at, first, tmp_path, monkeypatch
):
    """At `rename` the new one is not in place yet, later it is, whatever `latest` names."""
    run = Run(tmp_path, tmp_path)
    if not first:
        run.save(2)

    def die(*_):
        raise Killed

    where = {
        "rename": "megatron.checkpoint.publishing.os.rename",
        "latest": "megatron.checkpoint.publishing.set_latest",
        "record": "megatron.checkpoint.lineage.latest._write",
    }[at]
    entry = run.write(4)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        if at == "record":
            publishing.record_upcoming(tmp_path, entry, run.identity)
            patch.setattr(publishing, "record_upcoming", lambda *_: None)
        patch.setattr(where, die)
        publishing.publish(tmp_path / publishing.saving_name(entry.name, run.identity), entry, run.identity)
    again = Run(tmp_path, tmp_path)
    before = None if first else "global_step2"
    assert again.started_from == (before if at == "rename" else "global_step4")
    if at == "latest":
        assert "the job was killed before latest could name global_step4" in again.start.skip_reason
    again.save(6)
    assert Run(tmp_path, tmp_path).started_from == "global_step6"
    assert not list(tmp_path.glob("saving-*"))


@pytest.mark.parametrize("content", [b"", b"global_st", b"\xff\x00", b"../../elsewhere", None])
def test_a_damaged_latest_leads_to_the_runs_own_newest_and_not_to_a_higher_number(content, tmp_path):
    Run(tmp_path, tmp_path).save(2, 4, 20)
    Run(tmp_path, overwrite_checkpoints=True).save(4, 6)
    if content is None:
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "latest").write_bytes(content)
    found = find_latest(tmp_path)
    assert found.folder.name == "global_step6" and "names no checkpoint" in found.skip_reason
    damage(tmp_path, 6)
    assert find_latest(tmp_path).folder.name == "global_step4"
    damage(tmp_path, 4, "run.json")
    with pytest.raises(ConfigError, match="global_step4: run.json cannot be read"):
        find_latest(tmp_path)


def test_without_latest_and_its_record_one_line_of_descent_is_resumed_and_two_are_refused(tmp_path):
    Run(tmp_path, tmp_path).save(2, 4)
    for name in ("latest", "latest.json"):
        (tmp_path / name).unlink()
    assert find_latest(tmp_path).folder.name == "global_step4"
    Run(tmp_path / "other", tmp_path / "other").save(20)
    (tmp_path / "other" / "global_step20").rename(tmp_path / "global_step20")
    with pytest.raises(ConfigError, match=r"global_step4 \(run .*global_step20 \(run .*write the name"):
        find_latest(tmp_path)
    (tmp_path / "latest").write_text("global_step4")
    assert find_latest(tmp_path).folder.name == "global_step4"


def test_a_damaged_newest_checkpoint_leads_to_its_parent_and_not_to_the_branch_that_was_left(tmp_path):
    Run(tmp_path, tmp_path).save(2, 4, 6)
    (tmp_path / "latest").write_text("global_step2")
    Run(tmp_path, tmp_path).save(3, 5)
    for file in (FILE, "run.json"):
        damage(tmp_path, 5, file)
        assert find_latest(tmp_path).folder.name == "global_step3"
    run = Run(tmp_path, tmp_path).save(5)
    assert run.started_from == "global_step3"  # and the damaged one was replaced without a flag


def test_a_checkpoint_of_the_lineages_name_with_another_digest_is_not_the_lineages(tmp_path):
    run = Run(tmp_path, tmp_path).save(2, 4)
    other = Run(tmp_path / "other", tmp_path / "other").save(2)
    (tmp_path / "global_step2").rename(tmp_path / "mine")
    (other.folder / "global_step2").rename(tmp_path / "global_step2")
    damage(tmp_path, 4)
    with pytest.raises(ConfigError, match="global_step2: it is not the one that this run saved"):
        find_latest(tmp_path)
    run.options = dataclasses.replace(run.options, keep_last=1)
    run.save(6)
    assert 2 in steps_in(tmp_path)


# --- --load A --save B ---


def test_the_same_command_goes_on_from_what_it_saved_elsewhere(tmp_path):
    load, save = tmp_path / "A", tmp_path / "B"
    Run(load, load).save(2, 4)
    first = Run(save, load).save(6)
    assert first.started_from == "global_step4"
    again = Run(save, load)
    assert again.start.folder == save / "global_step6" and "since it started from" in again.start.skip_reason
    assert again.identity.run_id == first.identity.run_id != open_checkpoint(load / "global_step4").run_id
    # Also where the other run has gone on since.
    Run(load, load).save(8, 10)
    assert Run(save, load).save(8).started_from == "global_step6"
    assert Run(save, load).started_from == "global_step8"
    # With --load B too.
    assert Run(save, save).identity.run_id == first.identity.run_id


def test_what_began_from_another_checkpoint_is_no_continuation(tmp_path):
    load, save = tmp_path / "A", tmp_path / "B"
    Run(load, load).save(2, 4)
    Run(save, load).save(6)
    other = tmp_path / "C"
    Run(other, other).save(4)
    for start in (other, load / "global_step2"):
        with pytest.raises(ConfigError, match=f"another run .global_step6.*a start from {start}"):
            Run(save, start)


def test_a_run_whose_own_checkpoints_are_all_damaged_starts_again_where_it_began(tmp_path):
    load, save = tmp_path / "A", tmp_path / "B"
    Run(load, load).save(2)
    first = Run(save, load).save(4)
    damage(save, 4, "run.json")
    again = Run(save, load).save(4)
    assert again.start.folder == load / "global_step2" and "global_step4" in again.start.skip_reason
    assert again.identity.run_id == first.identity.run_id


def test_an_older_checkpoint_of_the_same_folder_is_a_new_run_and_the_newest_is_not(tmp_path):
    run = Run(tmp_path, tmp_path).save(2, 4)
    assert Run(tmp_path, tmp_path / "global_step4").identity.run_id == run.identity.run_id
    with pytest.raises(ConfigError, match=r"\(global_step4\) ahead of .* write global_s"):
        Run(tmp_path, tmp_path / "global_step2")
    branch = Run(tmp_path, tmp_path / "global_step2", overwrite_checkpoints=True).save(3)
    again = Run(tmp_path, tmp_path / "global_step2", overwrite_checkpoints=True)
    assert again.started_from == "global_step3" and again.identity.run_id == branch.identity.run_id


def test_a_universal_checkpoint_in_the_same_folder_continues_the_run_that_it_was_made_of(tmp_path):
    run = Run(tmp_path, tmp_path).save(2, 4, 6)
    universal = tmp_path / "global_step4_universal"
    (universal / "zero").mkdir(parents=True)
    content = json.loads((tmp_path / "global_step4" / "run.json").read_text())
    content = {key: value for key, value in content.items() if key != "sha256"}
    (universal / "run.json").write_text(json.dumps(add_checksum({**content, "files": {}})))
    (tmp_path / "latest_universal").write_text(universal.name)
    for expected in (universal.name, "global_step5"):
        again = Run(tmp_path, tmp_path, universal_checkpoint=True)
        assert again.started_from == expected and again.identity.run_id == run.identity.run_id
        again.save(5 if expected == universal.name else 6)
    assert [entry.name for entry in again.identity.lineage] == ["global_step5", "global_step6"]


def test_a_load_that_does_not_exist_is_a_mistake_unless_it_is_the_save_folder(tmp_path):
    missing = tmp_path / "chekpoints"
    with pytest.raises(ConfigError, match="chekpoints does not exist"):
        Run(tmp_path / "save", missing)
    training = TrainingConfig(no_train=True, train_iters=1)
    options = CheckpointConfig(load=str(missing), save=str(missing))
    config = dataclasses.replace(config_of(Row()), training=training, checkpoint=options)
    with pytest.raises(ConfigError, match="--eval-only needs a checkpoint"):
        check_load_folder(config)
    assert Run(missing, missing).start is None
    with pytest.raises(ConfigError, match="holds no checkpoint, and --save is"):
        Run(tmp_path / "save", missing)


# --- --keep-last ---


def test_milestones_stay(tmp_path):
    Run(tmp_path, tmp_path, keep_last=2, save_retain_interval=10).save(*range(5, 45, 5))
    assert steps_in(tmp_path) == [10, 20, 30, 35, 40]


def test_what_is_protected_stays(tmp_path):
    Run(tmp_path, tmp_path, keep_last=1).save(1, 2, 3)
    assert steps_in(tmp_path) == [3]
    Run(tmp_path, tmp_path, keep_last=1).save(4, 5, protected="global_step3")
    assert steps_in(tmp_path) == [3, 5]


def test_a_cleanup_that_fails_does_not_fail_the_save(tmp_path, monkeypatch, caplog):
    run = Run(tmp_path, tmp_path, keep_last=1).save(1)

    def fail(path, *_args, **_keywords):
        raise OSError(39, "Directory not empty", str(path))

    monkeypatch.setattr(publishing.shutil, "rmtree", fail)
    (tmp_path / "saving-global_step9").mkdir()
    (tmp_path / "global_step1.replaced").mkdir()
    run.save(2)
    assert find_latest(tmp_path).folder.name == "global_step2"
    for name in ("saving-global_step9", "global_step1.replaced", "global_step1"):
        assert re.search(rf"{name}\S* cannot be (removed|deleted): .*not empty", caplog.text)


def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_what_the_next_save_removes(tmp_path, monkeypatch):
    run = Run(tmp_path, tmp_path, keep_last=1).save(1)

    def die(path):
        (path / FILE).unlink()
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(publishing.shutil, "rmtree", die)
        run.save(2)
    assert steps_in(tmp_path) == [2] and len(list(tmp_path.glob("saving-*"))) == 1
    Run(tmp_path, tmp_path).save(3)
    assert steps_in(tmp_path) == [2, 3] and not list(tmp_path.glob("saving-*"))


def test_leftovers_are_removed_before_the_save_and_conversions_are_not(tmp_path):
    run = Run(tmp_path, tmp_path)
    ours = ("saving-global_step1", "saving-global_step2.0123abcd")
    others = ("saving-global_step3_universal", "global_step3_universal.partial", "saving-notes")
    for name in (*ours, *others):
        (tmp_path / name).mkdir()
    publishing.clean_leftovers(run.folder)
    assert {path.name for path in tmp_path.iterdir()} == set(others)


def test_an_interrupted_replacement_is_undone_or_finished_before_the_next_save(tmp_path):
    Run(tmp_path, tmp_path).save(1, 2)
    (tmp_path / "global_step1").rename(tmp_path / "global_step1.replaced")
    assert Run(tmp_path, tmp_path).started_from == "global_step2"
    publishing.clean_leftovers(tmp_path)
    assert steps_in(tmp_path) == [1, 2] and open_checkpoint(tmp_path / "global_step1")
    (tmp_path / "global_step2.replaced").mkdir()
    publishing.clean_leftovers(tmp_path)
    assert not (tmp_path / "global_step2.replaced").exists()


# --- what a file says of a lineage ---


def test_checkpoints_from_before_run_ids_are_resumed_and_belong_to_the_run_that_resumes_them(tmp_path):
    old_folder(tmp_path, 2, 4, 6)
    run = Run(tmp_path, tmp_path, keep_last=2).save(8)
    assert run.started_from == "global_step6" and steps_in(tmp_path) == [6, 8]
    assert Run(tmp_path, tmp_path).identity.run_id == run.identity.run_id


def test_latest_of_a_folder_from_before_run_ids_is_obeyed_too(tmp_path):
    old_folder(tmp_path, 2, 4, 6)
    (tmp_path / "latest").write_text("global_step2")
    run = Run(tmp_path, tmp_path).save(4)
    assert run.started_from == "global_step2" and Run(tmp_path, tmp_path).started_from == "global_step4"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"lineage": ["../../victim"]}, "victim"),
        ({"lineage": [{"name": "global_step1/../x", "iteration": 1}]}, "global_step1/../x"),
        ({"lineage": [{"name": "global_step1", "iteration": 2}]}, "has iteration '2'"),
        ({"lineage": [{"name": "global_step1", "iteration": 1, "sha256": "x"}]}, "64 hex digits"),
        ({"lineage": {"a": 1}}, "not a list"),
        ({"lineage": [7]}, "a checkpoint a int|neither"),
        ({"run_id": "../x"}, "32 hex digits"),
        ({"run_id": 5}, "32 hex digits"),
    ],
)
def test_a_malformed_lineage_is_named(change, words, tmp_path):
    Run(tmp_path, tmp_path).save(2)
    path = tmp_path / "global_step2" / "run.json"
    run = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}
    path.write_text(json.dumps(add_checksum({**run, **change})))
    with pytest.raises(ConfigError, match=f"run.json.*{words}"):
        open_checkpoint(path.parent)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b"[" * 100_000])
def test_a_damaged_record_beside_latest_is_as_none(content, tmp_path):
    Run(tmp_path, tmp_path).save(2, 4)
    (tmp_path / "latest.json").write_bytes(content)
    assert read_record(tmp_path) is None and Run(tmp_path, tmp_path).started_from == "global_step4"


def test_the_lineage_is_bounded():
    identity = RunIdentity()
    for step in range(MAX_LINEAGE + 5):
        identity = identity.with_checkpoint(
            LineageEntry(f"global_step{step}", step, identity.run_id, "0" * 64)
        )
    assert len(identity.lineage) == MAX_LINEAGE and identity.lineage[-1].iteration == MAX_LINEAGE + 4


def test_a_rollback_cuts_the_lineage():
    entries = tuple(LineageEntry(f"global_step{step}", step) for step in (1, 2, 3))
    assert RunIdentity(lineage=entries).rolled_back_to("global_step2").lineage == entries[:2]


# --- the files of a layout ---


def layout(tensor, pipeline, data, zero, parameters=("tied_modules.embed.x", "3.a", "3.b", "8.weight")):
    sizes = {"tensor_model": tensor, "pipeline_model": pipeline, "data": data}
    degrees = {f"{kind}_parallel_size": size for kind, size in sizes.items()}
    record = {"whole_shape": [4], "shard_dim": None, "blocks": 1, "used_rows": None}
    return {"layout": {**degrees, "zero_stage": zero}, "parameters": dict.fromkeys(parameters, record)}


LAYERS = {f"layer_{layer:02d}-model_{rank:02d}-model_states.pt" for layer in (1, 3, 8) for rank in (0, 1)}
RANKS = {f"mp_rank_{rank:02d}_model_states.pt" for rank in range(4)}
ZERO = {f"zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt" for data in (0, 1, 2) for rank in range(4)}


def test_a_manifest_lacks_no_file_of_its_layout():
    assert missing_files(LAYERS | RANKS | ZERO, layout(2, 2, 3, 1)) == []
    assert missing_files(LAYERS | RANKS, layout(2, 2, 3, 0)) == []
    assert missing_files(LAYERS | RANKS | {f"bf16_{name}" for name in ZERO}, layout(2, 2, 3, 1)) == []
    for name in (min(LAYERS), max(RANKS), max(ZERO)):
        assert missing_files((LAYERS | RANKS | ZERO) - {name}, layout(2, 2, 3, 1)) == [name]
    assert len(missing_files(LAYERS | RANKS, layout(10**6, 10**6, 10**6, 1))) == 1
    assert missing_files(set(), {}) == []  # this repo's first checkpoints do not tell


def test_a_checkpoint_that_was_saved_without_one_of_its_files_is_refused_by_name(tmp_path):
    Run(tmp_path, tmp_path).save(2)
    path = tmp_path / "global_step2" / "run.json"
    run = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}
    (path.parent / "mp_rank_00_model_states.pt").touch()
    run["files"]["mp_rank_00_model_states.pt"] = describe_file(path.parent / "mp_rank_00_model_states.pt")
    path.write_text(json.dumps(add_checksum({**run, **layout(1, 1, 1, 0, ("1.a", "3.a"))})))
    with pytest.raises(ConfigError, match="layer_03-model_00-model_states.pt was never written"):
        open_checkpoint(path.parent)


# --- what a reviewer found ---


def test_keep_last_deletes_nothing_of_the_run_that_this_one_began_from(tmp_path):
    Run(tmp_path).save(2, 4, 6)
    flags = {"overwrite_checkpoints": True, "keep_last": 1}
    Run(tmp_path, tmp_path / "global_step4", **flags).save(5, 7)
    assert steps_in(tmp_path) == [2, 4, 6, 7]


def test_a_checkpoint_of_another_program_is_kept_under_another_name(tmp_path, caplog):
    Run(tmp_path, tmp_path).save(2)
    (tmp_path / "global_step4").mkdir()
    (tmp_path / "global_step4" / "mp_rank_00_model_states.pt").write_text("weights of another program")
    Run(tmp_path, tmp_path).save(4)
    (kept,) = tmp_path.glob("unknown-global_step4.*")
    assert (kept / "mp_rank_00_model_states.pt").read_text() == "weights of another program"
    assert str(kept) in caplog.text and Run(tmp_path, tmp_path).started_from == "global_step4"


@pytest.mark.parametrize("which", ["folder", "checkpoint"])
@pytest.mark.parametrize("loss", ["deleted", "damaged"])
def test_a_requeued_job_needs_the_checkpoint_that_it_began_with_no_more(which, loss, tmp_path):
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
def test_an_evaluation_is_of_the_given_checkpoint_and_training_continues(no_train, tmp_path, monkeypatch):
    old, new = tmp_path / "old", tmp_path / "new"
    Run(old).save(2)
    Run(new, old).save(4)
    chosen = []

    def choose(options, damaged):
        chosen.append(choose_checkpoint(options, damaged))
        raise Killed

    monkeypatch.setattr(manager, "choose_checkpoint", choose)
    options = CheckpointConfig(load=str(old), save=str(new))
    with pytest.raises(Killed):
        manager.find_checkpoint(
            config_of(Row(), training={"no_train": no_train}, checkpoint=vars(options)), 1, {}
        )
    assert chosen[0].folder == (old / "global_step2" if no_train else new / "global_step4")


def test_another_universal_checkpoint_of_the_same_name_is_another_origin(tmp_path):
    one, other = (
        Checkpoint(tmp_path / name / "global_step5_universal", TrainingState(iteration=5), {})
        for name in ("one", "other")
    )
    options = CheckpointConfig(load=str(tmp_path), universal_checkpoint=True)
    assert started_from(origin_record(one), one, options)
    assert not started_from(origin_record(one), other, options)


def test_latest_set_by_hand_is_obeyed_though_the_job_was_killed_before_its_record(tmp_path, monkeypatch):
    Run(tmp_path, tmp_path).save(4)
    with monkeypatch.context() as patch:
        patch.setattr(latest_module, "_write", fail_after_announcing(latest_module._write))
        Run(tmp_path, tmp_path).save(6)
    assert Run(tmp_path, tmp_path).started_from == "global_step6"
    (tmp_path / "latest").write_text("global_step4")
    os.utime(tmp_path / "latest", ns=(2**61, 2**61))  # later than the record, on any clock
    assert Run(tmp_path, tmp_path).started_from == "global_step4"


def fail_after_announcing(write):
    def fail(folder, record):
        if record.upcoming is None:
            raise OSError("no space left on device")
        write(folder, record)

    return fail
