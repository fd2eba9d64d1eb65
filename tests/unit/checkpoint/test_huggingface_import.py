"""Imports of Hugging Face models have equal logits and bits. Unsupported models are rejected by name."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2TokenizerFast, OPTConfig

from megatron.arguments import read_command_line
from megatron.checkpoint.huggingface.importer import read_hugging_face
from megatron.checkpoint.reading import read_checkpoint
from megatron.commands.convert_checkpoint import check_tokenizer_fits
from megatron.errors import UserError
from megatron.tokenizer.hugging_face import save_as_hugging_face
from tests.support.layouts import SEQ, VOCAB, Row, config_of
from tests.unit.checkpoint.hugging_face_folder import (
    change_weights,
    convert,
    hf_logits,
    megatron_logits,
    mistake,
    save_hf,
    weights_of,
)
from tests.unit.checkpoint.native_folder import random_wholes, write_native
from tests.unit.tokenizer.vocabularies import train_gpt2_vocabulary

KINDS = ("bloom", "gpt2")


def make_universal(source, folder, *flags):
    """Converts the model in `source` to `folder`/global_step0_universal. Returns the checkpoint."""
    flags = flags or ("--vocab-size", VOCAB)
    convert("--from-hugging-face", source, "--output", folder / "global_step0_universal", *flags)
    return read_checkpoint(folder)


def save_tokenizer(folder):
    """Saves a tokenizer beside a model. Returns the size of its vocabulary."""
    vocab, merges = train_gpt2_vocabulary(folder)
    tokenizer = GPT2TokenizerFast(vocab, merges)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


# --- the vocabulary ---


def test_a_tokenizer_with_far_fewer_tokens_is_refused():
    with pytest.raises(UserError, match="1 tokens and the model 1,024 word embeddings, so 1,023"):
        check_tokenizer_fits(1024, 1, None)
    check_tokenizer_fits(1024, 1, 1)
    check_tokenizer_fits(250_880, 250_680, None)  # BLOOM
    check_tokenizer_fits(100, 100, None)


def with_nan_from_row(row, weights):
    for name, weight in weights.items():
        if name.endswith(("wte.weight", "word_embeddings.weight")):
            weight[row:] = torch.nan
    return weights


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_token_are_dropped(kind, tmp_path, capsys):
    """The published BLOOM has 250,680 tokens and 250,880 rows, so 200 rows have no token."""
    source = tmp_path / "hf"
    save_hf(source, kind, sizes=(440, 2))
    size = save_tokenizer(source)
    expected = hf_logits(source)[..., :size]
    change_weights(source, partial(with_nan_from_row, size))  # in memory that was never initialized
    checkpoint = make_universal(source, tmp_path, "--vocab-size", size)
    assert f"{440 - size} of 440 rows of the word embeddings" in capsys.readouterr().err
    assert checkpoint.vocab_size == size < 440
    tokenizer = AutoTokenizer.from_pretrained(source)
    assert checkpoint.eod == tokenizer.eos_token_id
    torch.testing.assert_close(megatron_logits(checkpoint), expected, rtol=1e-5, atol=1e-5)
    convert("--load", tmp_path, "--output", tmp_path / "again")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").config.vocab_size == size
    text = "def train(model): 日本語"
    assert AutoTokenizer.from_pretrained(tmp_path / "again").encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_the_printed_flags_are_those_of_the_model(kind, tmp_path, capsys):
    source = tmp_path / "hf"
    changes = {"n_inner": 56, "n_positions": 40} if kind == "gpt2" else {"seq_length": 24}
    changes |= {"layer_norm_epsilon": 1e-3}
    source.mkdir()
    save_hf(source, kind, sizes=(save_tokenizer(source) + 8, 2), **changes)
    saved = make_universal(source, tmp_path, "--tokenizer-name-or-path", source).config
    line = capsys.readouterr().out.splitlines()[-1]
    words = line.removeprefix("start from it with: ").split()
    words += "--micro-batch-size 1 --global-batch-size 1 --lr 1 --train-iters 1 --dry-run".split()
    config = read_command_line(words).config
    assert config.model == saved.model and config.data == saved.data
    assert config.checkpoint.load == str(tmp_path) and config.checkpoint.universal_checkpoint
    assert config.model.seq_length == (40 if kind == "gpt2" else 24)


# --- folders of the hub ---


def as_on_the_hub(kind, weights):
    """Returns the weights with the names on the hub. Both families were saved without the head, so names have
    no prefix. GPT-2 was saved with its buffers."""
    short = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    if kind == "gpt2":
        for block in range(3):
            short[f"h.{block}.attn.bias"] = torch.ones(1, 1, SEQ, SEQ)
            short[f"h.{block}.attn.masked_bias"] = torch.tensor(-1e4)
    else:
        short["h.0.self_attention.scale_mask_softmax.causal_mask"] = torch.ones(1)
    return short


def with_a_copy_of_the_head(kind, weights):
    name = "word_embeddings" if kind == "bloom" else "wte"
    return weights | {"lm_head.weight": weights[f"transformer.{name}.weight"].clone()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [as_on_the_hub, with_a_copy_of_the_head])
def test_names_as_on_the_hub_are_read(kind, change, tmp_path):
    save_hf(tmp_path, kind)
    expected = dict(weights_of(read_hugging_face(tmp_path)))
    change_weights(tmp_path, partial(change, kind))
    weights = dict(weights_of(read_hugging_face(tmp_path)))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("parts", [1, 2])
def test_weights_that_torch_saved_are_read(parts, tmp_path):
    save_hf(tmp_path, "gpt2")
    expected = dict(weights_of(read_hugging_face(tmp_path)))
    weights = list(load_file(tmp_path / "model.safetensors").items())
    (tmp_path / "model.safetensors").unlink()
    files = {f"pytorch_model-{part}.bin": dict(weights[part::parts]) for part in range(parts)}
    for file, held in files.items():
        torch.save(held, tmp_path / file)
    if parts == 1:
        (tmp_path / "pytorch_model-0.bin").rename(tmp_path / "pytorch_model.bin")
    else:
        index = {"weight_map": {name: file for file, held in files.items() for name in held}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    found = dict(weights_of(read_hugging_face(tmp_path)))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_bloom_of_the_hub_has_older_settings(tmp_path):
    save_hf(tmp_path, "bloom")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config |= {"n_embed": config.pop("hidden_size"), "num_attention_heads": config.pop("n_head")}
    config |= {"torch_dtype": "bfloat16", "seq_length": 2048, "skip_bias_add": True, "offset_alibi": 100}
    config |= {"pretraining_tp": 4, "masked_softmax_fusion": True, "n_inner": None}
    del config["dtype"]
    path.write_text(json.dumps(config))
    fields = read_hugging_face(tmp_path).fields
    assert (fields["hidden_size"], fields["num_attention_heads"], fields["seq_length"]) == (32, 4, 2048)


# --- rejected models ---


def test_another_family_and_folders_without_weights_are_refused(tmp_path):
    with pytest.raises(UserError, match="not the folder of a Hugging Face model"):
        read_hugging_face(tmp_path)
    OPTConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="of type opt: expected one of bloom, "):
        read_hugging_face(tmp_path)
    save_hf(tmp_path, "gpt2")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no weights: expected model.safetensors or pytorch_model"):
        read_hugging_face(tmp_path)


def test_damaged_files_are_named(tmp_path):
    save_hf(tmp_path, "gpt2", max_shard_size="20KB")
    weights = next(tmp_path.glob("*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    with pytest.raises(UserError, match=f"weights in .*{weights.name} cannot be read"):
        read_hugging_face(tmp_path)
    weights.unlink()
    with pytest.raises(UserError, match=f"weights in .*{weights.name} cannot be read"):
        read_hugging_face(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="index.json is not an index"):
        read_hugging_face(tmp_path)


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    save_hf(tmp_path, "gpt2")
    (tmp_path / "model.safetensors").unlink()
    torch.save({"wte.weight": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="pytorch_model.bin cannot be read"):
        read_hugging_face(tmp_path)


BIAS = "transformer.h.1.ln_2.bias"
CHANGED_WEIGHTS = {
    "holds 1 weights that the model does not have, among them score.weight": lambda weights: (
        weights | {"score.weight": torch.zeros(2, 32)}
    ),
    "lacks 1 weights, among them transformer.h.1.ln_2.bias": lambda weights: {
        name: weight for name, weight in weights.items() if name != BIAS
    },
    r"ln_2.bias of shape \(33,\): its config.json makes it \(32,\)": lambda weights: (
        weights | {BIAS: torch.zeros(33)}
    ),
    "ln_2.bias as torch.int8": lambda weights: weights | {BIAS: torch.zeros(32, dtype=torch.int8)},
    "lm_head.weight that differs from transformer.wte.weight": lambda weights: (
        weights | {"lm_head.weight": weights["transformer.wte.weight"] + 1}
    ),
    "1 weights that the model does not have, among them h.3.attn.bias": lambda weights: (
        weights | {"h.3.attn.bias": torch.ones(1)}
    ),
}


@pytest.mark.parametrize("named", CHANGED_WEIGHTS)
def test_weights_of_another_model_are_named(named, tmp_path):
    save_hf(tmp_path, "gpt2")
    change_weights(tmp_path, CHANGED_WEIGHTS[named])
    with pytest.raises(UserError, match=named):
        read_hugging_face(tmp_path)


def test_a_folder_without_a_tokenizer_has_the_vocabulary_of_its_config(tmp_path, capsys):
    save_hf(tmp_path / "hf", "gpt2")
    convert("--from", tmp_path / "hf", "--to", tmp_path / "native")
    output = capsys.readouterr()
    assert f"has no tokenizer: the vocabulary has {VOCAB} tokens, as in its config.json" in output.err
    assert f"--vocab-size {VOCAB}" in output.out  # the flags of the start
    checkpoint = read_checkpoint(tmp_path / "native")
    assert (checkpoint.vocab_size, checkpoint.eod) == (VOCAB, None)
    torch.testing.assert_close(megatron_logits(checkpoint), hf_logits(tmp_path / "hf"), rtol=1e-5, atol=1e-5)


def test_mistakes_are_one_sentence_and_code_2(tmp_path, capsys):
    source, output = tmp_path / "hf", tmp_path / "new" / "global_step0_universal"
    save_hf(source, "gpt2")
    checkpoints = {"run": {}, "rotary": {"position_embedding_type": "rotary", "rotary_interleaved": True}}
    for name, model in checkpoints.items():
        config = config_of(Row(positions="absolute"), model=model)
        write_native(tmp_path / name, config, random_wholes(config))
    model, load = ("--from-hugging-face", source), ("--load", tmp_path / "run")
    mistakes = {
        (*model, *load): "not allowed with",
        (): "one of the arguments --from --load --from-hugging-face",
        (*model, "--no-tokenizer"): "--no-tokenizer acts only on a checkpoint",
        (*model, "--universal-checkpoint"): "--universal_checkpoint acts",
        ("--from-hugging-face", "gpt2"): "--from-hugging-face gpt2: there is no such folder",
        (*model, "--vocab-size", 102): "embeddings of 101 tokens, and the vocabulary has 102",
        (*model, "--vocab-size", 0): "--vocab-size is 0",
        (*load, "--dtype", "int8"): "--dtype",
        (*load, "--no-tokenizer", "--vocab-file", "x"): "contradicts",
        ("--load", tmp_path / "rotary"): "rotary",
    }
    for flags, expected in mistakes.items():
        assert expected in mistake(capsys, *flags, "--output", output)
    save_tokenizer(source)
    contradiction = mistake(capsys, *model, "--output", output, "--vocab-size", 101)
    assert "--vocab-size 101 contradicts the tokenizer" in contradiction
    assert not output.parent.exists()


def test_a_mistake_names_no_flag_that_was_not_typed(tmp_path, capsys):
    model, checkpoint, taken = (tmp_path / name for name in ("model", "checkpoint", "taken"))
    save_hf(model, "gpt2")
    config = config_of(Row(positions="absolute"))
    write_native(checkpoint, config, random_wholes(config))
    (taken / "global_step0_universal").mkdir(parents=True)
    (tmp_path / "file").touch()
    size, unwritable = ("--vocab-size", VOCAB), tmp_path / "file" / "x"
    mistakes = {
        ("--from", tmp_path / "missing", "--to", taken): "missing: there is no such folder",
        ("--from", checkpoint, "--to", taken): "taken exists already",
        ("--from", checkpoint, "--to", unwritable): "x cannot be created",
        ("--from", checkpoint, "--to", taken, *size): "--vocab-size acts only on a Hugging Face model",
        ("--from", model, "--to", taken, *size): "taken/global_step0_universal exists already",
        ("--from", model, "--to", unwritable, *size): "cannot be created",
        ("--from", model, "--to", unwritable, "--dtype", "bf16"): "--dtype acts only on a checkpoint",
        ("--from", tmp_path, "--to", taken): "holds no checkpoint",
        ("--load", tmp_path / "missing", "--to", taken): "--load .*: there is no such folder",
        ("--from-hugging-face", model, "--to", taken, *size): "taken/global_step0_universal exists already",
    }
    for flags, expected in mistakes.items():
        printed = mistake(capsys, *flags)
        assert re.search(expected, printed)
        assert set(re.findall(r"(?<!\S)--[\w-]+", printed)) <= set(flags)
    names = [path.relative_to(tmp_path).as_posix() for path in [*tmp_path.glob("*"), *taken.glob("*")]]
    assert sorted(names) == ["checkpoint", "file", "model", "taken", "taken/global_step0_universal"]


@pytest.mark.parametrize("kind", ["checkpoint", "model"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(kind, tmp_path, capsys, monkeypatch):
    source, output = tmp_path / kind, tmp_path / "new"
    if kind == "model":
        save_hf(source, "gpt2")
        flags = ["--from", source, "--to", output, "--vocab-size", VOCAB]
    else:
        config = config_of(Row(positions="absolute"))
        write_native(source, config, random_wholes(config))
        flags = ["--from", source, "--to", output]
    words = "cannot be written" if kind == "checkpoint" else "the same command continues it"
    with file_size_limit(2000):  # a config.json is smaller
        assert words in mistake(capsys, *flags)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        assert "0.0 GB free and 0.0 GB are needed" in mistake(capsys, *flags)
    left = {path.name for path in [*tmp_path.glob("new*"), *tmp_path.glob("new/*")]} - {"new"}
    assert left == set()  # no parameter was complete
    convert(*flags)
    assert not list(tmp_path.glob("**/*.partial*"))


def test_a_tokenizer_that_does_not_fit_on_the_disk_raises_an_error_of_files(tmp_path):
    """The tokenizer library raises a bare `Exception`, which must become an OSError."""
    vocab, merges = train_gpt2_vocabulary(tmp_path)
    flags = SimpleNamespace(vocab_file=vocab, merge_file=merges)
    (tmp_path / "out").mkdir()
    limit = os.path.getsize(vocab) + 1000  # tokenizer.json is larger
    with file_size_limit(limit), pytest.raises(OSError, match="File too large"):
        save_as_hugging_face("GPT2BPETokenizer", flags, tmp_path / "out", None)


@contextmanager
def file_size_limit(size):
    """Lets writes fail beyond `size` bytes of a file of this process, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- which checkpoint a folder name selects ---


