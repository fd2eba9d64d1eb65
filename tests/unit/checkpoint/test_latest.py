"""Tests from which checkpoint of a folder a run resumes: `latest`, `latest.json`, damaged checkpoints."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.checkpoint import files as checkpoint_files
from megatron.checkpoint.discovery import find_latest
from megatron.checkpoint.lineage import identity as identity_module
from megatron.checkpoint.lineage.identity import read_latest_record
from megatron.checkpoint.record import describe_start
from megatron.checkpoint.saving import publishing
from megatron.checkpoint.selection import find_checkpoint
from megatron.config import CheckpointConfig
from megatron.errors import UserError
from tests.support.layouts import unconnected_run
from tests.unit.checkpoint.saved_runs import (
    FILE,
    Killed,
    Run,
    damage,
    digest,
    make_unreadable,
    old_folder,
    steps_in,
)


def test_latest_set_by_hand_is_used_and_the_abandoned_branch_is_replaced_name_by_name(tmp_path):
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
    # Only checkpoints of the lineage are deleted: 6 and 8 belong to the abandoned branch.
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
def test_after_a_kill_during_the_rename_the_newest_complete_checkpoint_is_resumed(
    at, first, tmp_path, monkeypatch
):
    """With `at` "rename" the new checkpoint is not in place yet. At later steps it is in place, whatever
    `latest` names."""
    run = Run(tmp_path, tmp_path)
    if not first:
        run.save(2)

    def die(*_):
        raise Killed

    where = {
        "rename": "megatron.checkpoint.saving.publishing.os.rename",
        "latest": "megatron.checkpoint.saving.publishing.set_latest",
        "record": "megatron.checkpoint.lineage.identity._write",
    }[at]
    entry = run.write(4)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        if at == "record":
            publishing.record_upcoming(tmp_path, entry, run.identity)
            patch.setattr(publishing, "record_upcoming", lambda *_: None)
        patch.setattr(where, die)
        publishing.Folder(tmp_path).publish(run.saving(entry), entry, run.identity)
    again = Run(tmp_path, tmp_path)
    before = None if first else "global_step2"
    assert again.started_from == (before if at == "rename" else "global_step4")
    if at == "latest":
        assert "the job was killed before latest could name global_step4" in again.start.skip_reason
    again.save(6)
    assert Run(tmp_path, tmp_path).started_from == "global_step6"
    assert not list(tmp_path.glob("saving-*"))


@pytest.mark.parametrize("content", [b"", b" \r\n", b"\xff\x00", None])
def test_with_a_damaged_latest_the_newest_of_this_run_is_resumed_not_the_highest_number(content, tmp_path):
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
    with pytest.raises(UserError, match="global_step4: run.json cannot be read"):
        find_latest(tmp_path)


def test_without_latest_and_its_record_one_lineage_is_resumed_and_two_are_refused(tmp_path):
    Run(tmp_path, tmp_path).save(2, 4)
    for name in ("latest", "latest.json"):
        (tmp_path / name).unlink()
    assert find_latest(tmp_path).folder.name == "global_step4"
    Run(tmp_path / "other", tmp_path / "other").save(20)
    (tmp_path / "other" / "global_step20").rename(tmp_path / "global_step20")
    with pytest.raises(UserError, match=r"global_step4 \(run .*global_step20 \(run .*write the name"):
        find_latest(tmp_path)
    (tmp_path / "latest").write_text("global_step4")
    assert find_latest(tmp_path).folder.name == "global_step4"


def test_instead_of_a_damaged_checkpoint_its_parent_is_resumed_not_another_branch(tmp_path):
    Run(tmp_path, tmp_path).save(2, 4, 6)
    (tmp_path / "latest").write_text("global_step2")
    Run(tmp_path, tmp_path).save(3, 5)
    for file in (FILE, "run.json"):
        damage(tmp_path, 5, file)
        assert find_latest(tmp_path).folder.name == "global_step3"
    run = Run(tmp_path, tmp_path).save(5)
    assert run.started_from == "global_step3"  # the damaged checkpoint was replaced without a flag


def test_a_latest_that_names_no_checkpoint_is_an_error_with_the_existing_ones(tmp_path):
    Run(tmp_path, tmp_path).save(2, 4, 6)
    (tmp_path / "latest").write_text("global_step3")
    words = r"names global_step3, which does not exist; the folder holds global_step6, global_step4, global_s"
    with pytest.raises(UserError, match=words):
        Run(tmp_path, tmp_path)
    # A run that started from another folder does not return to that folder either.
    Run(tmp_path / "B", tmp_path / "global_step4").save(5)
    (tmp_path / "B" / "latest").write_text("global_step3")
    for load in (tmp_path / "global_step4", tmp_path):
        with pytest.raises(UserError, match="names global_step3, which does not exist"):
            Run(tmp_path / "B", load)


def test_a_latest_that_the_program_wrote_may_name_a_removed_checkpoint(tmp_path):
    Run(tmp_path, tmp_path).save(2, 4)
    shutil.rmtree(tmp_path / "global_step4")
    words = "latest names global_step4, which does not exist; the folder holds global_step2"
    assert words in Run(tmp_path, tmp_path).start.skip_reason
    run = Run(tmp_path, tmp_path / "global_step2").save(3)
    assert run.started_from == "global_step2" and Run(tmp_path, tmp_path).started_from == "global_step3"
    for path in tmp_path.glob("global_step*"):
        shutil.rmtree(path)
    with pytest.raises(UserError, match="the folder holds none: remove it to start from scratch"):
        Run(tmp_path, tmp_path)
    (tmp_path / "latest").unlink()
    assert Run(tmp_path, tmp_path).start is None


def test_a_kill_after_a_checkpoint_was_set_aside_leaves_its_parent(tmp_path, monkeypatch):
    Run(tmp_path, tmp_path).save(2, 4)
    damage(tmp_path, 4)
    (tmp_path / "global_step4" / "mine").mkdir()
    run, rename = Run(tmp_path, tmp_path), os.rename

    def rename_once(source, target):
        if "unknown-" not in str(target):
            raise Killed
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(publishing.os, "rename", rename_once)
        run.save(4)
    assert steps_in(tmp_path) == [2] and (tmp_path / "latest").read_text() == "global_step4"
    assert Run(tmp_path, tmp_path).started_from == "global_step2"


def test_only_an_unreadable_checkpoint_to_resume_from_stops_the_start(tmp_path, monkeypatch):
    run = Run(tmp_path, tmp_path).save(1, 2, 4)
    make_unreadable(monkeypatch, tmp_path / "global_step1" / "run.json", tmp_path / "global_step2")
    again = Run(tmp_path, tmp_path)
    assert again.started_from == "global_step4" and again.identity.run_id == run.identity.run_id
    (tmp_path / "latest").write_text("global_step4\n")  # without `latest.json`, by its own lineage
    (tmp_path / "latest.json").unlink()
    assert Run(tmp_path, tmp_path).started_from == "global_step4"
    with pytest.raises(UserError, match=r"holds checkpoints of another run \(global_step1, "):
        Run(tmp_path)
    (tmp_path / "latest").write_text("global_step1")
    with pytest.raises(OSError, match="Input/output error"):
        Run(tmp_path, tmp_path)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("file", ["latest", "latest.json", "global_step4/run.json", f"global_step4/{FILE}"])
def test_a_file_that_cannot_be_read_now_is_read_again_and_never_skipped(code, file, tmp_path, monkeypatch):
    """An older checkpoint must not replace a checkpoint that is unreachable for some seconds."""
    Run(tmp_path / "A", tmp_path / "A").save(2)
    run = Run(tmp_path / "B", tmp_path / "A").save(3, 4)
    path, waits = str(run.folder / file), []
    failures = 0

    def failing(function):
        def call(name, *args, **kwargs):
            nonlocal failures
            if str(name) == path and failures:
                failures -= 1
                raise OSError(code, os.strerror(code))
            return function(name, *args, **kwargs)

        return call

    monkeypatch.setattr(os, "open", failing(os.open))
    if file.endswith(FILE):
        monkeypatch.setattr(Path, "stat", failing(Path.stat))
    monkeypatch.setattr(checkpoint_files.time, "sleep", waits.append)
    failures = 2
    assert find_latest(run.folder).folder.name == "global_step4" and waits == [0.1, 0.4]
    for load in (tmp_path / "A", tmp_path / "B"):
        failures = 1000
        options = CheckpointConfig(load=str(load), save=str(run.folder))
        with pytest.raises(UserError, match=f"{path} cannot be accessed now .{os.strerror(code)}"):
            find_checkpoint(unconnected_run(replace(run.config, checkpoint=options), 100, {}))


def test_latest_of_a_folder_from_before_run_ids_is_used(tmp_path):
    old_folder(tmp_path, 2, 4, 6)
    (tmp_path / "latest").write_text("global_step2")
    run = Run(tmp_path, tmp_path).save(4)
    assert run.started_from == "global_step2" and Run(tmp_path, tmp_path).started_from == "global_step4"


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b"[" * 100_000])
def test_a_damaged_latest_json_is_ignored(content, tmp_path):
    Run(tmp_path, tmp_path).save(2, 4)
    (tmp_path / "latest.json").write_bytes(content)
    assert read_latest_record(tmp_path) is None and Run(tmp_path, tmp_path).started_from == "global_step4"


def test_latest_set_by_hand_is_used_after_a_kill_before_latest_json_was_written(tmp_path, monkeypatch):
    Run(tmp_path, tmp_path).save(4)
    with monkeypatch.context() as patch:
        patch.setattr(identity_module, "_write", fail_after_upcoming(identity_module._write))
        Run(tmp_path, tmp_path).save(6)
    assert Run(tmp_path, tmp_path).started_from == "global_step6"
    (tmp_path / "latest").write_text("global_step4")
    os.utime(tmp_path / "latest", ns=(2**61, 2**61))  # later than the record, on any clock
    assert Run(tmp_path, tmp_path).started_from == "global_step4"


def fail_after_upcoming(write):
    def fail(folder, record):
        if record.upcoming is None:
            raise OSError("no space left on device")
        write(folder, record)

    return fail
