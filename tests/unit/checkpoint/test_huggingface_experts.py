"""Models with experts: a weight that would stay unread or unwritten is an error, and what is not converted is
said."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.huggingface.exporter import HuggingFaceWriter, format_differences
from megatron.checkpoint.huggingface.family import FAMILIES, family_of
from megatron.checkpoint.huggingface.importer import read_hugging_face
from megatron.commands import convert_checkpoint
from megatron.errors import UserError
from megatron.model.layer_list import PARAMETER_DTYPES
from tests.support.conversion import write_hugging_face
from tests.support.layouts import Row, config_of
from tests.unit.checkpoint.hugging_face_folder import (
    EXPERTS,
    GLM4_MOE,
    MIXTRAL,
    OLMOE,
    change_config,
    change_weights,
    convert,
)
from tests.unit.checkpoint.native_folder import random_wholes, write_native
from tests.unit.checkpoint.test_huggingface_llama import save_hf

EXPERT = "model.layers.1.{}experts.{}.{}.weight"
CHANGES = {
    "mixtral": ("block_sparse_moe.", "w1"),
    "olmoe": ("mlp.", "up_proj"),
    "qwen-3-moe": ("mlp.", "down_proj"),
    "glm-4.5": ("mlp.", "gate_proj"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_expert_that_is_missing_or_left_over_is_named(name, tmp_path):
    """Megatron-LM's converter dropped all experts of Mixtral, and reported success (#5844)."""
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


@pytest.mark.parametrize("layers", [0, 1])
def test_layers_for_multi_token_prediction_are_not_converted_and_noted(layers, tmp_path, capsys):
    save_hf(tmp_path / "hf", "glm-4.5")
    extra = {"model.layers.3.eh_proj.weight": torch.ones(32, 64)}
    change_weights(tmp_path / "hf", lambda weights: weights | extra)
    change_config(tmp_path / "hf", num_nextn_predict_layers=layers)
    if layers == 0:
        with pytest.raises(UserError, match=r"among them model\.layers\.3\.eh_proj"):
            read_hugging_face(tmp_path / "hf")
        return
    convert("--from", tmp_path / "hf", "--to", tmp_path / "native")
    assert (
        "layers for multi-token prediction, if the folder has them, are not converted"
        in capsys.readouterr().err
    )


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
        (GLM4_MOE | {"moe_layer_freq": ("E", "D", "E")}, "GLM 4.5 needs --moe-layer-freq E( |$)"),
        (
            GLM4_MOE | {"moe_shared_expert_intermediate_size": 40},
            "needs --moe-shared-expert-intermediate-size 24$",
        ),
        (GLM4_MOE | {"moe_shared_expert_gate": True}, "needs no --moe-shared-expert-gate"),
        (
            GLM4_MOE | {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
            "needs --moe-router-group-topk 1",
        ),
        (GLM4_MOE | {"moe_router_enable_expert_bias": False}, "needs --moe-router-enable-expert-bias"),
    ],
)
def test_an_expert_model_without_hugging_face_form_is_refused_by_its_flag(model, named):
    with pytest.raises(UserError, match=named):
        family_of(config_of(Row(), model=model).model)


MALFORMED = ("x", -1, 0, None, 1.5, [1])


@pytest.mark.parametrize("name", CHANGES)
def test_a_malformed_setting_gets_one_sentence(name, tmp_path):
    """A setting that the family reads is as it was, has another valid value, or is named with its file."""
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
    assert refused >= read - {"num_experts", "num_mtp_layers"}  # transformers reads them under another name


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
