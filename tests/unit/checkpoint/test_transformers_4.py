"""transformers 4, which reads rotary settings outside `rope_parameters`, opens exported folders.

What other readers take from config.json, by their sources:
- transformers 4.57 (models/*/configuration_*.py): rope_theta, rope_scaling (OLMo 2 accepts only `type` and
  `factor` in it), rope_local_base_freq (Gemma 3), rotary_emb_base and rotary_pct (GPT-NeoX).
- vLLM (vllm/transformers_utils/config.py): the configuration classes of transformers 4 before vLLM 0.24, and
  of transformers 5 since then, whose rope_parameters it prefers.
- llama.cpp's convert_hf_to_gguf.py: rope_parameters or rope_scaling; rope_theta or rotary_emb_base,
  rope_local_base_freq, partial_rotary_factor, rotary_pct (GPT-NeoX), original_max_position_embeddings. It
  also reads tokenizer.model, if it exists, and tokenizer.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.huggingface.exporter import format_differences, write_settings
from megatron.checkpoint.huggingface.family import FAMILIES, family_of
from megatron.checkpoint.huggingface.importer import read_settings
from megatron.checkpoint.huggingface.rope import flat_settings
from megatron.config import Config
from megatron.model.inference.single_process import model_specs
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.hugging_face import save_as_hugging_face
from tests.distributed.test_model_variants import (
    FALCON,
    GEMMA3,
    LLAMA,
    LLAMA3_ROPE,
    NEOX,
    OLMO2,
    QWEN2,
    QWEN3,
    YARN,
)
from tests.end_to_end.command import ROOT
from tests.support.conversion import write_hugging_face
from tests.support.layouts import EOD, VOCAB, Row, config_of
from tests.unit.checkpoint.hugging_face_folder import (
    GLM4_MOE,
    MIXTRAL,
    OLMOE,
    QWEN3_MOE,
    change_config,
    convert,
    hf_logits,
    megatron_logits,
)
from tests.unit.checkpoint.hugging_face_models import LATER
from tests.unit.checkpoint.native_folder import write_native
from tests.unit.model.single_process import random_tokens
from tests.unit.tokenizer.test_tokenizers import TRICKY, train_sentence_piece
from tests.unit.tokenizer.vocabularies import TEXT, tokenizer_flags, train_gpt2_vocabulary

PACKAGES = ("transformers==4.57.6", "tokenizers==0.22.2", "huggingface_hub==0.36.2")
TOKENS = random_tokens(2, 256)
RELATIVE_BOUND = 1e-5
"""Largest error of the logits, relative to their range."""

WINDOWS = {"window_size": 7, "window_pattern": ("W", "W", "F")}
ROPE = {"rotary_base": 500.0}
LINEAR = {**ROPE, "rope_scaling_type": "linear", "rope_scaling_factor": 4.0}
SCALINGS = {"llama3": LLAMA3_ROPE, "yarn": YARN}
SCALINGS = {
    kind: {name: value for name, value in model.items() if name.startswith("rope_")} | ROPE
    for kind, model in SCALINGS.items()
}
SCALINGS["linear"] = LINEAR
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        **{"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16},
        **{"low_freq_factor": 0.5, "high_freq_factor": 2.0},
    },
    "yarn": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        **{"beta_slow": 0.5, "beta_fast": 2.0},
    },
}
BASE = {"rope_theta": 500.0, "rope_scaling": None}
PART = {"rotary_emb_base": 500.0, "rotary_pct": 0.5, "partial_rotary_factor": 0.5}
# Name -> (model type, the model, the rotary settings in its config.json beside rope_parameters).
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bloom": ("bloom", {"position_embedding_type": "alibi", "embed_layernorm": True}, {}),
    "gpt2": ("gpt2", {}, {}),
    "llama": ("llama", LLAMA | ROPE, BASE),
    "mistral": ("mistral", LLAMA | ROPE | {"window_size": 7}, BASE),
    "mistral, yarn": (
        "mistral",
        LLAMA | SCALINGS["yarn"] | {"window_size": 7},
        BASE | {"rope_scaling": SCALED["yarn"]},
    ),
    "qwen2": ("qwen2", QWEN2 | ROPE, BASE),
    "qwen2, window, linear": (
        "qwen2",
        QWEN2 | LINEAR | {"window_size": 7},
        BASE | {"rope_scaling": SCALED["linear"]},
    ),
    "qwen3": ("qwen3", QWEN3 | ROPE | {"kv_channels": 16}, BASE),
    "qwen3, yarn": ("qwen3", QWEN3 | SCALINGS["yarn"], BASE | {"rope_scaling": SCALED["yarn"]}),
    "olmo2": ("olmo2", OLMO2 | ROPE, BASE),
    "olmo2, linear": ("olmo2", OLMO2 | LINEAR, BASE | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "olmo3": ("olmo3", OLMO2 | ROPE | WINDOWS, BASE),
    "gemma3": ("gemma3_text", GEMMA3 | {"rope_scaling_type": None}, {**BASE, "rope_theta": 50.0}),
    "gpt_neox": ("gpt_neox", NEOX | ROPE, BASE | PART),
    "falcon": ("falcon", FALCON | ROPE, BASE),
    "mixtral": ("mixtral", MIXTRAL | ROPE, BASE),
    "olmoe": ("olmoe", OLMOE | ROPE, BASE),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE | ROPE, BASE),
    "glm4_moe": ("glm4_moe", GLM4_MOE | ROPE, BASE | {"partial_rotary_factor": 0.5}),
}
MODELS["gemma3"][2]["rope_local_base_freq"] = 500.0
MODELS["gemma3, linear"] = (
    "gemma3_text",
    GEMMA3,
    MODELS["gemma3"][2] | {"rope_scaling": SCALED["linear"]},
)
for kind, scaling in SCALINGS.items():
    scaled = {**BASE, "rope_scaling": SCALED[kind]}
    MODELS[f"llama, {kind}"] = ("llama", LLAMA | scaling, scaled)
    MODELS[f"olmo3, {kind}"] = ("olmo3", OLMO2 | WINDOWS | scaling, scaled)
    MODELS[f"gpt_neox, {kind}"] = ("gpt_neox", NEOX | scaling, scaled | PART)
    MODELS[f"falcon, {kind}"] = ("falcon", FALCON | scaling, scaled)


def config_of_model(name: str) -> Config:
    model = MODELS[name][1]
    return config_of(Row(), model={**model, "seq_length": 256, "max_position_embeddings": 256})


def test_every_earlier_family_has_a_row_for_transformers_4():
    assert {kind for kind, _, _ in MODELS.values()} == set(FAMILIES) - LATER


@pytest.mark.parametrize("name", MODELS)
def test_transformers_4_finds_the_rotary_settings(name, tmp_path):
    """The model that transformers 4 reads must equal the models that transformers 5 and an import read from
    the folder."""
    config = config_of_model(name)
    write_settings(config, VOCAB, EOD, "fp32", tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    kind, _, expected = MODELS[name]
    names = {"rope_theta", "rope_scaling", "rope_local_base_freq", *PART}
    assert written["model_type"] == kind
    assert {key: value for key, value in written.items() if key in names} == expected
    assert written["torch_dtype"] == written["dtype"] == "float32"
    settings = family_of(config.model)[1].hf_settings(config.model)
    used = AutoConfig.from_pretrained(tmp_path).to_dict().get("rope_parameters", {})
    used.pop("type", None)  # in OLMo 2 a second name of rope_type
    assert used == settings.get("rope_parameters", {})
    _, fields = read_settings(tmp_path)
    imported = {key: getattr(type(config.model)(**fields), key) for key in fields}
    assert imported == {key: getattr(config.model, key) for key in fields if key != "vocab_size"} | {
        "vocab_size": VOCAB
    }
    assert not format_differences(config)


@pytest.mark.parametrize(
    "model",
    [
        OLMO2 | WINDOWS | ROPE | {"window_rotary_base": 50.0},
        OLMO2 | LINEAR | {"window_size": 7},
        {**GEMMA3, "window_pattern": None, "window_rotary_base": None},
    ],
)
def test_what_transformers_4_has_no_setting_for_is_noted(model):
    (note,) = format_differences(config_of(Row(), model=model))
    assert "open the model with transformers 5" in note


# --- tokenizers ---


def train_llama_3(folder: Path) -> None:
    """Writes a tokenizer that puts a BOS token first. It has an additional special token and a template."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False)
    )
    bos, eos, turn = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
    tokenizer.add_special_tokens([bos, eos, turn])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"bos_token": bos, "eos_token": eos, "extra_special_tokens": [turn]},
        chat_template="{{ messages[0].content }}",
    ).save_pretrained(folder)


