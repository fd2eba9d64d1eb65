"""The Hugging Face folder that a running job exports equals the folder converted from its checkpoint."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.huggingface.exporter import check_digests
from megatron.errors import UserError
from tests.distributed.parity import Changes
from tests.distributed.test_experts import GLM, MIXTRAL
from tests.distributed.test_model_variants import LLAMA
from tests.support.checkpoints import make_manager, state_after
from tests.support.conversion import write_hugging_face
from tests.support.layouts import Row, build_engine, config_of, train
from tests.support.pool import run_world

GPT2: Changes = {"model": {}}
ROWS = {
    "Llama, interleaved stages": (
        Row(tp=2, pp=2),
        {"model": LLAMA, "parallel": {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 2}},
    ),
    "Llama, TP 2 x PP 2": (Row(tp=2, pp=2), {"model": LLAMA}),
    "Llama, TP 2 x DP 2, ZeRO-3, bf16": (Row(tp=2, dp=2, zero=3, precision="bf16"), {"model": LLAMA}),
    "Llama, DP 2, ZeRO-3": (Row(dp=2, zero=3), {"model": LLAMA}),
    "GPT-2, tied embeddings, PP 2 x DP 2": (Row(pp=2, dp=2, zero=1), GPT2),
    "GPT-2, one process": (Row(), GPT2),
    "experts, TP 2 x DP 2, EP 2": (
        Row(tp=2, dp=2, zero=1),
        {
            **{"model": MIXTRAL, "checkpoint": {"save_format": "dcp"}},
            "parallel": {"expert_model_parallel_size": 2, "sequence_parallel": True},
        },
    ),
    "experts with a bias, TP 2, EP 1, bf16": (
        Row(tp=2, zero=1, precision="bf16"),
        {"model": GLM, "checkpoint": {"save_format": "dcp"}, "parallel": {"sequence_parallel": True}},
    ),
}


def export_twice(row: Row, changes: Changes, folder: Path) -> Any:
    """Saves a checkpoint in 'saved', and exports the model to 'model', which already contains an older
    model."""
    from megatron.checkpoint.huggingface.run_export import export_model

    engine = build_engine(config_of(row, **changes))
    arguments = (folder / "model", lambda: None)
    export_model(engine, *arguments)
    train(engine, range(2))
    make_manager(engine, folder / "saved").save(state_after(2))
    written = export_model(engine, *arguments)
    after = train(engine, [2])
    return written, after


def weights_in(folder: Path) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        found = load_file(path)
        assert not weights.keys() & found.keys()
        weights |= found
    return weights


@pytest.mark.gate(rows=1, also=["Llama, DP 2, ZeRO-3", "experts, TP 2 x DP 2, EP 2"])
@pytest.mark.parametrize("name", ROWS)
def test_the_model_of_a_run_equals_the_model_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    row, changes = ROWS[name]
    results = run_world(row.world_size, export_twice, row, changes, tmp_path)
    write_hugging_face(open_checkpoint(tmp_path / "saved" / "global_step2"), tmp_path / "later")
    own, later = weights_in(tmp_path / "model"), weights_in(tmp_path / "later")
    assert own.keys() == later.keys()
    assert all(own[key].equal(later[key]) and own[key].dtype == later[key].dtype for key in later)
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "model" / file).read_text() == (tmp_path / "later" / file).read_text()
    check_digests(tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["later", "model", "saved"]
    # Each replica and each stage has written files of its own.
    files = list((tmp_path / "model").glob("*.safetensors"))
    if "experts" not in name:  # the tensor-parallel ranks are replicas of experts
        assert len(files) == row.pp * row.dp
    for written, _ in results:
        assert written.num_bytes == sum(value.nbytes for value in later.values())


def fail_on_one_rank(row: Row, folder: Path, victim: int) -> str:
    from megatron.checkpoint.huggingface import exporter
    from megatron.checkpoint.huggingface.run_export import export_model

    engine = build_engine(config_of(row, model=LLAMA))

    def full(path: Path) -> str:
        raise OSError(28, "No space left on device", str(path))

    is_victim = engine.global_rank == victim
    with patch.object(exporter, "describe_file", full) if is_victim else nullcontext():
        try:
            export_model(engine, folder / "model", lambda: None)
        except UserError as error:
            return str(error)
    return ""


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_cannot_write_is_named_on_every_rank_and_nothing_is_left(
    victim: int, tmp_path: Path
) -> None:
    for sentence in run_world(4, fail_on_one_rank, Row(tp=2, pp=2), tmp_path, victim):
        assert f"model cannot be written: rank {victim}: " in sentence and "No space left" in sentence
    assert not list(tmp_path.iterdir())


def test_a_model_that_no_family_has_is_rejected_before_the_run_starts() -> None:
    from megatron.checkpoint.huggingface.run_export import check_export

    config = config_of(
        Row(), model={**LLAMA, "embed_layernorm": True}, checkpoint={"save": "a", "save_hf_interval": 5}
    )
    with pytest.raises(
        UserError, match="--save-hf-interval: a model with --embed-layernorm.* remove the flag"
    ):
        check_export(config)
