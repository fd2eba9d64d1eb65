"""An argument with which another program changes its model is converted or rejected, never ignored.

Every argument of five versions of four programs is set to a value different from its default.
tests/assets/foreign_arguments.json has the arguments' names and defaults, read from the sources, and the
names that change the model of Megatron-Core.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.conversion import source
from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.foreign_arguments import (
    MEGATRON_CORE,
    MICROSOFT,
    OWN_NAMES,
    Program,
    plain_arguments,
)
from megatron.checkpoint.foreign_latent import LATENT_ARGUMENTS
from megatron.checkpoint.reading import load_model
from megatron.checkpoint.selection import find_checkpoint
from megatron.commands import convert_checkpoint
from megatron.config import ModelConfig
from megatron.errors import UserError
from tests.distributed.test_latent_attention import DEEPSEEK_V2, PLAIN_QUERIES
from tests.distributed.test_latent_attention import LATENT as PLAIN_LATENT
from tests.distributed.test_latent_attention import YARN as YARN_LATENT
from tests.distributed.test_torch_dist import config_for
from tests.reference.plain_gpt import plain_gpt_logits
from tests.support.assets import ASSETS, unpack
from tests.support.layouts import VOCAB as LAYOUT_VOCAB
from tests.support.layouts import Row, config_of, sample_tokens, unconnected_run
from tests.unit.checkpoint import megatron_deepspeed_folder
from tests.unit.checkpoint.hugging_face_folder import GLM4_MOE, MIXTRAL, QWEN3_MOE
from tests.unit.checkpoint.native_folder import random_wholes, write_native

LISTS = json.loads((ASSETS / "foreign_arguments.json").read_text())
CHANGES_MODEL = LISTS.pop("change the model")
PROGRAMS = dict(zip(LISTS, (MEGATRON_CORE,) * 3 + (MICROSOFT, OWN_NAMES), strict=True))
# Arguments that have an effect only together with other arguments.
NEEDS: dict[str, dict[str, Any]] = {
    "num_query_groups": {"group_query_attention": True},
    "bias_activation_fusion": {"bias_gelu_fusion": False},
    "add_qkv_bias": {"add_bias_linear": False},
    "window_attn_skip_freq": {"window_size": [7, 0], "num_layers": 4},
}
NEEDS |= dict.fromkeys(("mscale", "rotary_scaling_factor"), {"position_embedding_type": "yarn"})
LATENT = {"multi_latent_attention": True, "rotary_scaling_factor": 4.0}
NEEDS |= {name: LATENT for name in LATENT_ARGUMENTS[2:]}
NEEDS |= {name: {"num_experts": 8, "num_layers": 4} for name in CHANGES_MODEL if name.startswith("moe_")}


def another(value: Any) -> Any:
    """Returns a value that differs from the default `value`."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, (int, float)) else "odd"


