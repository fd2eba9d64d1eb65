"""--save-format dcp: the content equals a native save, PyTorch reads it without this program, and a run
resumes from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron.checkpoint.discovery import find_latest, open_checkpoint
from megatron.checkpoint.formats.dcp import DcpFolder
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.inspect import inspect_folder
from megatron.checkpoint.manager import load_checkpoint
from megatron.checkpoint.record import Checkpoint
from megatron.checkpoint.selection import find_damage
from megatron.commands import convert_checkpoint
from tests.distributed.parity import EIGHT_BIT, Changes
from tests.distributed.resharding import STEPS_BEFORE, resume_midway, uninterrupted
from tests.distributed.test_model_variants import LLAMA
from tests.support.checkpoints import FINGERPRINT, make_manager, state_after
from tests.support.layouts import FP32_BOUND, Row, build_engine, config_of, relative_errors, train
from tests.support.pool import run_world

NAME = f"global_step{STEPS_BEFORE}"
SGD: Changes = {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.9}}
OFFLOAD: Changes = {"parallel": {"cpu_offload": True}}
# A gated MLP has shards of two slices. With these sizes partitions end inside rows.
GATED: Changes = {"model": {**LLAMA, "ffn_hidden_size": 44}}
ROWS: dict[str, tuple[Row, Changes]] = {
    "TP 2 x PP 2 x DP 2, ZeRO-1": (Row(tp=2, pp=2, dp=2, zero=1), GATED),
    "DP 4, ZeRO-3, bf16": (Row(dp=4, zero=3, precision="bf16"), {}),
    "TP 2 x DP 2, no ZeRO, fp16": (Row(tp=2, dp=2, precision="fp16"), {}),
    "8-bit moments": (Row(tp=2, dp=2, zero=1, precision="bf16"), EIGHT_BIT),
    "CP 2, 8-bit moments, no ZeRO": (Row(cp=2, precision="bf16"), EIGHT_BIT),
    "CPU offload, ZeRO-2": (Row(dp=2, zero=2, precision="bf16"), OFFLOAD),
    "one process, momentum": (Row(), SGD),
    "PP 2, momentum": (Row(pp=2, dp=2, zero=1), SGD),
}


def save_in_all_ways(row: Row, folder: Path, changes: Changes) -> list[str]:
    """Saves one state in the native format, as DCP, and as DCP in the background, where training takes a step
    before the save is complete. Returns the names of this rank's parameters."""
    engine = build_engine(config_of(row, **changes))
    train(engine, range(STEPS_BEFORE))
    make_manager(engine, folder / "native").save(state_after(STEPS_BEFORE))
    options = {"save": str(folder), "save_format": "dcp"}
    engine.run = replace(engine.run, config=config_of(row, **{**changes, "checkpoint": options}))
    make_manager(engine, folder / "dcp").save(state_after(STEPS_BEFORE))
    # The ring buffer holds only a part of the state.
    options["async_save_memory_gb"] = 2e-5
    engine.run = replace(
        engine.run, config=config_of(row, **{**changes, "checkpoint": {**options, "async_save": True}})
    )
    manager = make_manager(engine, folder / "background")
    assert manager.save(state_after(STEPS_BEFORE), in_background=True) is None
    train(engine, [STEPS_BEFORE])
    outcome = manager.finish_save()
    assert outcome is not None and outcome.problem == "" and outcome.num_bytes > 0
    checks = load_checkpoint(engine, open_checkpoint(folder / "background" / NAME), FINGERPRINT)
    assert any("equal to the last bit" in check.result for check in checks)
    return [part.name for part in engine.optimizer.pieces(with_values=False)]


def without_identity(run: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in run.items() if key not in ("run_id", "sha256", "config")}
    kept["config"] = {**run["config"], "checkpoint": None}
    return kept


def states_of(checkpoint: Checkpoint) -> dict[tuple[str, str], torch.Tensor]:
    reader = open_reader(checkpoint)
    found = {
        (name, state): reader.read_unpadded(name, state)
        for name in reader.names
        for state in reader.state_names(name)
    }
    return {
        **found,
        **{
            (n, "step"): reader.optimizer_scalars(n)["step"]
            for n in reader.names
            if "step" in reader.optimizer_scalars(n)
        },
    }


def assert_equal(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for key in one:
        assert one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]), key


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("name", ROWS)
def test_a_run_saves_what_a_conversion_of_its_native_checkpoint_writes(name: str, tmp_path: Path) -> None:
    row, changes = ROWS[name]
    run_world(row.world_size, save_in_all_ways, row, tmp_path, changes)
    native, direct, background = (
        open_checkpoint(tmp_path / kind / NAME) for kind in ("native", "dcp", "background")
    )
    assert_equal(states_of(direct), states_of(native))
    assert open_reader(direct).loss_scaler == open_reader(native).loss_scaler is not None
    assert direct.run["certificate"] == native.run["certificate"]
    # The background save has equal bytes, the conversion has equal tensors.
    runs = [without_identity(checkpoint.run) for checkpoint in (direct, background)]
    files = [run.pop("files") for run in runs]
    assert runs[0] == runs[1] and files[0] == files[1]
    assert {path.name for path in direct.folder.iterdir()} == {*files[0], "run.json"}
    assert all(name.endswith(".distcp") or name == ".metadata" for name in files[0])
    convert_checkpoint.run(
        ["--from", str(native.folder), "--to", str(tmp_path / "converted"), "--format", "dcp"]
    )
    ours, theirs = DcpFolder(direct.folder), DcpFolder(tmp_path / "converted")
    assert_equal(*({key: part.read(key) for key in part.tensors} for part in (ours, theirs)))
    # No element is written twice, and several ranks write the chunks.
    numel = Counter[str]()
    for key, tensor in ours.tensors.items():
        for chunk in tensor.chunks:
            numel[key] += torch.Size(chunk.shape).numel()
        assert numel[key] == torch.Size(tensor.shape).numel()
    assert len(files[0]) - 1 >= min(row.world_size, 2)
    assert open_reader(background).verify() == (len(files[0]), [])
    assert_torch_reads(direct.folder, {key: ours.read(key) for key in ours.tensors}, tmp_path / "states.pt")
    overview = inspect_folder(tmp_path / "dcp", verify=True)
    assert overview.is_intact and overview.checkpoints[0].is_latest and overview.checkpoints[0].kind == "dcp"


