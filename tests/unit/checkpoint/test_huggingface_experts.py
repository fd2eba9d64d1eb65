"""Models with experts: a weight that is not read or not written is an error, and the output names what is not
converted."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.huggingface.exporter import DIGEST_FILE, HuggingFaceWriter, format_differences
from megatron.checkpoint.huggingface.family import FAMILIES, family_of
from megatron.checkpoint.huggingface.importer import read_hugging_face
from megatron.checkpoint.huggingface.missing import lacking_for
from megatron.commands import convert_checkpoint
from megatron.errors import UserError
from megatron.model.inference.single_process import GPTModel
from megatron.model.layer_list import PARAMETER_DTYPES, final_norm_of, first_mtp_layer_of
from tests.support.conversion import write_hugging_face
from tests.support.layouts import VOCAB, Row, config_of
from tests.unit.checkpoint.hugging_face_folder import (
    EXPERTS,
    GLM4_MOE,
    MIXTRAL,
    OLMOE,
    TOKENS,
    change_config,
    change_weights,
    convert,
    hf_logits,
    megatron_logits,
)
from tests.unit.checkpoint.native_folder import random_wholes, write_native
from tests.unit.checkpoint.test_huggingface_llama import assert_equal_logits, save_hf

EXPERT = "model.layers.1.{}experts.{}.{}.weight"
CHANGES = {
    "mixtral": ("block_sparse_moe.", "w1"),
    "olmoe": ("mlp.", "up_proj"),
    "qwen-3-moe": ("mlp.", "down_proj"),
    "glm-4.5": ("mlp.", "gate_proj"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_expert_that_is_missing_or_left_over_is_named(name, tmp_path):
    """Megatron-LM's converter dropped all experts of Mixtral and reported success (#5844)."""
    save_hf(tmp_path, name)
    module, matrix = CHANGES[name]
    first, surplus = (EXPERT.format(module, number, matrix) for number in (0, 99))
    change_weights(tmp_path, lambda weights: weights | {surplus: weights[first].clone()})
    with pytest.raises(UserError, match=f"1 weights that the model does not have, among them {surplus}"):
        read_hugging_face(tmp_path)
    change_weights(
        tmp_path, lambda weights: {key: w for key, w in weights.items() if key not in (first, surplus)}
    )
    with pytest.raises(UserError, match=f"lacks 1 weights, among them {first}"):
        read_hugging_face(tmp_path)


def test_a_model_returns_by_two_commands_without_other_flags(tmp_path):
    save_hf(tmp_path / "source", "qwen-3-moe")
    source, middle, target = (str(tmp_path / name) for name in ("source", "middle", "target"))
    convert_checkpoint.main(["--from", source, "--to", middle])
    assert (tmp_path / "middle" / "latest_universal").read_text() == "global_step0_universal"
    convert_checkpoint.main(["--from", middle, "--to", target, "--format", "huggingface"])
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "target"))
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)


def test_an_export_without_an_expert_is_an_error(tmp_path):
    config = config_of(Row(), model=MIXTRAL)
    path = write_native(tmp_path / "native", config, random_wholes(config))
    (tmp_path / "hf").mkdir()
    writer = HuggingFaceWriter(tmp_path / "hf", open_reader(open_checkpoint(path)))
    for name in writer.parameter_bytes():
        if name != "4.mlp.experts.dense_4h_to_h.weight":
            writer.write_parameter(name, writer.pieces(name, verify=False))
    with pytest.raises(UserError, match=r"0 weights model\.layers\.1\.block_sparse_moe\.experts\.0\.w2\.wei"):
        writer.complete()


