"""After nodes were lost, a start selects a complete local checkpoint, and the run trains to the losses of an
uninterrupted run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.lineage.identity import read_local_entries
from megatron.errors import UserError
from tests.support.checkpoints import state_after
from tests.support.layouts import FP32_BOUND, Row, relative_errors, train, train_layout
from tests.support.local_saves import run_on_nodes, start
from tests.support.pool import WorldError, run_world
from tests.unit.checkpoint.native_folder import flip_a_byte

STEPS = 7
# Step 2 is saved in --save, the later steps on the nodes' disks.
SAVES = {2: "shared", 3: "local", 4: "local", 5: "local"}


def disk(folder: Path, node: str) -> Path:
    """Returns the folder of the run on a node's disk."""
    (found,) = (folder / "disks" / node).iterdir()
    return found


def names_on(folder: Path, node: str) -> list[str]:
    return sorted(path.name for path in disk(folder, node).iterdir() if path.is_dir())


@cache
def uninterrupted(row: Row) -> list[tuple[float, float]]:
    return run_world(row.world_size, train_layout, row, STEPS)[0]


def train_and_stop(row: Row, folder: Path, nodes: Sequence[str], saves: dict[int, str] = SAVES) -> None:
    """Trains to the step of the last save, and asserts that the losses equal a run without saves."""
    last = max(saves)
    results = run_world(row.world_size, run_on_nodes, row, folder, nodes, last, saves)
    assert all(history == uninterrupted(row)[:last] for _, _, history in results)


def resume(row: Row, folder: Path, nodes: Sequence[str], **settings: Any) -> tuple[int, str]:
    """Resumes and trains to STEPS. Returns (step of the start, log line of the start). Asserts that the
    losses equal an uninterrupted run to the last bit."""
    results = run_world(row.world_size, run_on_nodes, row, folder, nodes, STEPS, {}, **settings)
    step, line, _ = results[0]
    assert all(history == uninterrupted(row)[step:] for _, _, history in results)
    return step, line


ROWS = {
    "DP 4, ZeRO-1": Row(dp=4, zero=1, micro_batch=2),
    "TP 2 x PP 2": Row(tp=2, pp=2, micro_batch=2),
    "DP 4, no ZeRO": Row(dp=4, micro_batch=2),
    "PP 4": Row(pp=4, micro_batch=2),
    "PP 2 x DP 2, fp16": Row(pp=2, dp=2, zero=1, micro_batch=2, precision="fp16"),
    "DP 2, ZeRO-3, bf16": Row(dp=2, zero=3, micro_batch=2, precision="bf16"),
}


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", ROWS)
def test_one_lost_node_costs_no_step_and_two_adjacent_ones_only_the_local_checkpoints(
    name: str, tmp_path: Path
) -> None:
    row, folder, copy = ROWS[name], tmp_path / "run", tmp_path / "copy"
    nodes = [f"n{rank}" for rank in range(row.world_size)]
    train_and_stop(row, folder, nodes)
    for node in nodes:
        assert names_on(folder, node) == ["global_step4", "global_step5"]
    shutil.copytree(folder, copy)
    shutil.rmtree(folder / "disks" / nodes[-1])
    step, line = resume(row, folder, [*nodes[:-1], "spare"])
    assert step == 5 and "global_step5, iteration 5 (local checkpoint, newer than " in line
    assert "copied from other nodes to " in line
    if name in ("DP 4, ZeRO-1", "PP 4"):  # otherwise also from other nodes
        assert line.endswith(" of its files were copied from other nodes to spare")
    shutil.rmtree(folder)
    copy.rename(folder)
    for node in nodes[:2]:
        shutil.rmtree(folder / "disks" / node)
    step, line = resume(row, folder, nodes)
    assert step == 2 and "save/global_step2, iteration 2 (" in line
    reason = "is incomplete: no node has an intact copy" if row.world_size > 2 else "no node has run.json"
    assert line.count(reason) == 2  # global_step5 and global_step4


