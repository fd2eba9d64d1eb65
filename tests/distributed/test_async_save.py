"""A save in the background writes the files of a synchronous save, whatever training does meanwhile. If its
writer process dies, the save fails and training continues."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.manager import load_checkpoint
from tests.distributed.parity import EIGHT_BIT, Changes
from tests.distributed.test_universal import is_equal, torch_files_in
from tests.support.checkpoints import FINGERPRINT, all_tensors_staged, make_manager, state_after
from tests.support.layouts import Row, build_engine, config_of, train
from tests.support.pool import run_world

STEPS = 2
FILES = {".pt", ".distcp"}
ROWS = {
    "PP 2 x DP 2, fp16": Row(pp=2, dp=2, zero=1, precision="fp16"),
    "one process": Row(),
    "TP 2 x PP 2": Row(tp=2, pp=2),
    "DP 4, no ZeRO": Row(dp=4),
    "DP 2, ZeRO-1": Row(dp=2, zero=1),
    "DP 2, ZeRO-3, bf16": Row(dp=2, zero=3, precision="bf16"),
    "DP 2, ZeRO-2": Row(dp=2, zero=2),
    "8-bit moments": Row(dp=2, zero=1, precision="bf16"),
    "CPU offload": Row(dp=2, zero=1, precision="bf16"),
}
CHANGES: dict[str, Changes] = {
    "8-bit moments": EIGHT_BIT,
    "CPU offload": {"parallel": {"cpu_offload": True}},
}


def save_twice(row: Row, folder: Path, memory_gb: float | None, changes: Changes) -> None:
    """Saves synchronously into 'direct' and in the background into 'background'. Training takes a step before
    the background save is complete."""
    engine = build_engine(config_of(row, checkpoint={"async_save_memory_gb": memory_gb}, **changes))
    train(engine, range(STEPS))
    make_manager(engine, folder / "direct").save(state_after(STEPS))
    manager = make_manager(engine, folder / "background")
    assert manager.save(state_after(STEPS), in_background=True) is None
    train(engine, [STEPS])
    outcome = manager.finish_save()
    assert outcome is not None and outcome.problem == "" and outcome.num_bytes > 0
    writer = manager.background.writer
    assert writer is not None and (memory_gb or 0.5 * writer._size < writer.num_written + (1 << 24))
    assert memory_gb or writer.num_written <= writer._size
    assert list(manager.background.take_outcomes()) == [outcome] and manager.finish_save() is None
    found = open_checkpoint(folder / "background" / f"global_step{STEPS}")
    checks = load_checkpoint(engine, found, FINGERPRINT)
    assert any("equal to the last bit" in check.result for check in checks)
    # The replicas share the layer files, and each file is written once.
    names = [name for name in found.run["files"] if name.startswith("layer_")]
    assert len(names) == len(list(found.folder.glob("layer_*"))) > 0


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", ROWS)
def test_a_save_in_the_background_writes_what_a_save_at_once_writes(name: str, tmp_path: Path) -> None:
    """The writer's memory holds the whole state, or in the second case only a small part of the state at
    a time."""
    row = ROWS[name]
    for memory_gb in (None, 2e-5):
        folder = tmp_path / str(memory_gb)
        folder.mkdir()
        run_world(row.world_size, save_twice, row, folder, memory_gb, CHANGES.get(name, {}))
        direct, background = (folder / kind / f"global_step{STEPS}" for kind in ("direct", "background"))
        assert is_equal(torch_files_in(direct), torch_files_in(background))
        runs = [open_checkpoint(path).run for path in (direct, background)]
        for run in runs:
            for key in ("run_id", "sha256", "attempt"):
                run.pop(key, None)
        assert runs[0] == runs[1]
        assert open_reader(open_checkpoint(background)).verify()[1] == []


def save_staged(row: Row, folder: Path, save_format: str) -> None:
    """Saves one state three times: from host memory, and from tensors staged like a device's memory,
    synchronously and in the background."""
    engine = build_engine(config_of(row, checkpoint={"save_format": save_format}))
    train(engine, range(STEPS))
    make_manager(engine, folder / "plain").save(state_after(STEPS))
    with all_tensors_staged(1001):
        make_manager(engine, folder / "direct").save(state_after(STEPS))
        manager = make_manager(engine, folder / "background")
        assert manager.save(state_after(STEPS), in_background=True) is None
        outcome = manager.finish_save()
    assert outcome is not None and outcome.problem == ""


@pytest.mark.parametrize("save_format", ["native", "dcp"])
def test_a_save_from_a_device_writes_what_a_save_from_host_memory_writes(
    save_format: str, tmp_path: Path
) -> None:
    row = Row(dp=2, zero=1, precision="bf16")
    run_world(row.world_size, save_staged, row, tmp_path, save_format)
    plain, *staged = (tmp_path / kind / f"global_step{STEPS}" for kind in ("plain", "direct", "background"))
    for folder in staged:
        found = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in FILES}
        assert found == {path.name: path.read_bytes() for path in plain.iterdir() if path.suffix in FILES}
        assert len(found) > 1
        digests = [open_checkpoint(path).run["certificate"]["digests"] for path in (plain, folder)]
        assert digests[0] == digests[1] != {}


def lose_the_writer(folder: Path, victim: int, moment: str) -> list[Any]:
    """Saves in the background three times, and kills the writer of one rank in the second save."""
    engine = build_engine(config_of(Row(dp=2, zero=1)))
    manager = make_manager(engine, folder)
    ends = []
    for step in range(3):
        train(engine, [step])
        kill = lambda number: None  # noqa: E731
        if step == 1:
            manager.finish_save()
            if engine.global_rank == victim:
                kill = partial(os.kill, manager.background.writer.process.pid)
        kill(signal.SIGKILL if moment == "before the copy" else signal.SIGSTOP)
        saved = manager.save(state_after(step + 1), in_background=True)
        if moment == "after the copy":
            kill(signal.SIGKILL)
        ends.append(None if saved is None else saved.name)
    manager.finish_save()
    problems = [(outcome.iteration, outcome.problem) for outcome in manager.background.take_outcomes()]
    return [ends, problems]


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("moment", ["before the copy", "after the copy"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_save_whose_writer_dies_is_reported_and_the_next_one_is_at_once(
    victim: int, moment: str, tmp_path: Path
) -> None:
    for ends, problems in run_world(2, lose_the_writer, tmp_path, victim, moment):
        assert ends == [None, None, "global_step3"]
        (first, second) = problems
        assert first == (1, "")
        assert second == (2, f"rank {victim}: the checkpoint writer has ended with exit code -9")
    assert sorted(path.name for path in tmp_path.glob("global_step*")) == ["global_step1", "global_step3"]
    assert not list(tmp_path.glob("saving-*"))