def train_with_space(folder: Path) -> None:
    """Writes a byte-level tokenizer that puts a space in front of a text."""
    train_llama_3(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def train_llama_2(folder: Path) -> None:
    """Writes the SentencePiece model of a tokenizer of Llama 2."""
    train_sentence_piece(folder / "tokenizer.model", model_type="bpe")
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_gpt2(folder: Path) -> None:
    from transformers import GPT2Tokenizer

    GPT2Tokenizer(*train_gpt2_vocabulary(folder)).save_pretrained(folder)


TOKENIZERS = {
    "llama 3": train_llama_3,
    "space in front": train_with_space,
    "llama 2": train_llama_2,
    "gpt2": save_gpt2,
    "gpt2 files": train_gpt2_vocabulary,
}


def export_tokenizer(name: str, folder: Path) -> tuple[Path, list[list[int]]]:
    """Returns the folder of an exported tokenizer, and the ids that this program returns for texts."""
    (folder / "source").mkdir(parents=True)
    TOKENIZERS[name](folder / "source")
    flags = tokenizer_flags(tokenizer_name_or_path=str(folder / "source"))
    if name == "gpt2 files":
        files = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
        flags = tokenizer_flags(**{flag: str(folder / "source" / file) for flag, file in files.items()})
    tokenizer = build_tokenizer(flags)
    (folder / "exported").mkdir()
    save_as_hugging_face(tokenizer.name, flags, folder / "exported", 4096)
    return folder / "exported", tokenizer.tokenize_batch(PLAIN)


PLAIN = [text for text in TRICKY if "<|" not in text]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_transformers_4_knows_the_class_of_an_exported_tokenizer(name, tmp_path):
    folder, ids = export_tokenizer(name, tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not settings.keys() & {"backend", "is_local", "local_files_only", "extra_special_tokens"}
    assert settings["model_input_names"] == ["input_ids", "attention_mask"]
    assert settings["add_prefix_space"] == (name == "space in front")
    assert (folder / "tokenizer.model").exists() == (name == "llama 2")
    exported = AutoTokenizer.from_pretrained(folder)
    assert [exported.encode(text, add_special_tokens=False) for text in PLAIN] == ids
    assert exported.model_max_length == 4096
    if name == "llama 3":
        assert exported.encode("a")[0] == exported.bos_token_id
        assert exported.extra_special_tokens == ["<|eot_id|>"] and exported.chat_template


# --- ids of special tokens ---


def ids_in(folder: Path) -> dict[str, dict[str, Any]]:
    names = ("config.json", "generation_config.json")
    contents = {name: json.loads((folder / name).read_text()) for name in names if (folder / name).exists()}
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: {key: content.get(key) for key in keys} for name, content in contents.items()}


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_an_imported_model_keeps_the_ids_of_its_special_tokens(has_tokenizer, tmp_path):
    """transformers_4: the classes of the two versions have different default ids."""
    hf = tmp_path / "hf"
    write_native(tmp_path, config := config_of_model("llama"), wholes_of(config))
    write_hugging_face(open_checkpoint(tmp_path / "global_step5"), hf)
    if has_tokenizer:
        small = tmp_path / "tokenizer"
        small.mkdir()
        tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB - 2)}, unk_token="t1"))
        tokenizer.add_special_tokens(["<bos>", "<eos>"])
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>"
        ).save_pretrained(hf)
    change_config(hf, bos_token_id=99, eos_token_id=100, pad_token_id=7)
    (hf / "megatron.sha256").unlink()
    generation = {"bos_token_id": 99, "eos_token_id": [100, 5], "temperature": 0.5}
    (hf / "generation_config.json").write_text(json.dumps(generation))
    before = ids_in(hf)
    convert("--from", hf, "--to", tmp_path / "native")
    convert("--from", tmp_path / "native", "--to", tmp_path / "again")
    assert ids_in(tmp_path / "again") == before


