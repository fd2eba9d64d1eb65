"""Tests which lineage, layout and files `run.json` may contain."""

import pytest

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.files import (
    describe_file,
    first_size_mismatch,
)
from megatron.checkpoint.formats.deepspeed_files import missing_files, unneeded_files
from megatron.checkpoint.lineage.identity import MAX_LINEAGE, LineageEntry, RunIdentity
from megatron.errors import UserError
from tests.unit.checkpoint.native_folder import change_run
from tests.unit.checkpoint.saved_runs import Run


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
    change_run(tmp_path / "global_step2", lambda run: run.update(change))
    with pytest.raises(UserError, match=f"run.json.*{words}"):
        open_checkpoint(tmp_path / "global_step2")


def test_the_lineage_is_bounded():
    identity = RunIdentity()
    for step in range(MAX_LINEAGE + 5):
        identity = identity.with_checkpoint(
            LineageEntry(f"global_step{step}", step, identity.run_id, "0" * 64)
        )
    assert len(identity.lineage) == MAX_LINEAGE and identity.lineage[-1].iteration == MAX_LINEAGE + 4


def test_a_rollback_truncates_the_lineage():
    entries = tuple(LineageEntry(f"global_step{step}", step) for step in (1, 2, 3))
    assert RunIdentity(lineage=entries).rolled_back_to("global_step2").lineage == entries[:2]


def layout(tensor, pipeline, data, zero, parameters=("tied_modules.embed.x", "3.a", "3.b", "8.weight")):
    sizes = {"tensor_model": tensor, "pipeline_model": pipeline, "data": data}
    degrees = {f"{kind}_parallel_size": size for kind, size in sizes.items()}
    record = {"whole_shape": [4], "shard_dim": None, "blocks": 1, "used_rows": None}
    return {"layout": {**degrees, "zero_stage": zero}, "parameters": dict.fromkeys(parameters, record)}


LAYERS = {f"layer_{layer:02d}-model_{rank:02d}-model_states.pt" for layer in (1, 3, 8) for rank in (0, 1)}


RANKS = {f"mp_rank_{rank:02d}_model_states.pt" for rank in range(4)}


ZERO = {f"zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt" for data in (0, 1, 2) for rank in range(4)}


def test_missing_files_of_a_layout_are_found():
    assert missing_files(LAYERS | RANKS | ZERO, layout(2, 2, 3, 1)) == []
    assert missing_files(LAYERS | RANKS, layout(2, 2, 3, 0)) == []
    run = layout(2, 2, 1, 1)
    run["layout"]["context_parallel_size"] = 3  # ZeRO shards over DP x CP ranks
    assert missing_files((LAYERS | RANKS | ZERO) - {max(ZERO)}, run) == [max(ZERO)]
    assert missing_files(LAYERS | RANKS | {f"bf16_{name}" for name in ZERO}, layout(2, 2, 3, 1)) == []
    for name in (min(LAYERS), max(RANKS), max(ZERO)):
        assert missing_files((LAYERS | RANKS | ZERO) - {name}, layout(2, 2, 3, 1)) == [name]
    assert len(missing_files(LAYERS | RANKS, layout(10**6, 10**6, 10**6, 1))) == 1
    assert missing_files(set(), {}) == []  # early checkpoints have no layout


def test_a_checkpoint_without_one_of_its_files_is_refused_by_name(tmp_path):
    Run(tmp_path, tmp_path).save(2)
    file = tmp_path / "global_step2" / "mp_rank_00_model_states.pt"
    file.touch()
    change_run(file.parent, lambda run: run["files"].update({file.name: describe_file(file)}))
    change_run(file.parent, lambda run: run.update(layout(1, 1, 1, 0, ("1.a", "3.a"))))
    with pytest.raises(UserError, match="layer_03-model_00-model_states.pt was never written"):
        open_checkpoint(file.parent)


def test_only_with_zero_the_mp_rank_files_are_not_needed():
    for zero, unneeded in ((0, set()), (1, RANKS), (3, RANKS)):
        run = {**layout(2, 2, 3, zero), "files": dict.fromkeys(LAYERS | RANKS | ZERO, {})}
        assert unneeded_files(run) == unneeded
    assert unneeded_files({"files": dict.fromkeys(RANKS, {})}) == set()


def test_an_unneeded_file_may_be_missing_but_not_truncated(tmp_path):
    file = tmp_path / "mp_rank_00_model_states.pt"
    file.write_bytes(b"state")
    files = {file.name: {"bytes": 5, "sha256": ""}}
    assert first_size_mismatch(tmp_path, files, {file.name}) is None
    file.write_bytes(b"stat")
    assert "has 4 bytes" in first_size_mismatch(tmp_path, files, {file.name})
    file.unlink()
    assert first_size_mismatch(tmp_path, files, {file.name}) is None
    assert first_size_mismatch(tmp_path, files) == f"{file.name} is missing"