TP_DP = Row(tp=2, dp=2, zero=1, micro_batch=2)
# Name -> (row and nodes that save, the lost node, row and nodes that resume).
CHANGES = {
    "two ranks per node": (TP_DP, "aabb", "b", TP_DP, "aacc"),
    "fewer nodes": (TP_DP, "aabb", "b", Row(pp=2), "aa"),
    "more nodes": (Row(pp=2), "ab", "a", Row(tp=2, pp=2, micro_batch=2), "bbcd"),
    "three nodes": (Row(pp=3), "abc", "b", Row(pp=3), "adc"),
    "unequal nodes": (Row(dp=4, zero=1), "aabc", "a", Row(tp=4), "dbce"),
    "ranks in turn": (Row(dp=4, zero=1), "abab", "a", Row(dp=2, pp=2), "bbbb"),
    "one rank": (Row(tp=2, pp=2), "abcd", "c", Row(), "a"),
}


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", CHANGES)
def test_other_nodes_and_layouts_resume_after_a_lost_node(name: str, tmp_path: Path) -> None:
    row, nodes, lost, other, other_nodes = CHANGES[name]
    train_and_stop(row, tmp_path, nodes)
    shutil.rmtree(tmp_path / "disks" / lost)
    results = run_world(other.world_size, run_on_nodes, other, tmp_path, other_nodes, STEPS, {6: "local"})
    for step, line, history in results:
        if name == "one rank":  # the files of one rank are on the nodes c and d
            assert step == 2 and "no node has an intact copy" in line
        else:
            assert step == 5 and "(local checkpoint, newer than " in line
        assert max(relative_errors(history, uninterrupted(row)[step:])) <= FP32_BOUND


def test_a_damaged_file_is_replaced_by_its_copy_and_two_damaged_copies_by_an_older_checkpoint(
    tmp_path: Path,
) -> None:
    row, nodes = Row(dp=2, zero=1), ["a", "b"]
    train_and_stop(row, tmp_path, nodes)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    paths = [disk(tmp_path, node) / "global_step5" / name for node in nodes]
    flip_a_byte(paths[1])
    step, line = resume(row, tmp_path, nodes)
    assert step == 5 and "1 of its files were copied from other nodes to b" in line
    paths[0].unlink()
    flip_a_byte(paths[1])
    step, line = resume(row, tmp_path, nodes)
    assert step == 4
    assert f"global_step5 is incomplete: no node has an intact copy of {name}" in line


def save_without_index(*arguments: Any) -> None:
    """Trains like `run_on_nodes`, but `run.json` has no index, as if its index were too large."""
    from megatron.checkpoint.formats import native_writer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_writer, "within_limit", lambda *contents: contents[-1])
        run_on_nodes(*arguments)


@pytest.mark.full
def test_without_an_index_a_node_gets_all_files(tmp_path: Path) -> None:
    row = Row(dp=2, zero=1)
    run_world(2, save_without_index, row, tmp_path, "ab", 5, SAVES)
    shutil.rmtree(tmp_path / "disks" / "b")
    step, line = resume(row, tmp_path, "ac")
    assert step == 5 and line.endswith(". 2 of its files were copied from other nodes to c")


@pytest.mark.full
def test_a_checkpoint_that_cannot_be_copied_is_not_tried_again(tmp_path: Path) -> None:
    row = Row(dp=2, zero=1)
    train_and_stop(row, tmp_path, "ab")
    shutil.rmtree(disk(tmp_path, "b") / "global_step5")
    (disk(tmp_path, "b") / "global_step5").write_text("no folder")
    with pytest.raises(WorldError, match="global_step5: rank 1 cannot copy a file .*File exists"):
        resume(row, tmp_path, "ab")
    assert resume(row, tmp_path, "ab")[0] == 4


# Name -> (saves, what happens after them, step of the next start).
CHOICES = {
    "only local checkpoints": ({1: "local", 2: "local"}, "", 2),
    "a newer one in --save": ({1: "local", 2: "local", 3: "shared"}, "", 3),
    "an older one in --save": (SAVES, "", 5),
    "latest set to an older one": ({1: "shared", 2: "shared", 3: "local"}, "latest global_step1", 1),
    "newest in --save damaged": ({1: "shared", 2: "shared", 3: "local"}, "damage global_step2", 3),
    "older local one": ({1: "shared", 2: "local", 3: "shared"}, "damage global_step3", 2),
    "no latest_local": (SAVES, "remove latest_local", 2),
    "latest_local damaged": (SAVES, "write latest_local", 2),
    "no --save": (SAVES, "remove .", 0),
    "empty disks": (SAVES, "remove ../disks", 2),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[int, str]], Path]:
    """Returns a function that returns the folder of a run with the given saves, as the run left it.

    The run has one process on node a. It trains once per set of saves; then its folder is copied back to its
    old path.
    """

    @cache
    def train_once(saves: tuple[tuple[int, str], ...]) -> Path:
        folder = tmp_path_factory.mktemp("written")
        run_world(1, run_on_nodes, Row(), folder / "run", "a", max(saves)[0], dict(saves))
        (folder / "run").rename(folder / "original")
        return folder

    def restore(saves: dict[int, str]) -> Path:
        folder = train_once(tuple(saves.items()))
        shutil.rmtree(folder / "run", ignore_errors=True)
        return shutil.copytree(folder / "original", folder / "run")

    return restore


