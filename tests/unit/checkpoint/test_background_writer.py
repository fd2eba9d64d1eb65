"""Tests the process that writes a rank's files while training continues: bytes, digests, and its failures."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.digests import fragment_digests
from megatron.checkpoint.files import write_problem
from megatron.checkpoint.formats.archive_writer import save_archive
from megatron.checkpoint.formats.native_writer import NativeWriter
from megatron.checkpoint.formats.writing import Content
from megatron.checkpoint.saving.background import BackgroundSave
from megatron.checkpoint.saving.writer import BackgroundWriter
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec, Shard
from megatron.mpu.pieces import Piece
from tests.support.checkpoints import state_after

ROWS, COLUMNS = 300, 70
SPEC = ParameterSpec(global_shape=(2 * ROWS, COLUMNS), sharding=(Shard(0),))
AXES = (Axis("tp", 1, 2),)


def piece(values: torch.Tensor, first: int, kind: str) -> Piece:
    """Returns `values` as the elements of a parameter's shard from `first` on."""
    return Piece("weight", SPEC, AXES, first, first + values.numel(), {kind: values})


@pytest.fixture
def heartbeats() -> list[int]:
    return []


@pytest.mark.parametrize("ring_bytes", [64, 1000, 1 << 16, 1 << 20])
def test_the_files_are_those_of_torch_save_and_the_digests_those_of_the_tensors(
    ring_bytes: int, tmp_path: Path, heartbeats: list[int]
) -> None:
    """Covers ring buffers that are smaller than a tensor, and one whose size is not a power of 2. The second
    save contains nothing of the first. The writer does not load torch, which would take seconds and 200 MB
    per rank."""
    writer = BackgroundWriter(ring_bytes, lambda: heartbeats.append(1))
    for seed in (1, 2):
        torch.manual_seed(seed)
        flat = torch.randn(ROWS * COLUMNS + 10)
        values, moment = flat[10:], torch.randn(ROWS * COLUMNS)
        state = {
            "flat": flat,
            "moment": moment,
            "weights": torch.randn(7, dtype=torch.bfloat16),
            "step": seed,
        }
        path = tmp_path / f"{seed}.pt"
        pieces = [piece(values[:5000], 0, "fp32"), piece(values[5000:], 5000, "fp32")]
        pieces.append(piece(moment, 0, "exp_avg"))
        writer.write_file(path, [Content(partial(torch.save, state), pieces)])
        writer.write_file(None, [Content(partial(torch.save, moment), [piece(moment, 0, "other")])])
        writer.end_save()
        flat.zero_()  # training continues
        written = writer.written()
        assert written.problem == ""
        content = path.read_bytes()
        assert written.files == {
            path.name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        }
        read = torch.load(path, weights_only=True)
        assert torch.equal(read["weights"], state["weights"]) and read["step"] == seed
        assert torch.equal(read["moment"], moment)
        expected = fragment_digests(SPEC, AXES, 0, {"fp32": read["flat"][10:].clone(), "exp_avg": moment})
        assert written.digests == {"weight": {**expected, "other": expected["exp_avg"]}}
    assert len(heartbeats) >= 8
    loaded = Path(f"/proc/{writer.process.pid}/maps").read_text()
    assert "numpy" in loaded and "libtorch" not in loaded
    writer.close()


def test_a_missing_folder_is_the_result_of_the_save_and_an_error_of_the_next_one(tmp_path: Path) -> None:
    writer = BackgroundWriter(1 << 16, lambda: None)
    content = Content(partial(torch.save, torch.zeros(10)))
    writer.write_file(tmp_path / "folder" / "missing.pt", [content])
    writer.end_save()
    written = writer.written()
    assert "missing.pt: No such file" in written.problem
    with pytest.raises(OSError, match="missing.pt"):
        writer.write_file(tmp_path / "other.pt", [content])
    writer.close()


def test_a_failed_save_has_the_final_name_and_a_full_disk_is_called_so(tmp_path: Path) -> None:
    saving = tmp_path / "saving-global_step2.0a1b2c3d"
    facts = state_after(2), {}, 0.0, NativeWriter(saving), tmp_path / "global_step2"
    save = BackgroundSave(*facts, complete=lambda save, results: save.ended())
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    outcome = save.ended(write_problem(full, str(saving / "file.pt")))
    assert outcome.folder == tmp_path / "global_step2"
    assert outcome.problem == f"{outcome.folder}/file.pt: the disk is full"


@pytest.mark.parametrize("moment", ["before", "in the middle", "after"])
def test_a_writer_that_is_killed_is_named(moment: str, tmp_path: Path) -> None:
    """If the writer dies in the middle of the save, the rank waits for space in the ring buffer. Fails if
    this wait does not end."""
    writer = BackgroundWriter(1 << 16, lambda: None)
    large = torch.zeros(1 << 20)

    def save(file: object) -> None:
        if moment == "in the middle":
            os.kill(writer.process.pid, signal.SIGSTOP)
            os.kill(writer.process.pid, signal.SIGKILL)
        save_archive(large, file)

    if moment == "before":
        os.kill(writer.process.pid, signal.SIGKILL)
    problem = ""
    try:
        writer.write_file(tmp_path / "file.pt", [Content(save)])
        writer.end_save()
        written = writer.written()
        if moment == "after":
            assert not written.problem
            os.kill(writer.process.pid, signal.SIGKILL)
            while not problem:
                writer.write_file(tmp_path / "file.pt", [Content(save)])
    except OSError as error:
        problem = str(error)
    assert problem == "the checkpoint writer has ended with exit code -9"
    # A writer that dies after all files are on the disk does not spoil the save.
    assert writer.written() is not None and writer.written().problem == ("" if moment == "after" else problem)
    writer.close()
