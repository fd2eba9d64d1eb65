"""Conversions of all families in both directions have equal logits and bits. Unsupported models are
rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megatron.arguments import read_command_line
from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.huggingface.exporter import write_settings
from megatron.checkpoint.huggingface.family import FAMILIES
from megatron.checkpoint.huggingface.importer import config_without_run, read_hugging_face, read_settings
from megatron.checkpoint.reading import read_checkpoint
from megatron.config import DataConfig, ModelConfig
from megatron.errors import UserError
from tests.distributed.test_latent_attention import DEEPSEEK_V2, DEEPSEEK_V3
from tests.distributed.test_model_variants import FALCON, GEMMA3, LLAMA, NEOX, OLMO2
from tests.support.conversion import write_hugging_face
from tests.support.layouts import EOD, VOCAB, Row, config_of
from tests.unit.checkpoint.hugging_face_folder import (
    GLM4_MOE,
    MIXTRAL,
    OLMOE,
    QWEN3_MOE,
    TOKENS,
    change_config,
    convert,
    hf_logits,
    megatron_logits,
    weights_of,
)
from tests.unit.checkpoint.hugging_face_models import (
    LATER,
    LLAMA3,
    MODELS,
    NEOX_ROPE,
    OLMO3_ROPE,
    OTHER_NAMES,
    RENAMED,
    SAME_FUNCTION,
    SIZES,
    YARN,
)
from tests.unit.checkpoint.native_folder import random_wholes, write_native
from tests.unit.checkpoint.test_huggingface_import import make_universal, save_tokenizer

RELATIVE_BOUND = 1e-5
"""Largest error of the logits, relative to their spread."""


def settings_of(name, **sizes):
    """Returns the configuration of a model."""
    kind, changes = MODELS[name]
    names = {name: name for name in SIZES} | RENAMED.get(kind, {})
    settings = {names[name]: value for name, value in SIZES.items() if names[name]}
    settings |= {"pad_token_id": None}  # the families' defaults exceed the vocabulary
    return AutoConfig.for_model(kind, **settings | changes | sizes)


def save_hf(folder, name, max_shard_size="1GB", std=0.15, **sizes):
    """Saves a Hugging Face model whose norms and biases differ from their initial values."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(settings_of(name, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(std * torch.randn(parameter.shape))
    model.to(MODELS[name][1].get("dtype", torch.float32))
    for _, module in model.named_modules():
        if hasattr(module, "e_score_correction_bias"):  # fp32 in published models
            bias = 0.2 * torch.randn(len(module.e_score_correction_bias))
            is_parameter = "e_score_correction_bias" in module._parameters
            module.e_score_correction_bias = torch.nn.Parameter(bias, False) if is_parameter else bias
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def assert_equal_logits(found, expected):
    assert expected.std() > 0.1
    assert (found - expected).abs().max() <= RELATIVE_BOUND * (expected.max() - expected.min())


# These settings may differ: without a tokenizer special tokens are unknown, BLOOM's config has no length, and
# n_inner is derived.
FREE = {"_name_or_path", "bos_token_id", "eos_token_id", "seq_length", "n_inner"}


@pytest.mark.gate(
    rows=4,
    also=["olmo-3", "gemma-3", "bloom, fp16", "gpt2, bf16, wider MLP"]
    + ["mixtral", "olmoe", "qwen-3-moe", "glm-4.5", "glm-4.5, groups, bf16"]
    + ["gpt-oss", "gemma-2", "cohere-2", "smollm-3", "trinity", "glm-4-0414"]
    + ["deepseek-v3", "deepseek-v3, plain queries, bf16", "deepseek-v2", "glm-4.7-flash"],
)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_keeps_its_logits_and_every_bit(name, tmp_path):
    save_hf(tmp_path / "hf", name, max_shard_size="20KB", std=0.25 if MODELS[name][0] in LATER else 0.15)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    checkpoint = make_universal(tmp_path / "hf", tmp_path)
    assert (checkpoint.state.iteration, checkpoint.vocab_size, checkpoint.eod) == (0, VOCAB, None)
    assert_equal_logits(megatron_logits(checkpoint), hf_logits(tmp_path / "hf"))
    convert("--load", tmp_path, "--output", tmp_path / "again")
    before = dict(_all_weights(tmp_path / "hf"))
    after = dict(_all_weights(tmp_path / "again"))
    if name in OTHER_NAMES:
        after = before
    assert before.keys() == after.keys()
    for key, weight in before.items():
        assert weight.dtype == after[key].dtype and torch.equal(weight, after[key]), key
    assert_equal_logits(hf_logits(tmp_path / "again"), hf_logits(tmp_path / "hf"))
    if MODELS[name][0] in ("bloom", "gpt2"):
        was, now = (AutoConfig.from_pretrained(tmp_path / folder).to_dict() for folder in ("hf", "again"))
        assert {key for key in now if now[key] != was.get(key)} <= FREE


