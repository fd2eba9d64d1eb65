"""A run loads a Hugging Face folder as a checkpoint: the shards that ranks read, and the run's flags."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.arguments import read_command_line
from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.registry import HUGGING_FACE, format_of, open_reader
from megatron.checkpoint.huggingface import reader as reader_module
from megatron.errors import UserError
from megatron.model.inference.single_process import model_specs
from megatron.mpu.mesh import Axis
from megatron.mpu.parameters import reshard
from megatron.mpu.pieces import Piece
from tests.unit.checkpoint.hugging_face_folder import change_config, change_weights
from tests.unit.checkpoint.test_huggingface_import import save_tokenizer
from tests.unit.checkpoint.test_huggingface_llama import save_hf

RUN = "--seq-length 32 --micro-batch-size 1 --global-batch-size 1 --lr 1 --train-iters 1 --dry-run".split()


def load_flags(folder, *flags):
    words = ["--load-huggingface", str(folder), *RUN, *flags]
    return read_command_line(words, {})


@pytest.mark.parametrize("name", ["llama-3", "qwen-2", "olmo-2", "pythia", "glm-4.5", "deepseek-v3"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_reads_its_shards(name, ranks, tmp_path, monkeypatch):
    save_hf(tmp_path, name)
    assert format_of(tmp_path) == HUGGING_FACE
    config = load_flags(tmp_path).config
    reader = open_reader(open_checkpoint(tmp_path))
    specs = model_specs(config, config.model.vocab_size, None)
    assert set(reader.stored_names) == specs.keys()
    whole = {key: reader.read(key, VALUES, spec) for key, spec in specs.items()}
    read = []
    monkeypatch.setattr(
        reader_module.HuggingFaceReader, "read", lambda _self, key, *_: read.append(key) or whole[key]
    )
    for rank in range(ranks):
        for key, spec in specs.items():
            axes = [Axis("ep" if "ep" in spec.axis_names else "tp", rank, ranks)]
            found = reader.read_piece(Piece.of_shard(key, spec, axes), VALUES)
            expected = whole[key]
            if spec.sharding:
                saved = replace(spec, global_shape=tuple(expected.shape))
                flat = whole[key].reshape(-1)
                stop = spec.local_numel(axes)
                expected = reshard(spec, axes, 0, stop, saved, (), lambda _, first, last: flat[first:last])  # noqa: B023
            assert torch.equal(found, expected.reshape(-1)), key
    if ranks == 2:  # 4 ranks are more than the groups of heads
        sharded = {key for key in read if specs[key].sharding}
        assert all(specs[key].num_valid_rows is not None for key in sharded)


def test_the_flags_come_from_the_folder(tmp_path):
    tokens = save_tokenizer(tmp_path)
    save_hf(tmp_path, "qwen-3", vocab_size=tokens + 3)
    config = load_flags(tmp_path, "--save", "runs").config
    assert (config.checkpoint.load, config.checkpoint.finetune) == (str(tmp_path), True)
    assert (config.model.qk_layernorm, config.model.kv_channels, config.model.seq_length) == (True, 16, 32)
    assert (config.model.vocab_size, config.data.tokenizer_name_or_path) == (None, str(tmp_path))
    checkpoint = open_checkpoint(tmp_path)
    open_reader(checkpoint).check_external(config, tokens)
    with pytest.raises(UserError, match=f"embeddings of {tokens + 3} tokens, and the vocabulary has"):
        open_reader(checkpoint).check_external(config, tokens + 4)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--load", "elsewhere"], "--load elsewhere: a run starts from one folder"),
        (["--num-layers", "3"], "--num-layers 3 contradicts .* has 2"),
        (["--position-embedding-type", "alibi"], "--position-embedding-type alibi contradicts"),
    ],
)
def test_flags_that_contradict_it_are_refused(flags, named, tmp_path):
    save_hf(tmp_path, "llama-3")
    with pytest.raises(UserError, match=named):
        load_flags(tmp_path, *flags)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no config.json"):
        load_flags(tmp_path)
    save_hf(tmp_path, "llama-3")
    change_config(tmp_path, hidden_act="gelu")
    with pytest.raises(UserError, match="hidden_act = gelu"):
        load_flags(tmp_path)


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    save_hf(tmp_path, "llama-3")
    change_weights(tmp_path, lambda weights: weights | {"model.norm.weight": torch.full((32,), torch.nan)})
    reader = open_reader(open_checkpoint(tmp_path))
    with pytest.raises(UserError, match=r"holds 32 values of 6.weight that are NaN or infinite"):
        reader.read("6.weight", VALUES)