def test_a_trained_model_has_the_bos_of_its_tokenizer(tmp_path):
    """transformers_4: if the tokenizer has no BOS token, the end-of-document token is used."""
    train_llama_3(tmp_path)
    data = {"tokenizer_name_or_path": str(tmp_path)}
    tokenizer = build_tokenizer(tokenizer_flags(**data))
    assert tokenizer.bos != tokenizer.eod
    config = config_of(Row(), model=LLAMA, data=data)
    for eod, bos in ((tokenizer.eod, tokenizer.bos), (EOD, EOD), (None, None)):
        write_settings(config, VOCAB, eod, "fp32", tmp_path / "settings")
        ids = {"bos_token_id": bos, "eos_token_id": eod, "pad_token_id": None}
        assert set(map(str, ids_in(tmp_path / "settings").values())) == {str(ids)}


# --- with transformers 4 ---


def wholes_of(config: Config) -> dict[str, torch.Tensor]:
    """Returns weights with a standard deviation with which a wrong rotation changes the logits. Routers and
    experts have a smaller one, since they enlarge the rounding errors of the layers before them."""
    generator = torch.Generator().manual_seed(5)
    wholes = {}
    for name, spec in model_specs(config, VOCAB, EOD).items():
        shape = (spec.num_valid_rows or spec.global_shape[0], *spec.global_shape[1:])
        std = 0.1 if ".mlp.router." in name or ".mlp.experts." in name else 0.25
        wholes[name] = spec.init_value + std * torch.randn(shape, generator=generator)
    return wholes


