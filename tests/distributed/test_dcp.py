"""Checkpoints of torch.distributed.checkpoint: a run resumes from them on every layout."""

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.formats.registry import open_reader
from megatron.commands import convert_checkpoint
from tests.distributed.resharding import SHAPES, STEPS_BEFORE, resume_midway, save_before, uninterrupted
from tests.distributed.test_model_variants import LLAMA
from tests.support.checkpoints import state_after
from tests.support.layouts import FP32_BOUND, Row, relative_errors
from tests.support.pool import run_world

TP2 = Row(tp=2)
PP2 = Row(pp=2, micro_batch=2)


def converted(source: Path, target: Path, name: str) -> Path:
    convert_checkpoint.run(["--from", str(source), "--to", str(target), "--format", name])
    return target


def saved(folder: Path, row: Row, changes: dict) -> Path:
    run_world(row.world_size, save_before, row, folder, changes)
    return folder / f"global_step{STEPS_BEFORE}"


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("model, save, load", [({}, TP2, PP2), (LLAMA, SHAPES["tp4 dp2"], SHAPES["pp4 dp2"])])
def test_a_run_resumes_from_a_dcp_checkpoint_on_another_layout(
    model: dict, save: Row, load: Row, tmp_path: Path
) -> None:
    """Each load compares the digests of all weights and moments, and the canary loss (the loss of one fixed
    random sequence)."""
    changes = {"model": model}
    native = saved(tmp_path / "native", save, changes)
    folder = converted(native, tmp_path / "dcp", "dcp")
    returned = converted(folder, tmp_path / "returned", "native")
    expected = uninterrupted(changes)
    for source in (folder, returned):
        for state, history in run_world(load.world_size, resume_midway, load, source, changes):
            assert state == state_after(STEPS_BEFORE)
            loss_error, norm_error = relative_errors(history, expected)
            assert loss_error <= FP32_BOUND and norm_error <= FP32_BOUND


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_run_s_checkpoint_returns_from_dcp_with_its_bits(precision: str, tmp_path: Path) -> None:
    """The conversion to DCP and back keeps the weights in the run's precision, masters, moments, step and
    loss scale."""
    row = Row(tp=2, dp=2, zero=1, precision=precision)
    native = saved(tmp_path / "native", row, {})
    folder = converted(converted(native, tmp_path / "dcp", "dcp"), tmp_path / "returned", "native")
    ours, theirs = (open_reader(open_checkpoint(path)) for path in (folder, native))
    assert ours.loss_scaler == theirs.loss_scaler
    for name in theirs.names:
        assert ours.optimizer_scalars(name) == theirs.optimizer_scalars(name)
        for kind in theirs.state_names(name):
            assert torch.equal(ours.read_unpadded(name, kind), theirs.read_unpadded(name, kind))
    for layer in native.glob("layer_*"):
        before, after = (torch.load(path / layer.name) for path in (native, folder))
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