def select_on_one_node(folder: Path) -> tuple[int, str]:
    started = start(Row(), folder, "a")
    return started.state.iteration, started.line


@pytest.mark.parametrize("name", CHOICES)
def test_a_start_takes_the_newest_checkpoint_of_its_run(
    name: str, written: Callable[[dict[int, str]], Path]
) -> None:
    saves, event, expected = CHOICES[name]
    folder = written(saves)
    kind, _, value = event.partition(" ")
    target = folder / "save" / value
    if kind == "latest":
        (folder / "save" / "latest").write_text(value)
    elif kind == "damage":
        flip_a_byte(target / "mp_rank_00_model_states.pt")
    elif kind == "write":
        target.write_text(target.read_text().replace('"iteration": 5', '"iteration": 6'))
    elif target.is_dir() and kind:
        shutil.rmtree(target)
    elif kind:
        target.unlink()
    ((step, line),) = run_world(1, select_on_one_node, folder)
    assert step == expected, line


def save_after_a_local_resume(folder: Path) -> list[Any]:
    started = start(Row(), folder, "a", keep_last=1)
    train(started.manager.engine, [started.state.iteration])
    saved = started.manager.save(state_after(started.state.iteration + 1))
    started.manager.finish_save()
    assert saved is not None
    found = open_checkpoint(saved)
    return [started.state.iteration, found.run_id, [entry.name for entry in found.lineage]]


def test_the_run_continues_in_save_after_a_local_resume(written: Callable[[dict[int, str]], Path]) -> None:
    """The run keeps its run id, and the local checkpoint is not in the lineage of later checkpoints."""
    folder = written(SAVES)
    before = open_checkpoint(folder / "save" / "global_step2")
    ((step, run_id, lineage),) = run_world(1, save_after_a_local_resume, folder)
    assert (step, run_id, lineage) == (5, before.run_id, ["global_step2"])
    assert [path.name for path in (folder / "save").glob("global_step*")] == ["global_step6"]
    assert run_world(1, select_on_one_node, folder)[0][0] == 6


def start_from_another_run(folder: Path, base: Path) -> tuple[int, str]:
    """Starts from a checkpoint of another run, takes one step, and saves only locally."""
    started = start(Row(), folder, "a", load=str(base))
    step = started.state.iteration
    train(started.manager.engine, [step])
    assert started.manager.save_local(state_after(step + 1))
    started.manager.finish_save()
    return step, started.line


@pytest.mark.full
def test_a_run_that_started_from_another_one_resumes_before_its_first_checkpoint(tmp_path: Path) -> None:
    run_world(1, run_on_nodes, Row(), tmp_path / "base", "a", 2, {2: "shared"})
    for step in (2, 3, 4):
        ((found, line),) = run_world(1, start_from_another_run, tmp_path, tmp_path / "base" / "save")
        assert found == step, line


