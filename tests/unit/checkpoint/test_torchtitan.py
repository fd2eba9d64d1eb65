"""Converts checkpoints of torchtitan's Llama 3 in both directions. torchtitan 0.2.1 wrote the
asset (`tests/reference/write_torchtitan.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.formats.dcp import DcpFolder
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.registry import TORCHTITAN, format_of, open_reader
from megatron.errors import UserError
from megatron.model.inference.single_process import model_specs
from megatron.mpu.mesh import Axis
from megatron.mpu.pieces import Piece
from tests.support.assets import unpack
from tests.support.layouts import Row, config_of
from tests.unit.checkpoint.hugging_face_folder import megatron_logits
from tests.unit.checkpoint.native_folder import convert, random_wholes, write_native
from tests.unit.checkpoint.test_load_huggingface import load_flags

LLAMA = {
    "position_embedding_type": "rotary",
    "normalization": "RMSNorm",
    "glu_activation": "swiglu",
    "disable_bias_linear": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
HEADS, GROUPS, HEAD_DIM = 4, 2, 8


@pytest.fixture
def titan(tmp_path: Path) -> Path:
    return unpack("torchtitan_llama", tmp_path)


def test_the_logits_of_an_imported_model_are_those_of_torchtitan(titan: Path, tmp_path: Path) -> None:
    assert format_of(titan) == TORCHTITAN
    folder = convert(titan, tmp_path / "global_step0_universal", "universal")
    expected = torch.load(titan / "logits.pt")
    logits = megatron_logits(open_checkpoint(folder), expected["tokens"])
    assert torch.allclose(logits[..., :64], expected["logits"], rtol=1e-5, atol=1e-5)


def test_a_run_on_any_layout_starts_from_the_folder(titan: Path) -> None:
    config = load_flags(titan).config
    assert (config.model.num_attention_heads, config.model.num_query_groups) == (HEADS, GROUPS)
    checkpoint = open_checkpoint(titan)
    assert "torchtitan's optimizer state is not read" in checkpoint.unverified_note
    reader = open_reader(checkpoint)
    reader.check_external(config, 64)
    for name, spec in model_specs(config, 64, None).items():
        whole = reader.read_piece(Piece.of_shard(name, spec), VALUES)
        places = [Piece.of_shard(name, spec, [Axis("tp", rank, 2)]) for rank in range(2)]
        shards = [reader.read_piece(place, VALUES) for place in places]
        numels = {whole.numel() // 2} if spec.sharding else {whole.numel()}
        assert {shard.numel() for shard in shards} == numels
        assert sorted(torch.cat(shards).tolist() if spec.sharding else shards[0].tolist()) == (
            sorted(whole.tolist())
        )


def test_a_model_that_returns_to_torchtitan_has_its_bits(titan: Path, tmp_path: Path) -> None:
    universal = convert(titan, tmp_path / "global_step0_universal", "universal")
    folder = convert(universal, tmp_path / "back", TORCHTITAN)
    ours, theirs = DcpFolder(folder), DcpFolder(titan)
    # Version 0.3 renamed two weights.
    renamed = {key.replace("qkv_linear.", "").replace("lm_head", "output"): key for key in ours.tensors}
    weights = [key for key in theirs.tensors if not key.startswith(("optimizer.", "train_state."))]
    assert renamed.keys() == set(weights)
    for key in weights:
        assert torch.equal(ours.read(renamed[key]), theirs.read(key)), key


def test_torch_loads_what_is_written_for_torchtitan(tmp_path: Path) -> None:
    """Weights and moments have torchtitan's order of rows. The first moments are an eighth of the weights,
    the second moments their squares, so a wrong order is seen."""
    config = config_of(Row(tp=2, pp=2, zero=1), model=LLAMA)
    native = write_native(tmp_path / "native", config, random_wholes(config))
    folder = convert(native, tmp_path / "titan", TORCHTITAN)
    wq = torch.empty(HEADS * HEAD_DIM, 32)
    state = {
        "layers.3.attention.qkv_linear.wq.weight": wq,
        "optimizer": {
            f"state.layers.3.attention.qkv_linear.wq.weight.{kind}": torch.empty_like(wq)
            for kind in ("exp_avg", "exp_avg_sq")
        },
    }
    dcp.load(state, checkpoint_id=folder)
    first, second = state["optimizer"].values()
    assert wq.std() > 0.1 and torch.equal(first, wq / 8) and torch.equal(second, wq**2)
    assert format_of(folder) == TORCHTITAN


def test_a_tied_embedding_is_also_written_as_the_head(tmp_path: Path) -> None:
    """The state dict of a tied model of torchtitan 0.3 has both names, and its optimizer has only the
    first."""
    config = config_of(Row(tp=2, pp=2, zero=1), model=LLAMA | {"untie_embeddings_and_output_weights": False})
    wholes = random_wholes(config)
    native = write_native(tmp_path / "native", config, wholes)
    stored = DcpFolder(convert(native, tmp_path / "titan", TORCHTITAN))
    assert stored.read("lm_head.weight").equal(stored.read("tok_embeddings.weight"))
    assert stored.read("lm_head.weight").std() > 0.1
    assert "optimizer.state.tok_embeddings.weight.exp_avg" in stored.tensors
    assert not [key for key in stored.tensors if key.startswith("optimizer.") and "lm_head" in key]
    back = convert(tmp_path / "titan", tmp_path / "global_step0_universal", "universal")
    assert megatron_logits(open_checkpoint(back)).equal(megatron_logits(open_checkpoint(native)))


def test_what_is_no_llama_of_torchtitan_is_refused(titan: Path, tmp_path: Path) -> None:
    config = config_of(Row())
    native = write_native(tmp_path / "native", config, random_wholes(config))
    with pytest.raises(UserError, match="its Llama 3 needs --position-embedding-type rotary"):
        convert(native, tmp_path / "target", TORCHTITAN)
    assert not (tmp_path / "target").exists()
    with pytest.raises(UserError, match="holds only the weights of a model, expected --format universal"):
        convert(titan, tmp_path / "target", "dcp")
    (titan / "config.json").unlink()
    with pytest.raises(UserError, match=r"copy the config.json of the Hugging Face model of the same shape"):
        convert(titan, tmp_path / "target", "universal")