def _all_weights(folder):
    return [item for path in folder.glob("*.safetensors") for item in load_file(path).items()]


BLOOM, GPT2, NORM = Row(positions="alibi"), Row(positions="absolute"), {"embed_layernorm": True}
WIDE = {"hidden_size": 48, "ffn_hidden_size": 192, "num_attention_heads": 6, "kv_channels": 8}
EPSILON = {"latent_layernorm_epsilon": 1e-6}
AFTER_NORM = {"apply_residual_connection_post_layernorm": True}


@pytest.mark.gate(rows=8)
@pytest.mark.parametrize(
    "model, row, architecture",
    [
        (NORM, BLOOM, "BloomForCausalLM"),
        (NORM | WIDE, Row(positions="alibi", tp=2), "BloomForCausalLM"),
        (NORM | AFTER_NORM | {"layernorm_epsilon": 1e-2}, BLOOM, "BloomForCausalLM"),
        ({"layernorm_epsilon": 1e-2}, Row(positions="absolute", tp=4), "GPT2LMHeadModel"),
        ({"ffn_hidden_size": 56, "max_position_embeddings": 40}, GPT2, "GPT2LMHeadModel"),
        (LLAMA, Row(tp=2), "LlamaForCausalLM"),
        (LLAMA | {"num_query_groups": 1}, Row(tp=4), "LlamaForCausalLM"),
        (
            LLAMA | {"add_qkv_bias": True, "untie_embeddings_and_output_weights": False},
            Row(),
            "Qwen2ForCausalLM",
        ),
        (LLAMA | {"window_size": 5}, Row(), "MistralForCausalLM"),
        (LLAMA | {"qk_layernorm": True, "kv_channels": 16}, Row(tp=2), "Qwen3ForCausalLM"),
        (OLMO2, Row(tp=4), "Olmo2ForCausalLM"),
        (OLMO2 | {"window_size": 5, "window_pattern": ("W", "F")}, Row(tp=2), "Olmo3ForCausalLM"),
        (GEMMA3, Row(tp=2), "Gemma3ForCausalLM"),
        (NEOX, Row(tp=2), "GPTNeoXForCausalLM"),
        (FALCON, Row(tp=2), "FalconForCausalLM"),
        (MIXTRAL, Row(tp=2), "MixtralForCausalLM"),
        (OLMOE, Row(), "OlmoeForCausalLM"),
        (QWEN3_MOE, Row(), "Qwen3MoeForCausalLM"),
        (GLM4_MOE, Row(), "Glm4MoeForCausalLM"),
        (
            {
                **{**GLM4_MOE, "moe_router_num_groups": 2, "moe_router_group_topk": 1, "qk_layernorm": True},
                **{"moe_layer_freq": ("E",), "add_qkv_bias": False},
            },
            Row(),
            "Glm4MoeForCausalLM",
        ),
        (DEEPSEEK_V3 | EPSILON, Row(tp=2), "DeepseekV3ForCausalLM"),
        (DEEPSEEK_V2 | {"layernorm_epsilon": 1e-6}, Row(), "DeepseekV2ForCausalLM"),
        (DEEPSEEK_V3 | EPSILON | {"moe_layer_freq": ("E", "D")}, Row(), "Glm4MoeLiteForCausalLM"),
    ],
)
def test_a_megatron_checkpoint_survives_a_round_trip(model, row, architecture, tmp_path):
    config = config_of(row, model=model)
    wholes = random_wholes(config)
    write_native(tmp_path / "native", config, wholes)
    native = read_checkpoint(tmp_path / "native")
    write_hugging_face(open_checkpoint(native.folder), tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == [architecture]
    assert_equal_logits(hf_logits(tmp_path / "hf"), megatron_logits(native))
    found = read_hugging_face(tmp_path / "hf")
    weights = dict(weights_of(found))
    assert weights.keys() == wholes.keys()
    assert all(torch.equal(weights[name], wholes[name]) for name in wholes)
    assert (found.rows, found.precision) == (VOCAB, "fp32")
    if architecture in ("BloomForCausalLM", "GPT2LMHeadModel"):
        before, again = vars(config.model), vars(ModelConfig(**found.fields))
        # The padding depends on the layout. A table of absolute positions may be longer than the samples.
        free = {"make_vocab_size_divisible_by"} | ({"seq_length"} if row is GPT2 else set())
        assert {key for key in before if before[key] != again[key]} <= free


@pytest.mark.parametrize("eod", [EOD, None])
@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - {"kimi_k2"}))  # transformers lacks this type
def test_an_exported_model_has_no_special_token_that_the_run_did_not_have(model_type, eod, tmp_path):
    """Hugging Face's default token ids are for other models. For example, OLMo 2 would get token 1 as its
    padding."""
    *_, name = (name for name, (kind, _) in MODELS.items() if kind == model_type)
    settings_of(name).save_pretrained(tmp_path / "hf")
    _, fields = read_settings(tmp_path / "hf")
    del fields["vocab_size"]
    write_settings(config_without_run(fields, VOCAB, DataConfig()), VOCAB, eod, "fp32", tmp_path)
    hf_config = AutoConfig.from_pretrained(tmp_path)
    assert hf_config.model_type == SAME_FUNCTION.get(model_type, model_type)
    for settings in (hf_config, GenerationConfig.from_pretrained(tmp_path)):
        ids = {name: value for name, value in settings.to_dict().items() if "token_id" in name}
        if eod is None and model_type in ("glm", "glm4"):  # their classes replace None
            ids["eos_token_id"] = None
        assert ids.pop("bos_token_id") == ids.pop("eos_token_id") == eod
        assert not any(value is not None for value in ids.values())