def test_the_state_that_only_training_needs_is_not_written(tmp_path):
    balance = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.01}
    config = config_of(Row(), model={**OLMOE, **balance})
    wholes = random_wholes(config)
    assert "3.mlp.router.expert_load" in wholes
    path = write_native(tmp_path / "native", config, wholes)
    write_hugging_face(open_checkpoint(path), tmp_path / "hf")
    assert "3.mlp.router.weight" in read_hugging_face(tmp_path / "hf").parameters
    assert not any("load" in name for name in load_file(tmp_path / "hf" / "model.safetensors"))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_bias_of_experts_is_never_rounded(precision, tmp_path):
    config = config_of(Row(precision=precision), model=GLM4_MOE)
    wholes = random_wholes(config)
    path = write_native(tmp_path / "native", config, wholes)
    write_hugging_face(open_checkpoint(path), tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    bias = stored["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(bias, wholes["4.mlp.router.expert_bias"])
    others = {weight.dtype for key, weight in stored.items() if not key.endswith("correction_bias")}
    assert others == {PARAMETER_DTYPES[precision]}
    imported = open_reader(open_checkpoint(tmp_path / "hf"))
    assert imported.model.precision == precision
    assert torch.equal(imported.read("4.mlp.router.expert_bias", VALUES), wholes["4.mlp.router.expert_bias"])


def test_experts_of_4_bits_have_the_values_that_transformers_unpacks(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    save_hf(tmp_path, "gpt-oss", intermediate_size=64, dtype=torch.bfloat16)
    torch.manual_seed(5)
    values = {}

    def pack(weights):
        for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, rows = weights.pop(name).shape
            blocks = torch.randint(256, (experts, rows, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 128, blocks.shape[:-1], dtype=torch.uint8)
            weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            values[name] = convert_moe_packed_tensors(blocks, scales)
        return weights

    change_weights(tmp_path, pack)
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    stored = read_hugging_face(tmp_path).stored
    assert len(values) == 6 and all(torch.equal(stored[name].read(), values[name]) for name in values)
    change_config(tmp_path, quantization_config={"quant_method": "gptq"})
    with pytest.raises(UserError, match="gptq.*expected mxfp4"):
        read_hugging_face(tmp_path)


def test_a_type_that_needs_a_missing_part_is_answered_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next"}))
    with pytest.raises(UserError, match="of type qwen3_next, which needs linear attention: it is not impl"):
        read_hugging_face(tmp_path)
    assert not {kind for kind in FAMILIES if lacking_for(kind)}


@torch.no_grad()
def logits_of_later_tokens(checkpoint, next_tokens):
    """Returns the logits of each layer of multi-token prediction. next_tokens: the tokens that the layers
    read."""
    model = GPTModel(checkpoint.config, checkpoint.vocab_size, checkpoint.eod)
    open_reader(checkpoint).load_weights(model)
    final, embedding = final_norm_of(checkpoint.config.model.num_layers), model.tied_modules["embed"]
    is_untied = checkpoint.config.model.untie_embeddings_and_output_weights
    head = model.get_submodule(str(final + 1)) if is_untied else embedding
    hidden, found = model.eval().get_submodule(str(final))(model._hidden(TOKENS)), []
    for index, tokens in enumerate(next_tokens, first_mtp_layer_of(checkpoint.config.model.num_layers)):
        hidden = model.get_submodule(str(index))(hidden, tokens, embedding.word_embeddings)
        found.append(hidden @ head.head_weight[:VOCAB].T)
    return found


@torch.no_grad()
def their_logits_of_later_tokens(folder, layers, next_tokens):
    """Returns the logits of transformers' layers for multi-token prediction."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # By default transformers ignores the layer numbers that these layers have in published models.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{4 + n}\." for n in range(layers)]
    later, found = MtpModel.from_pretrained(model).eval(), []
    hidden = model.model(TOKENS).last_hidden_state
    positions = torch.arange(TOKENS.shape[1])[None]
    for layer, tokens in enumerate(next_tokens):
        hidden = later.forward_layer(layer, hidden, positions, None, input_ids=tokens)
        found.append(model.lm_head(hidden))
    return found


@pytest.mark.parametrize("layers, untied", [(1, True), (2, False)])
def test_layers_for_multi_token_prediction_keep_their_logits_and_every_bit(layers, untied, tmp_path):
    """transformers, which runs these layers to draft tokens, must read their names, shapes and values."""
    ties = {"mtp_num_layers": layers, "untie_embeddings_and_output_weights": untied}
    config = config_of(Row(), model=GLM4_MOE | ties)
    wholes = random_wholes(config)
    native = open_checkpoint(write_native(tmp_path / "native", config, wholes))
    write_hugging_face(native, tmp_path / "hf")
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert settings["num_nextn_predict_layers"] == layers
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert stored["model.layers.4.eh_proj.weight"].shape == (32, 64)
    assert {name for name in stored if name.startswith("model.layers.4.") and ".experts." not in name} >= {
        f"model.layers.4.{name}.weight"
        for name in ("enorm", "hnorm", "shared_head.norm", "embed_tokens", "self_attn.q_proj", "mlp.gate")
    }
    assert ("model.layers.4.shared_head.head.weight" in stored) == untied
    assert_equal_logits(megatron_logits(native), hf_logits(tmp_path / "hf"))
    later = [torch.nn.functional.pad(TOKENS[:, k:], (0, k)) for k in range(1, layers + 1)]
    ours = logits_of_later_tokens(native, later)
    for found, wanted in zip(ours, their_logits_of_later_tokens(tmp_path / "hf", layers, later), strict=True):
        assert_equal_logits(found, wanted)
    back = open_reader(open_checkpoint(tmp_path / "hf"))
    assert back.recorded_model()[0]["mtp_num_layers"] == layers
    assert set(back.stored_names) == wholes.keys()
    for name, whole in wholes.items():
        assert torch.equal(back.read(name, VALUES), whole)


def test_copies_must_be_equal_and_missing_layers_are_no_error(tmp_path):
    config = config_of(Row(), model=GLM4_MOE | {"mtp_num_layers": 1})
    write_hugging_face(
        open_checkpoint(write_native(tmp_path / "native", config, random_wholes(config))), tmp_path / "hf"
    )
    (tmp_path / "hf" / DIGEST_FILE).unlink()
    copy = "model.layers.4.embed_tokens.weight"
    change_weights(tmp_path / "hf", lambda weights: weights | {copy: weights[copy] + 1})
    with pytest.raises(UserError, match=f"{copy} that differs from model.embed_tokens.weight"):
        read_hugging_face(tmp_path / "hf")
    change_weights(
        tmp_path / "hf", lambda weights: {k: w for k, w in weights.items() if ".layers.4." not in k}
    )
    assert read_hugging_face(tmp_path / "hf").model.mtp_num_layers is None
    change_weights(tmp_path / "hf", lambda weights: weights | {copy: torch.ones(32, 64)})
    with pytest.raises(UserError, match=r"lacks .* weights, among them model\.layers\.4"):
        read_hugging_face(tmp_path / "hf")
    change_config(tmp_path / "hf", num_nextn_predict_layers=0)
    with pytest.raises(UserError, match=r"among them model\.layers\.4\.embed_tokens"):
        read_hugging_face(tmp_path / "hf")


def test_the_coefficient_of_the_balance_loss_is_noted_in_both_directions(tmp_path, capsys):
    save_hf(tmp_path / "hf", "mixtral")
    convert("--from", tmp_path / "hf", "--to", tmp_path / "native")
    assert "set --moe-aux-loss-coeff" in capsys.readouterr().err
    assert "set --moe-aux-loss-coeff" in open_checkpoint(tmp_path / "hf").unverified_note
    assert format_differences(config_of(Row(), model=MIXTRAL)) == []
    (note,) = format_differences(config_of(Row(), model=MIXTRAL | {"moe_aux_loss_coeff": 0.01}))
    assert "router_aux_loss_coef" in note


@pytest.mark.parametrize(
    "model, named",
    [
        (MIXTRAL | {"moe_router_score_function": "sigmoid"}, "--moe-router-score-function sigmoid"),
        (MIXTRAL | {"moe_layer_freq": ("D", "E")}, "--moe-layer-freq D E"),
        (MIXTRAL | {"moe_shared_expert_intermediate_size": 24}, "--moe-shared-expert-intermediate-size 24"),
        (GLM4_MOE | {"moe_layer_freq": ("E", "D", "E")}, "GLM 4.5 needs --moe-layer-freq E(;|$)"),
        (
            GLM4_MOE | {"moe_shared_expert_intermediate_size": 40},
            "needs --moe-shared-expert-intermediate-size 24(;|$)",
        ),
        (GLM4_MOE | {"moe_shared_expert_gate": True}, "needs no --moe-shared-expert-gate"),
        (
            GLM4_MOE | {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
            "needs --moe-router-group-score-topk 2",
        ),
        (GLM4_MOE | {"moe_router_enable_expert_bias": False}, "needs --moe-router-enable-expert-bias"),
    ],
)
def test_an_expert_model_without_hugging_face_form_is_refused_by_its_flag(model, named):
    with pytest.raises(UserError, match=named):
        family_of(config_of(Row(), model=model).model)


MALFORMED = ("x", -1, 0, None, 1.5, [1])


@pytest.mark.parametrize("name", [*CHANGES, "deepseek-v3", "deepseek-v2", "glm-4.7-flash"])
def test_a_malformed_setting_gets_one_sentence(name, tmp_path):
    """If a setting that the family reads gets a malformed value, the read ignores it, takes it as valid, or
    raises an error that names the file."""
    save_hf(tmp_path, name)
    path = tmp_path / "config.json"
    original = path.read_text()
    family = FAMILIES.load(json.loads(original)["model_type"])
    refused = set()
    for key in sorted(family.known_settings() - {*family.ignored}):
        for value in MALFORMED:
            change_config(tmp_path, **{key: value})
            try:
                read_hugging_face(tmp_path)
            except UserError as error:
                refused.add(key)
                assert str(tmp_path) in str(error) and "\n" not in str(error)
                assert "is not laid out as" not in str(error), f"{key} = {value!r}"
            path.write_text(original)
    read = {key for _, key in family.fields}.union(*(pair.hf for pair in family.conversions))
    assert refused >= read - {"num_experts", "num_mtp_layers"}  # read under a different name


@pytest.mark.parametrize(
    "name, changes, named",
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is larger than num_local_experts 4"),
        ("olmoe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is larger than num_experts 6"),
        ("glm-4.5", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is larger than n_routed_experts 8"),
        ("glm-4.5", {"n_group": 3, "topk_group": 1}, "n_routed_experts 8 is not divisible by n_group 3"),
        ("glm-4.5", {"n_group": 3, "topk_group": 3}, "n_routed_experts 8 is not divisible by n_group 3"),
        (
            "glm-4.5",
            {"n_group": 2, "topk_group": 3, "num_experts_per_tok": 6},
            "topk_group 3 is larger than n_group 2",
        ),
        ("glm-4.5", {"num_nextn_predict_layers": "x"}, "num_nextn_predict_layers = x: expected an integer"),
    ],
)
def test_a_config_is_checked_by_the_rules_of_the_flags(name, changes, named, tmp_path):
    save_hf(tmp_path, name)
    change_config(tmp_path, **changes)
    with pytest.raises(UserError, match=f"config.json: .*{named}"):
        read_hugging_face(tmp_path)
    with pytest.raises(UserError, match=named):
        open_checkpoint(tmp_path)


def test_a_dense_model_belongs_to_no_family_with_experts():
    dense = {name: value for name, value in MIXTRAL.items() if name not in EXPERTS}
    model = config_of(Row(), model=dense).model
    assert family_of(model)[0] == "llama"
    assert FAMILIES.load("mixtral").differences(model) == {"num_experts": 8}
