"""Converts published settings of models with latent attention. Settings without an equivalent
are rejected."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron.checkpoint.huggingface.importer import config_without_run, read_settings
from megatron.config import DataConfig
from megatron.errors import UserError
from megatron.model.inference.single_process import model_specs

YARN = {
    **{
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}
# Settings that the published models' config.json has, but transformers does not.
OF_TRAINING = {"aux_loss_alpha": 0.001, "ep_size": 1, "seq_aux": True, "moe_layer_freq": 1}
SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1}
# Name -> (model type, settings that differ from transformers' defaults, settings that only other readers
# use).
PUBLISHED = {
    "DeepSeek-V3": ("deepseek_v3", {"max_position_embeddings": 163840}, {**SIGMOID, "rope_scaling": YARN}),
    "Kimi K2": (
        "kimi_k2",
        {"n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840}
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827},
        {**SIGMOID, "num_nextn_predict_layers": 0, "rope_scaling": {**YARN, "factor": 32}},
    ),
    "DeepSeek-V2": (
        "deepseek_v2",
        {"hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 60, "num_attention_heads": 128}
        | {"num_key_value_heads": 128, "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_group": 8}
        | {"topk_group": 3, "num_experts_per_tok": 6, "topk_method": "group_limited_greedy"}
        | {"routed_scaling_factor": 16.0, "first_k_dense_replace": 1, "max_position_embeddings": 163840},
        {"scoring_func": "softmax", "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "GLM-4.7-Flash": ("glm4_moe_lite", {}, {"first_k_dense_replace": 1, "topk_method": "noaux_tc"}),
}
# Numbers of parameters in the files on the hub, without multi-token prediction.
PARAMETERS = {"DeepSeek-V3": 671e9, "Kimi K2": 1026e9, "DeepSeek-V2": 236e9, "GLM-4.7-Flash": 30e9}


def write(folder, name, **changes):
    kind, settings, others = PUBLISHED[name]
    config = AutoConfig.for_model("deepseek_v3" if kind == "kimi_k2" else kind, **settings)
    of_training = {} if kind == "glm4_moe_lite" else OF_TRAINING
    content = {**config.to_dict(), **of_training, **others, "model_type": kind, **changes}
    if "rope_scaling" in others:
        del content["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(content))
    return settings


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_make_a_model_with_the_parameters_of_transformers(name, tmp_path):
    settings = write(tmp_path, name)
    kind = PUBLISHED[name][0]
    family, fields = read_settings(tmp_path)
    rows = fields.pop("vocab_size")
    specs = model_specs(config_without_run(fields, None, DataConfig()), rows, None)
    found = sum(math.prod(spec.valid_shape) for spec in specs.values() if spec.has_gradient)
    with torch.device("meta"):
        config = AutoConfig.for_model(family.config_type or kind, **settings)
        expected = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert found == expected == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("DeepSeek-V3", {"num_key_value_heads": 8}, "num_key_value_heads = 8 and num_attention_heads = 128"),
        ("DeepSeek-V3", {"rope_interleave": False}, "rope_interleave = False: only True"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func = softmax: only sigmoid"),
        ("DeepSeek-V3", {"attention_bias": True}, "attention_bias = True: only False"),
        (
            "DeepSeek-V3",
            {"rope_scaling": {**YARN, "mscale": None}},
            r"mscale_all_dim = 1\.0 without mscale, which has no equivalent",
        ),
        ("DeepSeek-V2", {"topk_method": "noaux_tc"}, "expected greedy or group_limited_greedy"),
        (
            "Kimi K2",
            {"n_group": 2, "n_routed_experts": 385},
            "385 is not divisible by n_group 2",
        ),
        ("GLM-4.7-Flash", {"first_k_dense_replace": 2}, "first_k_dense_replace = 2, but transformers uses"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["dense"] * 47}, "no layer has experts"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["dense"]}, "expected dense or sparse for each of the 47"),
    ],
)
def test_settings_without_an_equivalent_are_named(name, changes, message, tmp_path):
    write(tmp_path, name, **changes)
    with pytest.raises(UserError, match=message):
        read_settings(tmp_path)
