"""A save deletes old checkpoints (--keep-last) and leftovers of killed jobs."""

import re
import shutil

import pytest

from megatron.checkpoint.discovery import find_latest, open_checkpoint
from megatron.checkpoint.saving import publishing
from megatron.config import CheckpointConfig
from tests.unit.checkpoint.saved_runs import FILE, Killed, Run, make_unreadable, steps_in
from tests.unit.hostile import snapshot


def test_save_retain_interval_keeps_milestones(tmp_path):
    Run(tmp_path, tmp_path, keep_last=2, save_retain_interval=10).save(*range(5, 45, 5))
    assert steps_in(tmp_path) == [10, 20, 30, 35, 40]


def test_a_protected_checkpoint_is_not_deleted(tmp_path):
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


def test_an_unreadable_old_checkpoint_stays_and_stops_no_other_deletion(tmp_path, monkeypatch, caplog):
    run = Run(tmp_path, tmp_path).save(1, 2, 3, 4)
    run.options = CheckpointConfig(save=str(tmp_path), keep_last=1)
    waits = make_unreadable(monkeypatch, tmp_path / "global_step3" / "run.json")
    run.save(5)
    assert steps_in(tmp_path) == [3, 5] and waits == []
    assert "global_step3 cannot be deleted: [Errno 5] Input/output error" in caplog.text


def test_an_unreadable_checkpoint_in_the_place_of_a_new_one_is_kept(tmp_path, monkeypatch, caplog):
    run = Run(tmp_path, tmp_path).save(1, 2)
    before = snapshot(tmp_path / "global_step2")
    with monkeypatch.context() as patch:
        make_unreadable(patch, tmp_path / "global_step2" / "run.json")
        run.save(2)
    (kept,) = tmp_path.glob("unknown-global_step2.*")
    assert snapshot(kept) == before and "cannot be read (Input/output error)" in caplog.text
    assert Run(tmp_path, tmp_path).started_from == "global_step2"


def test_the_next_save_finishes_a_deletion_that_was_killed(tmp_path, monkeypatch):
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


def test_leftovers_of_saves_are_removed_and_conversions_are_not(tmp_path):
    run = Run(tmp_path, tmp_path)
    ours = ("saving-global_step1", "saving-global_step2.0123abcd")
    others = ("saving-global_step3_universal", "global_step3_universal.partial", "saving-notes")
    for name in (*ours, *others):
        (tmp_path / name).mkdir()
    publishing.Folder(run.folder).begin("")
    assert {path.name for path in tmp_path.iterdir()} == set(others)


def test_an_interrupted_replacement_is_undone_or_finished_before_the_next_save(tmp_path):
    Run(tmp_path, tmp_path).save(1, 2)
    (tmp_path / "global_step1").rename(tmp_path / "global_step1.replaced")
    assert Run(tmp_path, tmp_path).started_from == "global_step2"
    publishing.Folder(tmp_path).begin("")
    assert steps_in(tmp_path) == [1, 2] and open_checkpoint(tmp_path / "global_step1")
    (tmp_path / "global_step2.replaced").mkdir()
    publishing.Folder(tmp_path).begin("")
    assert not (tmp_path / "global_step2.replaced").exists()


def test_keep_last_deletes_no_checkpoint_of_the_run_that_this_run_started_from(tmp_path):
    Run(tmp_path).save(2, 4, 6)
    flags = {"overwrite_checkpoints": True, "keep_last": 1}
    Run(tmp_path, tmp_path / "global_step4", **flags).save(5, 7)
    assert steps_in(tmp_path) == [2, 4, 6, 7]


def test_a_checkpoint_that_contains_another_run_is_neither_deleted_nor_replaced(tmp_path, caplog):
    run = Run(tmp_path, tmp_path, keep_last=1).save(2)
    other = Run(tmp_path / "B", tmp_path / "B").save(7)  # saved by an older version, or copied by hand
    nested = tmp_path / "global_step2" / "B"
    other.folder.rename(nested)
    before = snapshot(nested)
    unfinished = tmp_path / "saving-global_step3.0123abcd"
    shutil.copytree(nested, unfinished / "B")
    run.save(4, 5)
    assert snapshot(nested) == snapshot(unfinished / "B") == before and steps_in(tmp_path) == [2, 5]
    assert "global_step2 cannot be deleted: it contains B, which run.json does not list" in caplog.text
    (tmp_path / "latest").write_text("global_step2")
    Run(tmp_path, tmp_path, overwrite_checkpoints=True).save(2)
    (kept,) = tmp_path.glob("unknown-global_step2.*")
    assert snapshot(kept / "B") == before and str(kept) in caplog.text


def test_a_checkpoint_of_another_program_is_kept_under_another_name(tmp_path, caplog):
    Run(tmp_path, tmp_path).save(2)
    (tmp_path / "global_step4").mkdir()
    (tmp_path / "global_step4" / "mp_rank_00_model_states.pt").write_text("weights of another program")
    Run(tmp_path, tmp_path).save(4)
    (kept,) = tmp_path.glob("unknown-global_step4.*")
    assert (kept / "mp_rank_00_model_states.pt").read_text() == "weights of another program"
    assert str(kept) in caplog.text and Run(tmp_path, tmp_path).started_from == "global_step4"
