"""Malicious folders in Hugging Face's format: their code does not run, and the user is not asked to allow
it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.huggingface.importer import read_hugging_face
from megatron.errors import UserError
from megatron.files import HostileFileError
from megatron.tokenizer.hugging_face import HuggingFaceTokenizer
from tests.support.layouts import VOCAB
from tests.unit.checkpoint.hugging_face_folder import change_config, change_weights, mistake, save_hf
from tests.unit.hostile import refusal, snapshot


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    save_hf(tmp_path / "hf", "gpt2", sizes=(VOCAB, 1))
    return tmp_path / "hf"


CODE = "from pathlib import Path\nPath({!r}).touch()\nclass Hostile: pass\n"
AUTO_MAP = {"AutoConfig": "code.Hostile", "AutoTokenizer": ["code.Hostile", "code.Hostile"]}


@pytest.mark.parametrize("kind", ["gpt2", "hf"])
def test_code_in_a_hostile_folder_is_not_run_without_asking(
    kind: str, hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: Any) -> str:
        raise AssertionError("it asks on the terminal")

    monkeypatch.setattr("builtins.input", ask)
    (hf_folder / "code.py").write_text(CODE.format(str(tmp_path / "harm")))
    change_config(hf_folder, model_type=kind, auto_map=AUTO_MAP)
    (hf_folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": AUTO_MAP, "tokenizer_class": "Hostile"})
    )
    for read in (read_hugging_face, lambda folder: HuggingFaceTokenizer(str(folder))):
        try:
            read(hf_folder)
        except UserError as error:
            assert str(hf_folder) in str(error)
    assert not (tmp_path / "harm").exists()


LLAMA = [
    {"num_hidden_layers": 1 << 39},
    *({"num_key_value_heads": value} for value in (0, "x")),
    {"rope_parameters": {"rope_type": ["yarn"]}},
    {"rope_parameters": {"rope_type": "linear", "factor": "x"}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": -1}},
    {"rope_parameters": [1]},
]
SETTINGS = [
    *({"n_layer": value} for value in (300_000, 1 << 60, -1, 0, 1.5, "x")),
    *({"n_head": value} for value in (0, 7)),
    *({"n_embd": value} for value in (1 << 39, None)),
    *({"num_labels": 10**9}, {"vocab_size": []}, {"n_positions": -5}, {"model_type": ["gpt2"]}),
    *({"layer_norm_epsilon": "\n\x1b[2J"}, {"activation_function": "\n" * 1000}),
    *({"model_type": "llama", **changes} for changes in LLAMA),
]


@pytest.mark.parametrize("changes", SETTINGS)
def test_hostile_settings_are_refused(changes: dict[str, Any], hf_folder: Path) -> None:
    change_config(hf_folder, **changes)
    assert str(hf_folder) in refusal(lambda: read_hugging_face(hf_folder))


@pytest.mark.parametrize("content", [b"[" * 100_000, b" " * (1 << 25) + b"{}", None, b"[]"])
def test_a_hostile_or_missing_config_file_is_refused(content: bytes | None, hf_folder: Path) -> None:
    (hf_folder / "config.json").unlink()
    if content is not None:
        (hf_folder / "config.json").write_bytes(content)
    assert str(hf_folder) in refusal(lambda: read_hugging_face(hf_folder))


@pytest.mark.parametrize("name", ["../victim.safetensors", "/dev/zero", "a/b.safetensors", "", 5, "x\0"])
def test_a_hostile_index_names_no_file_outside(name: Any, hf_folder: Path, tmp_path: Path) -> None:
    (hf_folder / "model.safetensors").rename(tmp_path / "victim.safetensors")
    index = hf_folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": name}}))
    sentence = refusal(lambda: read_hugging_face(hf_folder), HostileFileError)
    assert sentence.startswith(f"{index} names a file")


def test_the_links_in_the_cache_of_the_hub_are_not_hostile(hf_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (hf_folder / "model.safetensors").rename(tmp_path / "blobs" / "5f")
    (hf_folder / "model.safetensors").symlink_to("../blobs/5f")
    assert read_hugging_face(hf_folder).rows == VOCAB


def test_a_hostile_link_to_a_device_is_not_read(hf_folder: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (hf_folder / name).unlink()
        (hf_folder / name).symlink_to("/dev/zero")
        assert str(hf_folder) in refusal(lambda: read_hugging_face(hf_folder))


def test_a_hostile_name_of_a_weight_is_shown_in_one_line(hf_folder: Path) -> None:
    change_weights(hf_folder, lambda weights: weights | {"\x1b[2J\nerror:": torch.ones(1)})
    assert r"'\x1b[2J\nerror:'" in refusal(lambda: read_hugging_face(hf_folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_and_nothing_is_left(
    value: float, hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bias = torch.zeros(128)
    bias[3] = value
    change_weights(hf_folder, lambda weights: weights | {"transformer.h.0.mlp.c_fc.bias": bias})
    before = snapshot(tmp_path)
    flags = ["--from-hugging-face", hf_folder, "--output", tmp_path / "out", "--vocab-size", VOCAB]
    assert "holds 1 values of 3.mlp.dense_h_to_4h.bias that are NaN or infinite" in mistake(capsys, *flags)
    assert snapshot(tmp_path) == before