def test_a_native_checkpoint_is_preferred_unless_a_flag_says_otherwise(tmp_path, capsys):
    save_hf(tmp_path / "hf", "gpt2")
    universal = make_universal(tmp_path / "hf", tmp_path).folder
    config = config_of(Row(positions="absolute"))
    native = write_native(tmp_path, config, random_wholes(config))
    capsys.readouterr()
    expected = {
        ("native", tmp_path): native,
        ("asked for", tmp_path, "--universal_checkpoint"): universal,
        ("named", universal): universal,
    }
    for (name, folder, *flags), source in expected.items():
        convert("--load", folder, "--output", tmp_path / name, *flags)
        iteration = 5 if source == native else 0
        printed = capsys.readouterr().out
        assert f"iteration {iteration} of {source}\n" in printed
        compared = "the digests of the layer files" if source == native else "sizes only: no digests stored"
        assert f"verified: {compared}" in printed
    flags = ["--load", native, "--universal_checkpoint", "--output", tmp_path / "none"]
    assert "has no file latest_universal" in mistake(capsys, *flags)


def test_a_universal_checkpoint_of_another_model_is_named(tmp_path):
    save_hf(tmp_path / "hf", "gpt2")
    checkpoint = make_universal(tmp_path / "hf", tmp_path)
    path = checkpoint.folder / "zero" / "3.mlp.dense_h_to_4h.bias" / "fp32.pt"
    torch.save({"param": torch.zeros(127)}, path)
    with pytest.raises(
        UserError, match=r"dense_h_to_4h.bias/fp32.pt holds a tensor of shape \(127,\), expected \(128,\)"
    ):
        megatron_logits(checkpoint)
    path.unlink()
    with pytest.raises(UserError, match=r"fp32\.pt cannot be read"):
        megatron_logits(checkpoint)