def outcome(program: Program, args: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    return program.translate({"num_layers": 2} | args)


@pytest.mark.parametrize("name", PROGRAMS)
def test_foreign_arguments_at_their_defaults_are_accepted(name: str) -> None:
    settings, problems = PROGRAMS[name].translate(LISTS[name])
    assert problems == [] and settings["layernorm_epsilon"] == 1e-5


@pytest.mark.parametrize("name", list(PROGRAMS)[:3])
def test_foreign_arguments_that_change_the_model_are_translated_or_rejected(name: str) -> None:
    program, silent = PROGRAMS[name], []
    for argument in CHANGES_MODEL:
        args = LISTS["Megatron-LM core_v0.16.1"] | LISTS[name] | NEEDS.get(argument, {})
        value = another(args.get(argument))
        before, after = outcome(program, args), outcome(program, args | {argument: value})
        told = [text for text in after[1] if argument in text and str(value) in text]
        if not told and before[0] == after[0]:
            silent.append(argument)
    assert silent == []


ASSIGNED: dict[str, dict[str, Any]] = {
    "Megatron-LM core_v0.16.1": {
        **{
            "add_qkv_bias": True,
            "_is_global_batch_size_explicitly_specified": True,
            "use_mcore_models": True,
        },
        **{"export_model_type": "GPTModel", "export_kv_cache_quant": "none", "finetune_data_split": "train"},
        **{"export_real_quant_cfg": "None", "moe_aux_loss_coeff": 0.01, "moe_grouped_gemm": True},
        "add_qkv_bias": True,
    },
    "BigScience's Megatron-DeepSpeed 8387ae17": {"pretrain_causal_attention": True},
}
"""Arguments that the programs assign after parsing, and flags of experts in runs of a dense model."""


@pytest.mark.parametrize("name", ASSIGNED)
def test_foreign_arguments_that_ordinary_checkpoints_have_are_accepted(name: str) -> None:
    before = outcome(PROGRAMS[name], LISTS[name])
    assert outcome(PROGRAMS[name], LISTS[name] | ASSIGNED[name]) == before


@pytest.mark.parametrize(("value", "number"), [(None, None), (1, None), ([1], None), (8, 8)])
def test_one_expert_in_foreign_arguments_is_a_dense_model(value: Any, number: int | None) -> None:
    assert outcome(OWN_NAMES, {"num_experts": value}) == outcome(OWN_NAMES, {"num_experts": number})
    assert outcome(OWN_NAMES, {"num_experts": value})[0]["num_experts"] == number


@pytest.mark.parametrize("argument", ["use_te_activation_func", "use_transformer_engine_op_fuser"])
def test_foreign_arguments_of_another_gelu_are_rejected(argument: str) -> None:
    args = LISTS["Megatron-LM core_v0.16.1"] | {argument: True}
    assert argument in outcome(MEGATRON_CORE, args)[1][0]
    assert outcome(MEGATRON_CORE, args | {"swiglu": True})[1] == []


def test_foreign_arguments_without_a_feature_differ_from_a_run_with_it() -> None:
    """The difference must be found if the arguments do not contain the feature (BigScience), and if the
    feature is None (Paritron)."""
    flags = {"window_size": 8, "softmax_scale": 0.5, "scale_embeddings": True, "normalization": "RMSNorm"}
    for name, value in flags.items():
        config = config_of(Row(), model={name: value})
        args = {"num_layers": config.model.num_layers, "hidden_size": config.model.hidden_size}
        for given in ({}, {name: None}):
            found = OWN_NAMES.differences(args | given, config)
            assert any(f"--{name.replace('_', '-')}" in text for text in found), (name, given)


@pytest.mark.parametrize("name", PROGRAMS)
def test_unknown_foreign_arguments_must_be_off(name: str) -> None:
    program = PROGRAMS[name]
    for value in (None, False, 0, 0.0, "", []):
        assert outcome(program, LISTS[name] | {"new_kind_of_attention": value})[1] == []
    for value in (True, 3, 0.5, "yes", [1], {"a": 1}):
        (problem,) = outcome(program, LISTS[name] | {"new_kind_of_attention": value})[1]
        assert problem.startswith("new_kind_of_attention is ") and program.title in problem


@pytest.mark.parametrize("name", PROGRAMS)
def test_only_known_foreign_arguments_have_any_value(name: str) -> None:
    """Only arguments that do not change the model may have any value: settings that a run sets by its own
    flags, paths, kernels, logs and files."""
    expected = outcome(PROGRAMS[name], LISTS[name])
    accepted = {
        argument
        for argument, default in LISTS[name].items()
        if outcome(PROGRAMS[name], LISTS[name] | {argument: another(default)}) == expected
    }
    if PROGRAMS[name] is MEGATRON_CORE:
        assert accepted & {*CHANGES_MODEL} <= NEEDS.keys()
    assert {"lr", "seed", "tensorboard_dir", "save", "log_interval"} & LISTS[name].keys() <= accepted


def change(folder: Path, **values: Any) -> None:
    common = torch.load(folder / "common.pt", weights_only=False)
    for name, value in values.items():
        setattr(common["args"], name, value)
    torch.save(common, folder / "common.pt")


TOLD = {
    "rotary_seq_len_interpolation_factor": 8,
    "qk_l2_norm": True,
    "quick_geglu": True,
    "apply_residual_connection_post_layernorm": True,
    "mrope_section": (1, 1, 2),
    "position_embedding_type": "mrope",
}


@pytest.mark.gate(rows=3)
@pytest.mark.parametrize("argument", [*TOLD, "all"])
def test_foreign_arguments_are_checked_by_a_conversion_and_by_load(argument: str, tmp_path: Path) -> None:
    """A conversion and a run with --load each report all rejected arguments in one error."""
    core, changes = unpack("torch_dist_llama", tmp_path), TOLD if argument == "all" else {}
    changes = changes or {argument: TOLD[argument]}
    change(core, **changes)
    target = tmp_path / "native" / "global_step3"
    with pytest.raises(UserError) as converted:
        convert_checkpoint.run(["--from", str(core), "--to", str(target)])
    with pytest.raises(UserError) as loaded:
        find_checkpoint(unconnected_run(config_for(Row(), core)))
    for name, value in changes.items():
        assert all(f"{name} is {value}" in str(error.value) for error in (converted, loaded))
    assert not target.exists()


@pytest.mark.parametrize(
    "changes, flags, sentence",
    [
        ({"norm_epsilon": 1e-6}, {}, "norm_epsilon 1e-06: --layernorm-epsilon was 1e-06, is 1e-05"),
        ({"swiglu": False}, {}, "swiglu False: --glu-activation was None, is swiglu"),
        ({"window_size": (15, 0)}, {}, r"--window-size was 16, is None"),
        ({"use_rope_scaling": True}, {}, "use_rope_scaling True: --rope-scaling-type was llama3, is None"),
        ({"rotary_base": 500000}, {}, "--rotary-base was 500000, is 10000.0"),
        ({"softmax_scale": 0.5}, {}, "--softmax-scale was 0.5, is None"),
        ({"add_bias_linear": True}, {}, "add_bias_linear True: --disable-bias-linear was False, is True"),
        ({"layernorm_zero_centered_gamma": True}, {}, "--apply-layernorm-1p was True, is False"),
        # If another program did not have a feature when it wrote the checkpoint, the model does not use the
        # feature.
        ({}, {"window_size": 8}, "--window-size was None, is 8"),
        ({}, {"scale_embeddings": True}, "--scale-embeddings"),
    ],
)
def test_foreign_arguments_are_compared_with_the_flags_of_load(
    changes: dict[str, Any], flags: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    core = unpack("torch_dist_llama", tmp_path)
    change(core, **changes)
    with pytest.raises(UserError, match=sentence):
        find_checkpoint(unconnected_run(config_for(Row(), core, **flags)))


WRITTEN: list[dict[str, Any]] = [
    {},
    {"activation": "gelu_exact", "layernorm_epsilon": 1e-6, "qk_layernorm": True},
    {
        "position_embedding_type": "rotary",
        "rotary_base": 5e5,
        "rotary_percent": 0.5,
        "apply_layernorm_1p": True,
    },
    {"position_embedding_type": "rotary", "rope_scaling_type": "llama3", "rotary_interleaved": True},
    {"window_size": 16, "window_pattern": ("W", "W", "F"), "glu_activation": "swiglu"},
    {
        "normalization": "RMSNorm",
        "disable_bias_linear": True,
        "add_qkv_bias": True,
        "glu_activation": "swiglu",
    },
    {"group_query_attention": True, "num_query_groups": 2, "untie_embeddings_and_output_weights": True},
    {
        **{"position_embedding_type": "rotary", "rope_scaling_type": "yarn", "rope_exact_range": True},
        **{"window_size": 16, "window_pattern": ("W", "F"), "window_rope_scaling": True},
        **{"glu_activation": "quick_geglu", "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0},
    },
    MIXTRAL,
    QWEN3_MOE | {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 1e-3},
    GLM4_MOE | {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1},
    GLM4_MOE | {"moe_aux_loss_coeff": 0.1, "moe_router_bias_update_rate": 0.01},
    *(model | {"init_method_std": 0.02} for model in (PLAIN_LATENT, YARN_LATENT, PLAIN_QUERIES)),
]


@pytest.mark.parametrize("fields", WRITTEN)
def test_foreign_arguments_that_are_written_describe_the_model(fields: dict[str, Any]) -> None:
    model = config_of(Row(), model=fields).model
    args = MEGATRON_CORE.arguments(model)
    settings = MEGATRON_CORE.settings(args, Path())
    names = ModelConfig.__dataclass_fields__
    read = ModelConfig(**{name: value for name, value in settings.items() if name in names})
    assert replace(read, hidden_dropout=0.0, attention_dropout=0.0) == model


KIND, COEFFICIENT = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
SEQUENCES = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff"


@pytest.mark.parametrize(
    ("changes", "settings", "note"),
    [
        ({}, ("seq_aux_loss", 0.1), None),
        ({KIND: ["seq_aux_loss"], COEFFICIENT: [0.1]}, ("seq_aux_loss", 0.1), None),
        ({KIND: "none"}, ("none", 0.1), None),
        ({KIND: "aux_loss", COEFFICIENT: 0.0}, ("seq_aux_loss", 0.0), None),
        (
            {KIND: "aux_loss"},
            ("seq_aux_loss", 0.1),
            f"{KIND} aux_loss with {COEFFICIENT} 0.1: {SEQUENCES} 0.1",
        ),
        (
            {KIND: ["aux_loss", "global_aux_loss"], COEFFICIENT: [0.2, 0.3]},
            ("seq_aux_loss", 0.2),
            f"{KIND} ['aux_loss', 'global_aux_loss'] with {COEFFICIENT} [0.2, 0.3]: {SEQUENCES} 0.2",
        ),
        (
            {KIND: "global_aux_loss", "moe_input_jitter_eps": 0.01},
            ("global_aux_loss", 0.1),
            f"{KIND} global_aux_loss with {COEFFICIENT} 0.1: --moe-router-load-balancing-type "
            "global_aux_loss --moe-aux-loss-coeff 0.1, with the tokens per expert of the previous step; "
            "moe_input_jitter_eps 0.01: the router's input has no noise",
        ),
    ],
)
def test_the_training_of_experts_is_translated_or_a_note_says_what_takes_its_place(
    changes: dict[str, Any],
    settings: tuple[str, float],
    note: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    core, target = unpack("torch_dist_experts_mixed", tmp_path), tmp_path / "native" / "global_step3"
    change(core, **changes)
    convert_checkpoint.run(["--from", str(core), "--to", str(target)])
    model = open_checkpoint(target).config.model
    assert (model.moe_router_load_balancing_type, model.moe_aux_loss_coeff) == settings
    assert (model.moe_z_loss_coeff, model.moe_router_bias_update_rate) == (0.01, 0.01)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    title = "note: arguments of Megatron-Core without an equivalent: "
    assert notes == ([] if note is None else [title + note])


def test_the_training_of_experts_in_the_arguments_of_a_dense_model_has_no_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core, target = unpack("torch_dist_llama", tmp_path), tmp_path / "native" / "global_step3"
    change(core, **{KIND: ["aux_loss", "sinkhorn"], COEFFICIENT: [0.2, 0.3], "moe_input_jitter_eps": 0.01})
    convert_checkpoint.run(["--from", str(core), "--to", str(target)])
    assert open_checkpoint(target).config.model.moe_aux_loss_coeff == 0
    assert "note: " not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["sinkhorn", "quantile_balancing", ["seq_aux_loss", "sinkhorn"]])
def test_another_choice_of_experts_in_foreign_arguments_is_rejected(kind: str | list[str]) -> None:
    (problem,) = outcome(MEGATRON_CORE, {"num_experts": 8, KIND: kind, COEFFICIENT: [0.1, 0.1]})[1]
    assert problem.startswith(f"{KIND} is ")


LLAMA = {
    "position_embedding_type": "rotary",
    "rotary_base": 500.0,
    "normalization": "RMSNorm",
    "glu_activation": "swiglu",
    "disable_bias_linear": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}


def test_foreign_arguments_that_are_written_give_the_same_logits(tmp_path: Path) -> None:
    """Converts native -> torch_dist -> native. On the way back only the written arguments describe the model.
    The weights have a standard deviation of 0.25, so that a wrong rotation changes the logits."""
    config = config_of(Row(tp=2), model=LLAMA)
    wholes = random_wholes(config)
    wholes = {name: whole if "norm" in name else whole * (0.25 / 0.15) for name, whole in wholes.items()}
    native, core = write_native(tmp_path / "native", config, wholes), tmp_path / "core" / "iter_0000005"
    convert_checkpoint.run(["--from", str(native), "--to", str(core), "--format", "torch_dist"])
    (core / "run.json").unlink()
    tokens = sample_tokens(0, 2)[:, :-1]

    def logits(**changes: Any) -> torch.Tensor:
        change(core, **changes)
        target = tmp_path / f"back{len(changes)}" / "global_step5"
        words = ["--from", str(core), "--to", str(target), "--vocab-size", str(LAYOUT_VOCAB)]
        convert_checkpoint.run(words)
        return load_model(open_checkpoint(target))(tokens)

    plain = plain_gpt_logits(
        wholes,
        tokens,
        layers=4,
        heads=4,
        positions="rotary",
        glu="swiglu",
        groups=2,
        vocab=LAYOUT_VOCAB,
        rotary={"base": 500.0},
    )
    torch.testing.assert_close(logits(), plain, rtol=0, atol=1e-4)
    assert (logits(rotary_base=4000.0) - plain).abs().max() > 0.1


@pytest.mark.parametrize(
    "fields",
    [
        {"position_embedding_type": "alibi"},
        {"softmax_scale": 0.5},
        {"scale_embeddings": True},
        {"layer_arrangement": "parallel"},
        {"glu_activation": "geglu"},
        {"disable_bias_linear": True},
        {"apply_residual_connection_post_layernorm": True},
        {"position_embedding_type": "rotary", "rope_scaling_type": "yarn", "rotary_interleaved": True},
        {"position_embedding_type": "rotary", "rope_scaling_type": "llama3", "rope_scaling_factor": 4.0},
        {"mup": True},
        {"v_channels": 4},
        {"window_size": 9, "window_pattern": ("W", "F"), "window_num_attention_heads": 8},
        DEEPSEEK_V2,
        PLAIN_LATENT | {"rope_scaling_type": "linear"},
    ],
)
def test_models_without_foreign_arguments_are_not_written(fields: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(Row(), model=fields)
    native = write_native(tmp_path / "native", config, random_wholes(config))
    with pytest.raises(UserError, match="has no equivalent in Megatron-Core: use --format dcp"):
        convert_checkpoint.run(
            ["--from", str(native), "--to", str(tmp_path / "core"), "--format", "torch_dist"]
        )
    assert not (tmp_path / "core").exists()


def test_foreign_arguments_of_files_of_megatron_deepspeed_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses the 330 arguments that Megatron-DeepSpeed itself saved. ds_to_universal.py must read them, too."""
    megatron_deepspeed_folder.unpack(tmp_path)
    for name in ("swiglu", "llama"):
        source.open_source(tmp_path / name / "global_step3")
    changes = {"squared_relu": True, "retro_add_retriever": True}
    monkeypatch.setattr(source, "plain_arguments", lambda args: plain_arguments(args) | changes)
    with pytest.raises(UserError, match="retro_add_retriever is True .*squared_relu is True"):
        source.open_source(tmp_path / "swiglu" / "global_step3")