def fail_to_save(folder: Path, victim: int | None) -> list[Any]:
    """Saves locally three times. During the second save a node's disk rejects writes; with victim None, rank
    0 instead fails with an unexpected error."""
    import torch.distributed as dist

    from megatron.checkpoint.manager import CheckpointManager

    nodes = ["a", "b"]
    started = start(Row(dp=2, zero=1), folder, nodes)
    manager, outcomes = started.manager, []
    broken = disk(folder, nodes[victim or 0])
    for step in range(3):
        train(manager.engine, [step])
        dist.barrier()
        if step == 1 and dist.get_rank() == victim:
            broken.rename(broken.with_name("aside"))
            broken.write_text("no folder")
        dist.barrier()
        with pytest.MonkeyPatch.context() as patch:
            if step == 1 and victim is None:
                patch.setattr(CheckpointManager, "_with_files", lambda *arguments: {}["no such key"])
            assert manager.save_local(state_after(step + 1))
            outcome = manager.finish_save()
        assert outcome is not None
        outcomes.append(outcome.problem)
        if step == 1 and victim is None:
            assert all(names_on(folder, node) == ["global_step1"] for node in nodes)
        if step == 1 and dist.get_rank() == victim:
            broken.unlink()
            broken.with_name("aside").rename(broken)
        dist.barrier()
    assert manager.save(state_after(3)) is not None and not manager.background.last_has_failed
    return [outcomes, [entry.name for entry in read_local_entries(folder / "save")]]


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("victim", [0, 1, None])
def test_a_failed_local_save_concerns_no_other_save(victim: int | None, tmp_path: Path) -> None:
    for outcomes, entries in run_world(2, fail_to_save, tmp_path, victim):
        first, second, third = outcomes
        assert first == "" and third == ""
        assert second.startswith("'no such key'" if victim is None else f"rank {victim}: ")
        assert entries == ["global_step1", "global_step3"]
    for node in "ab":
        assert names_on(tmp_path, node) == ["global_step1", "global_step3"]


def save_while_one_is_in_flight(folder: Path, kind: str) -> list[Any]:
    """Begins two saves while the writer of rank 1 is stopped."""
    import torch.distributed as dist

    started = start(Row(dp=2, zero=1), folder, ["a", "b"])
    manager, is_second = started.manager, dist.get_rank() == 1
    assert manager.background.writer is not None
    writer = manager.background.writer.process.pid
    if is_second:
        os.kill(writer, signal.SIGSTOP)
    train(manager.engine, [0])
    assert manager.save_local(state_after(1))
    train(manager.engine, [1])
    begun: bool | None = None
    if kind == "local":
        begun = manager.save_local(state_after(2))
    dist.barrier()
    if is_second:
        os.kill(writer, signal.SIGCONT)
    if kind == "shared":
        manager.save(state_after(2), in_background=True)
    manager.finish_save()
    outcomes = [(end.iteration, end.problem, end.is_local) for end in manager.background.take_outcomes()]
    return [begun, outcomes]


@pytest.mark.parametrize("kind", ["local", "shared"])
def test_one_save_is_in_flight_at_a_time(kind: str, tmp_path: Path) -> None:
    """While a save is in flight, a second local save is skipped, and a save to --save waits."""
    first = (1, "", True)
    for begun, outcomes in run_world(2, save_while_one_is_in_flight, tmp_path, kind):
        assert begun is (False if kind == "local" else None)
        assert outcomes == ([first] if kind == "local" else [first, (2, "", False)])


def roll_back(folder: Path) -> int:
    started = start(Row(), folder, "a")
    checkpoint = started.manager.rollback()
    assert checkpoint is not None
    return checkpoint.state.iteration


def test_a_rollback_forgets_the_local_checkpoints(written: Callable[[dict[int, str]], Path]) -> None:
    """The local checkpoints contain iterations that the rollback undoes, so a later start must not select
    them."""
    folder = written(SAVES)
    assert run_world(1, roll_back, folder) == [2]
    assert run_world(1, select_on_one_node, folder)[0][0] == 2


def connect(folder: Path, nodes: str) -> str:
    try:
        start(Row(dp=2), folder, nodes, save_local=str(folder / "disk"))
    except UserError as error:
        return str(error)
    return ""


def test_nodes_with_one_disk_are_refused(tmp_path: Path) -> None:
    """Each node sees the other node's file. All ranks raise the error of the first node."""
    errors = run_world(2, connect, tmp_path, "ab")
    assert "nodes b and a have one folder" in errors[0] == errors[1]
    assert not list((tmp_path / "disk").glob("*/.node-*"))
    assert run_world(2, connect, tmp_path, "aa") == ["", ""]


def test_latest_local_says_where_the_checkpoints_are(tmp_path: Path) -> None:
    run_world(2, run_on_nodes, Row(dp=2), tmp_path, "ab", 3, SAVES)
    record = json.loads((tmp_path / "save" / "latest_local").read_text())
    assert record["nodes"] == ["a", "b"] and record["folder"] == str(tmp_path / "disks" / "{node}")
    assert [entry["name"] for entry in record["entries"]] == ["global_step3"]
