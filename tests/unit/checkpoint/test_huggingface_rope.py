"""Rotary settings of a config.json: each setting has its meaning in transformers, or is rejected by name."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron.checkpoint.huggingface.family import FAMILIES
from megatron.checkpoint.huggingface.importer import read_settings
from megatron.config import ModelConfig
from megatron.config.registries import ROPE_SCALINGS
from megatron.errors import UserError
from megatron.model.position import RotaryEmbedding
from tests.unit.checkpoint.hugging_face_models import LATER

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 3.0,
        "beta_slow": 0.5,
        "truncate": True,
        "attention_factor": None,
    },
}
# Settings of the families whose defaults do not fit the small sizes.
HEADS = {"mistral": {"num_key_value_heads": 4}, "qwen2": {"num_key_value_heads": 4}}
HEADS |= dict.fromkeys(("qwen3", "glm4_moe"), {"num_key_value_heads": 4, "head_dim": 16})
LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2")
HEADS |= dict.fromkeys(LATENT_TYPES, {"num_key_value_heads": 4, "num_hidden_layers": 4})
HEADS["mixtral"] = {"num_key_value_heads": 4}
# These types have separate rotary settings for each kind of layer.
LAYERED_TYPES = {"olmo3", "gemma3_text"}
ROTARY_TYPES = sorted(FAMILIES.keys() - {"bloom", "gpt2"} - LAYERED_TYPES - LATER)


def write_config(folder, kind, **settings):
    """Writes a config.json as another program would write it, without settings that transformers adds.
    Returns its content."""
    (folder / "config.json").write_text(
        json.dumps({"model_type": kind, **SIZES, **HEADS.get(kind, {}), **settings})
    )


def assert_equal_frequencies(folder):
    rotary = RotaryEmbedding(ModelConfig(**read_settings(folder)[1]))
    hf_config = AutoConfig.from_pretrained(folder)
    is_neox = hf_config.model_type == "gpt_neox"
    module = (GPTNeoXRotaryEmbedding if is_neox else LlamaRotaryEmbedding)(hf_config)
    torch.testing.assert_close(rotary.inverse_frequency, module.inv_freq)
    assert rotary.multiplier == pytest.approx(module.attention_scaling)


def test_every_scaling_is_here():
    assert ROPES.keys() == {"default", *ROPE_SCALINGS}


# Each setting is left out, and is set to each value that transformers might treat as missing.
MISSING = object()


@pytest.mark.parametrize("value", [MISSING, None, 0], ids=["missing", "null", "0"])
@pytest.mark.parametrize(
    "kind, key", [(kind, key) for kind, rope in ROPES.items() for key in (*rope, "partial_rotary_factor")]
)
def test_a_value_that_is_missing_null_or_0_is_never_this_programs_default(kind, key, value, tmp_path):
    rope = {**ROPES[kind], key: value}
    write_config(tmp_path, "llama", rope_parameters={k: v for k, v in rope.items() if v is not MISSING})
    try:
        assert_equal_frequencies(tmp_path)
    except UserError as error:
        # Without its type, a different key has no meaning. A 0 is out of range, and the error names its flag.
        assert value == 0 or key in str(error) or (key, value) == ("rope_type", MISSING)


@pytest.mark.parametrize("max_positions", [64, 96])
def test_a_yarn_factor_of_null_is_the_ratio_of_the_contexts(max_positions, tmp_path):
    rope = ROPES["yarn"] | {"factor": None}
    write_config(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=max_positions)
    assert read_settings(tmp_path)[1]["rope_scaling_factor"] == max_positions / 32
    assert_equal_frequencies(tmp_path)


NEEDED = [
    *(("linear", "factor"), ("linear", "rope_theta")),
    *(("llama3", key) for key in ROPES["llama3"]),
    *(("yarn", key) for key in ("original_max_position_embeddings", "rope_theta")),
    *((kind, "partial_rotary_factor") for kind in ROPES),
]


@pytest.mark.parametrize("kind, key", NEEDED)
def test_a_null_that_transformers_cannot_compute_with_is_refused_by_its_name(kind, key, tmp_path):
    write_config(tmp_path, "llama", rope_parameters={**ROPES[kind], key: None})
    with pytest.raises(UserError, match=f"{key} = None|{key} None|with {key}"):
        read_settings(tmp_path)


LINEAR = ROPES["linear"]
# (Settings in the file, words of the error.)
BESIDE = [
    ({"rope_theta": 7.0, "rope_parameters": LINEAR}, "'rope_theta' = 7.0, but .* rope_theta = 500.0"),
    ({"partial_rotary_factor": 0.75, "rope_parameters": LINEAR}, "partial_rotary_factor"),
    ({"rotary_emb_base": 7.0, "rope_parameters": LINEAR}, "'rotary_emb_base' = 7.0"),
    ({"rotary_pct": 0.5, "rope_parameters": {**LINEAR, "partial_rotary_factor": 1.0}}, "'rotary_pct' = 0.5"),
    ({"rope_type": "yarn", "rope_parameters": LINEAR}, "'rope_type' = yarn"),
    ({"original_max_position_embeddings": 16, "rope_parameters": ROPES["yarn"]}, "'original_max_position"),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "rope_parameters": LINEAR},
        "rope_parameters.rope_theta' = 500.0",
    ),
    ({"rope_scaling": {"rope_type": "default"}, "rope_parameters": LINEAR}, "rope_parameters.rope_type"),
    ({"rope_parameters": {**LINEAR, "type": "yarn"}}, "type = yarn"),
]


@pytest.mark.parametrize("kind", ROTARY_TYPES)
@pytest.mark.parametrize("settings, named", BESIDE)
def test_a_rotary_setting_that_transformers_ignores_is_refused_by_name(kind, settings, named, tmp_path):
    write_config(tmp_path, kind, **settings)
    if kind == "glm4_moe" and "partial_rotary_factor" in settings:  # transformers reads it
        part = AutoConfig.from_pretrained(tmp_path).rope_parameters["partial_rotary_factor"]
        assert read_settings(tmp_path)[1]["rotary_percent"] == part == 0.75
        return
    with pytest.raises(UserError, match=named):
        read_settings(tmp_path)


# transformers does not have the type of Kimi K2, which this program reads with the table of DeepSeek-V3.
@pytest.mark.parametrize("kind", sorted({*ROTARY_TYPES} - {"kimi_k2"}))
def test_a_rotary_setting_that_repeats_the_one_in_use_is_read(kind, tmp_path):
    # transformers 4.48 to 4.57 write all four settings for a GPT-NeoX.
    neox = {"rotary_emb_base": 500, "rotary_pct": 0.25, "partial_rotary_factor": 0.25, "rope_scaling": None}
    more = neox if kind == "gpt_neox" else {"rope_scaling": {**LINEAR, "type": "linear"}}
    write_config(tmp_path, kind, rope_theta=500, **more)
    assert read_settings(tmp_path)[1]["rotary_base"] == 500.0
    assert_equal_frequencies(tmp_path)


def test_a_gpt_neox_with_the_setting_of_llama_is_refused(tmp_path):
    """For a GPT-NeoX transformers reads only rotary_emb_base. It would ignore rope_theta, and use 10,000."""
    write_config(tmp_path, "gpt_neox", rope_theta=500.0)
    with pytest.raises(UserError, match="'rope_theta' = 500.0, but transformers uses rope_theta = 10000"):
        read_settings(tmp_path)