def assert_torch_reads(folder: Path, expected: dict[str, torch.Tensor], file: Path) -> None:
    """Reads in both of torch's ways on one process: into a dict of tensors, and into a file of torch.save."""
    state = {key: torch.full_like(value, -1.0) for key, value in expected.items()}
    torch_dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert_equal(state, expected)
    dcp_to_torch_save(folder, file)
    nested = torch.load(file, weights_only=True)
    moments = nested.pop("optimizer", {})
    assert_equal({**nested, **{f"optimizer.{key}": value for key, value in moments.items()}}, expected)


def save_as_dcp(row: Row, folder: Path, changes: Changes) -> None:
    options = {"save": str(folder), "save_format": "dcp"}
    engine = build_engine(config_of(row, **{**changes, "checkpoint": options}))
    train(engine, range(STEPS_BEFORE))
    make_manager(engine, folder).save(state_after(STEPS_BEFORE))


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(
    "save, load",
    [
        (Row(tp=2, dp=2, zero=1), Row(pp=2, dp=2, zero=3)),
        (Row(pp=2, dp=2, zero=3), Row(tp=4)),
        (Row(dp=4), Row(tp=2, pp=2, dp=2, zero=1)),
    ],
    ids=str,
)
def test_a_run_resumes_from_its_dcp_checkpoint_on_another_layout(
    save: Row, load: Row, tmp_path: Path
) -> None:
    """Each load compares the digests of all weights and moments, and the canary loss (the loss of one fixed
    random sequence)."""
    run_world(save.world_size, save_as_dcp, save, tmp_path, GATED)
    for state, history in run_world(load.world_size, resume_midway, load, tmp_path / NAME, GATED):
        assert state == state_after(STEPS_BEFORE)
        loss_error, norm_error = relative_errors(history, uninterrupted(GATED))
        assert loss_error <= FP32_BOUND and norm_error <= FP32_BOUND


def change_the_format(folder: Path, formats: list[str]) -> list[str]:
    """Saves once in each format with --keep-last 2. Returns the remaining checkpoints."""
    row = Row(dp=2, zero=1)
    engine = build_engine(config_of(row))
    identity = None
    for step, name in enumerate(formats):
        train(engine, [step])
        options = {"save": str(folder), "save_format": name, "keep_last": 2}
        engine.run = replace(engine.run, config=config_of(row, checkpoint=options))
        manager = make_manager(engine, folder)
        manager.identity = identity
        manager.save(state_after(step + 1))
        identity = manager.identity
    manager.finish_save()
    valid = manager.newest_valid(False)
    return [*sorted(path.name for path in folder.glob("global_step*")), valid.folder.name if valid else ""]


def damage_found(folder: Path) -> str | None:
    return find_damage(open_checkpoint(folder), lambda: None)


def test_formats_mix_in_one_folder_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    """Covers --keep-last, `latest`, the search for checkpoints, and the tools. The newest checkpoint is first
    damaged, then incomplete."""
    kept = ["global_step3", "global_step4", "global_step4"]
    assert run_world(2, change_the_format, tmp_path, ["native", "dcp", "native", "dcp"]) == [kept, kept]
    newest = find_latest(tmp_path)
    assert newest is not None and (newest.folder.name, newest.format) == ("global_step4", "dcp")
    assert (tmp_path / "latest").read_text() == "global_step4"
    overview = inspect_folder(tmp_path)
    assert [(item.kind, item.is_latest) for item in overview.checkpoints] == [
        ("native", False),
        ("dcp", True),
    ]
    assert overview.checkpoint is not None and overview.checkpoint.kind == "dcp" and overview.is_intact
    file = newest.folder / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for problem in run_world(2, damage_found, newest.folder):
        assert "__1_0.distcp is damaged" in problem
    _, problems = open_reader(newest).verify()
    assert len(problems) == 1 and "__1_0.distcp is damaged" in problems[0]
    older = find_latest(tmp_path, {str(newest.folder): problem})
    assert older is not None and older.folder.name == "global_step3"
    for name in (file.name, ".metadata"):
        (newest.folder / name).rename(tmp_path / "away")
        found = find_latest(tmp_path)
        assert found is not None and found.folder.name == "global_step3"
        assert f"{name} is missing" in found.skip_reason
        (tmp_path / "away").rename(newest.folder / name)