@pytest.fixture(scope="module")
def transformers_4() -> Path:
    """Returns a folder of packages with transformers 4. It is made once: `build` is kept between runs."""
    folder = ROOT / "build" / "-".join(PACKAGES[0].split("=="))
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, "--no-deps", "--target", unfinished, *PACKAGES], check=True)
        try:
            unfinished.rename(folder)
        except OSError:
            assert folder.exists()  # another process was faster
            shutil.rmtree(unfinished)
    return folder


CHILD = """
import json, sys
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
assert transformers.__version__.startswith("4.57."), transformers.__version__
given = torch.load(sys.argv[1])
found = {}
for folder in given["models"]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    assert model.dtype == torch.float32
    with torch.no_grad():
        found[folder] = model(given["tokens"]).logits
for folder in given["tokenizers"]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert set(tokenizer("a")) == {"input_ids", "attention_mask"}
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in given["texts"]]
    marked = [tokenizer.encode(text) for text in given["texts"]]
    found[folder] = ids, marked, [tokenizer.decode(row) for row in ids], tokenizer.all_special_ids
torch.save(found, sys.argv[2])
"""


def run_transformers_4(packages: Path, folder: Path, **given: Any) -> dict[str, Any]:
    torch.save({"models": [], "tokenizers": [], **given}, folder / "given.pt")
    command = [sys.executable, "-c", CHILD, str(folder / "given.pt"), str(folder / "found.pt")]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(packages)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "found.pt")


@pytest.mark.full
def test_transformers_4_gives_the_logits_of_version_5(transformers_4, tmp_path):
    """Without the settings beside rope_parameters transformers 4 would silently rotate by wrong angles."""
    ours, bare = {}, {}
    for name in MODELS:
        folder = tmp_path / name
        config = config_of_model(name)
        checkpoint = open_checkpoint(write_native(tmp_path / f"{name} native", config, wholes_of(config)))
        write_hugging_face(checkpoint, folder)
        ours[name] = megatron_logits(checkpoint, TOKENS)
        settings = json.loads((folder / "config.json").read_text())
        if flat := flat_settings(settings):
            bare[name] = str(tmp_path / f"{name}, bare")
            shutil.copytree(folder, bare[name])
            left = {key: value for key, value in settings.items() if key not in flat}
            (Path(bare[name]) / "config.json").write_text(json.dumps(left))
    folders = {name: str(tmp_path / name) for name in MODELS}
    given = {"models": [*folders.values(), *bare.values()], "tokens": TOKENS}
    found = run_transformers_4(transformers_4, tmp_path, **given)
    for name, folder in folders.items():
        expected = hf_logits(Path(folder), TOKENS)
        bound = RELATIVE_BOUND * (expected.max() - expected.min())
        assert (found[folder] - expected).abs().max() <= bound, name
        assert (ours[name] - expected).abs().max() <= bound, name
        if name in bare:
            assert (found[bare[name]] - expected).abs().max() > 100 * bound, name
    assert len(bare) == len(MODELS) - 2


@pytest.mark.full
def test_transformers_4_gives_the_ids_of_version_5(transformers_4, tmp_path):
    exported = {name: export_tokenizer(name, tmp_path / name) for name in TOKENIZERS}
    folders = [str(folder) for folder, _ in exported.values()]
    found = run_transformers_4(transformers_4, tmp_path, tokenizers=folders, texts=TRICKY)
    for folder, ours in exported.values():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids, marked, texts, special = found[str(folder)]
        assert [row for text, row in zip(TRICKY, ids, strict=True) if text in PLAIN] == ours
        assert ids == [tokenizer.encode(text, add_special_tokens=False) for text in TRICKY]
        assert marked == [tokenizer.encode(text) for text in TRICKY]
        assert texts == [tokenizer.decode(row) for row in ids]
        assert sorted(special) == sorted(tokenizer.all_special_ids)