@pytest.mark.parametrize(
    "name, changes, named",
    [
        ("gpt2", {"activation_function": "relu"}, "activation_function = relu"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings = False"),
        ("bloom", {"tie_word_embeddings": False}, "tie_word_embeddings = False"),
        ("bloom", {"slow_but_exact": True}, "slow_but_exact = True"),
        (
            "qwen-2, window",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "use_sliding_window = True and layer_types = .*full_attention",
        ),
        ("qwen-3", {"attention_bias": True}, "attention_bias = True"),
        ("olmo-2", {"clip_qkv": 8.0}, "clip_qkv.* = 8.0"),
        ("olmo-3", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        (
            "olmo-3",
            {"layer_types": ["chunked_attention"] * 5},
            "layer_types = .*: expected full_attention or",
        ),
        ("olmo-3", {"sliding_window": None}, "sliding_window = None: expected an integer of at least 1"),
        ("olmo-3", {"rope_parameters": YARN}, "expected an object for full_attention and one for sliding"),
        (
            "olmo-3",
            {"rope_parameters": OLMO3_ROPE | {"sliding_attention": YARN}},
            "of sliding_attention are of rope_type yarn: expected default",
        ),
        (
            "olmo-3",
            {"rope_parameters": OLMO3_ROPE | {"full_attention": YARN | {"attention_factor": 1.5}}},
            "attention_factor = 1.5",
        ),
        (
            "olmo-3",
            {"rope_parameters": OLMO3_ROPE | {"full_attention": YARN | {"factor": "4"}}},
            "factor = 4 with rope_type yarn: expected a number",
        ),
        ("olmo-3", {"rope_theta": 7.0}, "'rope_theta' = 7.0, but transformers uses rope_theta = 10000"),
        ("gemma-3", {"rope_local_base_freq": 7.0}, "'rope_local_base_freq' = 7.0, but transformers uses"),
        ("gemma-3", {"sliding_window_pattern": 2}, "sliding_window_pattern = 2, but .* layer_types"),
        ("gemma-3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma-3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        (
            "gemma-3",
            {"query_pre_attn_scalar": 0},
            "query_pre_attn_scalar = 0: expected an integer of at least 1",
        ),
        ("pythia", {"hidden_act": "relu"}, "hidden_act = relu: expected gelu"),
        ("pythia", {"attention_bias": False}, "attention_bias = False"),
        (
            "pythia",
            {"rope_parameters": NEOX_ROPE["rope_parameters"] | {"partial_rotary_factor": 1.5}},
            "rotates 1.5 of each head",
        ),
        ("falcon", {"new_decoder_architecture": True}, "new_decoder_architecture = True"),
        ("falcon", {"alibi": True}, "alibi = True"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2: expected 1"),
        ("falcon, all heads, untied", {"num_kv_heads": 2}, "num_kv_heads = 2 without multi_query"),
        ("llama-3", {"attention_bias": True}, "attention_bias = True"),
        ("llama-3", {"hidden_act": "gelu"}, "hidden_act = gelu"),
        (
            "llama-3",
            {"logit_scale": 0.5},
            "logit_scale.* = 0.5 .* no equivalent in this program: only a Llama model",
        ),
        ("llama-3", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama-3.1", {"rope_parameters": LLAMA3 | {"rope_type": "dynamic"}}, "rope_type dynamic"),
        ("qwen-2.5, yarn", {"rope_parameters": YARN | {"mscale": 2.0}}, "mscale = 2.0"),
        # transformers states the reason in the second line of its error.
        ("llama-3", {"max_position_embeddings": None}, "rejects .* expected int, got NoneType"),
        ("llama-3", {"tie_word_embeddings": True}, "lm_head.weight that differs"),
        ("llama-3", {"num_key_value_heads": 3}, "num_key_value_heads = 3 and num_attention_heads = 4"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("olmoe", {"num_experts": 0}, ": num_experts is 0: expected at least 1"),
        ("qwen-3-moe", {"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers = .* no layer has experts"),
        ("qwen-3-moe", {"mlp_only_layers": [0.5]}, "rejects .*mlp_only_layers"),
        (
            "qwen-3-moe",
            {"decoder_sparse_step": 0},
            "decoder_sparse_step = 0: expected an integer of at least 1",
        ),
        ("qwen-3-moe", {"num_local_experts": 10**9}, ": num_experts is 1000000000: expected at most"),
        ("qwen-3-moe", {"num_local_experts": 60_000}, "120,000 experts in its config.json, and "),
        ("glm-4.5", {"first_k_dense_replace": 3}, "first_k_dense_replace = 3: expected 0 to 2"),
        ("glm-4.5", {"n_shared_experts": 0}, "n_shared_experts = 0: expected an integer of at least 1"),
        ("glm-4.5", {"norm_topk_prob": False}, "norm_topk_prob = False and num_experts_per_tok = 2"),
        ("glm-4.5", {"hidden_act": "gelu"}, "hidden_act = gelu"),
        (
            "laguna",
            {"num_attention_heads_per_layer": [6, 4, 4]},
            r"per_layer = \[6, 4, 4\]: expected one number for all full_attention layers and one",
        ),
        ("laguna", {"gating": False}, "gating = False: expected true or per-head or per-element"),
        ("laguna", {"moe_router_logit_softcapping": 9.0}, "moe_router_logit_softcapping = 9.0"),
        ("mimo-v2-flash", {"num_key_value_heads": 4}, "heads = 4 and num_attention_heads = 4: expected a"),
        (
            "mimo-v2-flash",
            {"hybrid_layer_pattern": [1, 1, 0]},
            r"pattern = \[1, 1, 0\], but transformers uses \[1, 0, 1\]",
        ),
        (
            "mimo-v2-flash",
            {"swa_num_key_value_heads": 4},
            "swa_num_key_value_heads = 4, but transformers uses 2",
        ),
    ],
)
def test_what_the_model_here_lacks_is_refused_by_name(name, changes, named, tmp_path):
    save_hf(tmp_path, name)
    change_config(tmp_path, **changes)
    with pytest.raises(UserError, match=named):
        read_hugging_face(tmp_path)


def test_older_files_with_rope_theta_and_rope_scaling_are_read(tmp_path):
    save_hf(tmp_path, "llama-3.1")
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fields = read_hugging_face(tmp_path).fields
    assert (fields["rotary_base"], fields["rope_scaling_type"]) == (500.0, "llama3")
    assert (fields["rope_scaling_factor"], fields["rope_original_max_position_embeddings"]) == (8.0, 16)


@torch.no_grad()
def test_from_and_to_choose_the_direction_and_carry_the_tokenizer(tmp_path, capsys):
    hf, native, again = (str(tmp_path / name) for name in ("hf", "native", "again"))
    (tmp_path / "hf").mkdir()
    tokens = save_tokenizer(tmp_path / "hf")
    save_hf(tmp_path / "hf", "llama-3", vocab_size=tokens + 3)
    convert("--from", hf, "--to", native)
    flags = capsys.readouterr().out.split("start from it with: ")[1].split()
    run = "--seq-length 32 --micro-batch-size 1 --global-batch-size 1 --lr 1 --train-iters 1".split()
    config = read_command_line([*flags, *run, "--dry-run"], {}).config
    assert (config.model.query_groups, config.model.rotary_base) == (2, 5e5)
    assert config.checkpoint.load == native
    convert("--from", native, "--to", again)
    logits = [
        AutoModelForCausalLM.from_pretrained(folder).eval()(TOKENS).logits[..., :tokens]
        for folder in (hf, again)
    ]
    assert_equal_logits(logits[1], logits[0])
    assert len(AutoTokenizer.from_pretrained(again)) == tokens


def test_only_the_weights_in_use_are_mapped_into_memory(tmp_path):
    """If all weights were mapped, the resident memory of a conversion would grow to the size of the model."""
    save_hf(tmp_path, "llama-3")
    files = {path.name for path in tmp_path.glob("*.safetensors")}

    def mappings() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(Path(line.split()[-1]).name in files for line in lines if str(tmp_path) in line)

    model = read_hugging_face(tmp_path)
    assert mappings() == 0
    found = 0
    for _weight in weights_of(model):
        assert mappings() <= 3  # queries, keys and values
        found += mappings()
    del _weight
    assert found and mappings() == 0
