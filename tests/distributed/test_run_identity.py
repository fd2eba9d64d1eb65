"""Run identity on all ranks: all ranks resume from one checkpoint, and no rank writes into a folder of
another owner."""

import json
import os
from types import SimpleNamespace
from unittest import mock

import pytest

from megatron.checkpoint import manager
from megatron.checkpoint.discovery import find_latest
from megatron.checkpoint.lineage import start
from megatron.checkpoint.lineage.owner import ClaimFolder, Owner, acquire
from megatron.checkpoint.manager import FolderTakenError, SaveError
from megatron.checkpoint.saving.background import DirectFiles
from megatron.checkpoint.selection import find_checkpoint
from megatron.errors import UserError
from tests.distributed.test_integrity_record import make_copies_unequal
from tests.support.checkpoints import make_manager, state_after
from tests.support.layouts import Row, build_engine, config_of, train, unconnected_run
from tests.support.pool import run_world
from tests.unit.checkpoint.saved_runs import Run, steps_in


def save(manager, step):
    """Returns why the checkpoint was not saved, or None if it was saved."""
    try:
        manager.save(state_after(step))
    except (FolderTakenError, SaveError) as error:
        return f"{type(error).__name__}: {error}"
    return None


# --- one checkpoint for all ranks ---


def share(folder, failures, local_rank=0):
    """Lets rank 1 fail to open the checkpoint at the first `failures` attempts. Returns the checkpoint's name
    or the error, and the delays between the attempts."""
    rank, slept = int(os.environ["RANK"]), []
    opened = start.open_checkpoint

    def open_late(path, with_files):
        if len(slept) < failures:
            raise UserError("a stale cache")
        return opened(path, with_files)

    clock = SimpleNamespace(sleep=slept.append)
    with mock.patch.multiple(start, open_checkpoint=open_late, time=clock):
        found = find_latest(folder) if rank == 0 else None  # other ranks do not search
        try:
            shared = start.share_checkpoint(found, leads_node=local_rank == 0)
        except UserError as error:
            return str(error), slept
    return None if shared is None else shared.folder.name, slept


@pytest.mark.parametrize("failures", [0, 3, 100])
def test_every_rank_gets_the_checkpoint_of_rank_0_even_if_its_file_system_is_late(failures, tmp_path):
    Run(tmp_path, tmp_path).save(1, 2)
    (first, _), (second, slept) = run_world(2, share, tmp_path, failures)
    assert slept == list(start.RETRY_DELAYS_S[:failures])
    if failures == 100:
        assert first == second and "rank 1 cannot open the checkpoint that rank 0 resumes from" in first
        assert "a stale cache" in first and "all nodes share" in first
    else:
        assert first == second == "global_step2"


def test_only_the_first_rank_of_a_node_reads_the_checkpoint(tmp_path):
    Run(tmp_path, tmp_path).save(1, 2)
    assert run_world(2, share, tmp_path, 100, 1) == [("global_step2", [])] * 2


def test_without_a_checkpoint_all_ranks_initialize_from_scratch(tmp_path):
    assert run_world(2, share, tmp_path, 0) == [(None, []), (None, [])]


# --- which run may write into a folder ---


def save_and_lose_the_folder(folder):
    """Saves four times: as the owner of the folder, after a second owner took the folder, while a second
    owner takes it, and without one of the layout's files. Returns the outcomes."""
    engine = build_engine(config_of(Row(dp=2, zero=1)))
    rank_0 = engine.global_rank == 0
    outcomes, verified, save_file = [], manager.make_integrity_record, DirectFiles.write

    def lose_it(*args):
        if rank_0:
            take_over(folder)
        return verified(*args)

    def without_a_file(files, file, contents):
        save_file(files, file, contents)
        files.files = {n: f for n, f in files.files.items() if "mp_rank_00_model" not in n}

    for when in ("never", "before", "during"):
        owner = acquire(ClaimFolder(folder), Owner.of_this_process("n1"), print) if rank_0 else None
        if when == "before" and rank_0:
            take_over(folder)
        with mock.patch.object(manager, "make_integrity_record", lose_it if when == "during" else verified):
            outcomes.append(save(make_manager(engine, folder, owner), 1 + len(outcomes)))
        if rank_0:
            for file in folder.glob("owner-*"):
                file.unlink()
    with mock.patch.object(DirectFiles, "write", without_a_file):
        outcomes.append(save(make_manager(engine, folder), 9))
    return outcomes


def take_over(folder):
    (old,) = folder.glob("owner-*")
    other = json.loads(old.read_text()) | {"token": "of another", "job": "72", "host": "n2"}
    (folder / "owner-000099.json").write_text(json.dumps(other))
    old.unlink()


def test_a_job_that_lost_its_folder_stops_on_all_ranks_and_writes_nothing(tmp_path):
    """A save in which a file of the layout is missing also fails on all ranks."""
    outcomes = run_world(2, save_and_lose_the_folder, tmp_path)
    for saved, before, during, lacking in outcomes:
        assert saved is None
        for sentence in (before, during):
            assert "FolderTakenError" in sentence and "was taken over by Slurm job 72 on n2" in sentence
        assert "SaveError" in lacking and "mp_rank_00_model_states.pt is missing" in lacking
    assert steps_in(tmp_path) == [1] and (tmp_path / "latest").read_text() == "global_step1"


def save_in_turn(folder):
    """Lets two runs save into one folder without knowing of each other."""
    first, second = (make_manager(build_engine(config_of(Row())), folder) for _ in range(2))
    return [save(first, 2), save(second, 2), save(second, 3), save(first, 3)]


def test_two_jobs_do_not_overwrite_each_others_checkpoints(tmp_path):
    ((first, taken, second, taken_too),) = run_world(1, save_in_turn, tmp_path)
    assert first is second is None
    assert "global_step2 belongs to another run" in taken and "global_step3 belongs" in taken_too


# --- --keep-last with replicas that differ ---


def save_good_then_unequal(folder):
    """Saves four checkpoints, and makes the replicas differ before the third. Then rolls back, and saves a
    fifth."""
    options = {"keep_last": 1, "save": str(folder), "load": str(folder)}
    engine = build_engine(config_of(Row(tp=2), checkpoint=options))
    checkpoints = make_manager(engine, folder)
    checkpoints.restore_or_init(None, lambda text: None)
    train(engine, range(1))
    for step in (1, 2, 3, 4):
        if step == 3:
            make_copies_unequal(engine)
        assert save(checkpoints, step) is None
    back = checkpoints.rollback()
    # The fifth checkpoint descends from the second.
    return back.folder.name, save(checkpoints, 5)


@pytest.mark.full
def test_keep_last_keeps_the_newest_checkpoint_with_equal_replicas(tmp_path):
    """Checkpoint 4 replaced 3. Checkpoint 2, the last one with equal replicas, was kept, and the rollback
    loaded it."""
    assert run_world(2, save_good_then_unequal, tmp_path) == [("global_step2", None)] * 2
    run = json.loads((tmp_path / "global_step5" / "run.json").read_text())
    assert [entry["name"] for entry in run["lineage"]] == ["global_step1", "global_step2"]
    # Checkpoint 4, whose replicas differ, is not in the lineage of 5.
    assert steps_in(tmp_path) == [4, 5] and not run["certificate"]["unequal_copies"]
    config = config_of(Row(), checkpoint={"load": str(tmp_path), "save": str(tmp_path)})
    assert find_checkpoint(unconnected_run(config)).folder.name == "global_step5"
