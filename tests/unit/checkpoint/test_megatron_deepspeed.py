"""Universal checkpoints of Microsoft's Megatron-DeepSpeed: layers have different indices, and values are
equal."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.checkpoint.conversion.source import open_source
from megatron.checkpoint.discovery import find_universal
from megatron.checkpoint.formats.universal import UniversalReader
from megatron.checkpoint.inspect import inspect_checkpoint
from megatron.checkpoint.record import TrainingState, describe_start
from megatron.checkpoint.selection import find_checkpoint
from megatron.commands import ds_to_universal
from megatron.errors import UserError
from megatron.files import HostileFileError
from megatron.model.inference.single_process import GPTModel, model_specs
from megatron.mpu.pieces import Piece
from tests.reference.plain_gpt import plain_gpt_logits
from tests.support.layouts import EOD, SEQ, VOCAB, Row, config_of, sample_tokens, unconnected_run
from tests.unit.checkpoint.megatron_deepspeed_folder import STEP, unpack, write_as_megatron_deepspeed
from tests.unit.checkpoint.native_folder import random_wholes

# The Llama that Megatron-DeepSpeed's flags --normalization rmsnorm --disable-bias-linear --swiglu
# --use-rotary-position-embeddings --untie-embeddings-and-output-weights make.
LLAMA = {
    "position_embedding_type": "rotary",
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "glu_activation": "swiglu",
    "untie_embeddings_and_output_weights": True,
}
GROUPED = {**LLAMA, "group_query_attention": True, "num_query_groups": 2}
# Models that both programs have.
MODELS: dict[str, dict[str, Any]] = {
    "learned positions": {},
    "rotary": {"position_embedding_type": "rotary"},
    "swiglu, 1 layer": {"glu_activation": "swiglu", "num_layers": 1},
    "12 layers": {"num_layers": 12},
    "exact_gelu": {"activation": "gelu_exact"},
    "untied, learned positions": {"untie_embeddings_and_output_weights": True},
    "Llama": {**LLAMA, "rotary_base": 500000.0},
    "Llama, grouped queries": GROUPED,
}


def config_for(folder: Path, **model: Any):
    options = {"load": str(folder), "universal_checkpoint": True}
    return config_of(Row(), model=model, checkpoint=options)


# Arguments that determine the order of the rows of query_key_value.
ORDERS = {
    "per head": {"tensor_model_parallel_size": 2},
    "blocks": {"tensor_model_parallel_size": 1, "ds_sequence_parallel_fpdt": False},
    "blocks of 2 ranks": {"tensor_model_parallel_size": 2, "ds_sequence_parallel_fpdt": False},
}


def write(folder: Path, model: dict[str, Any] | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """Writes a checkpoint of a model with these fields. Returns its weights by this program's names."""
    config = config_for(folder, **(model or {}))
    wholes = random_wholes(config)
    states = {
        name: {"fp32": whole, "exp_avg": whole / 8, "exp_avg_sq": whole**2, "step": torch.tensor(float(STEP))}
        for name, whole in wholes.items()
    }
    write_as_megatron_deepspeed(folder, config, states, **options)
    return wholes


def find(folder: Path, **model: Any):
    return find_checkpoint(unconnected_run(config_for(folder, **model)))


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize(
    "model, order",
    # Microsoft's program does not train grouped queries whose rows are in blocks.
    [
        (model, order)
        for model in MODELS
        for order in ORDERS
        if not ("grouped" in model and "blocks" in order)
    ],
)
def test_weights_and_moments_are_read_under_the_names_here(
    model: str, order: str, pipeline: bool, tmp_path: Path
) -> None:
    wholes = write(tmp_path, MODELS[model], pipeline=pipeline, **ORDERS[order])
    checkpoint = find(tmp_path, **MODELS[model])
    assert checkpoint.state == TrainingState(STEP, 8 * STEP, 8 * STEP * SEQ)
    reader = UniversalReader(checkpoint)
    assert set(reader.stored_names) == wholes.keys()
    for name, spec in model_specs(config_for(tmp_path, **MODELS[model]), VOCAB, EOD).items():
        values, moments, scalars = reader.read_parameter(Piece.of_shard(name, spec))
        rows = spec.num_valid_rows or spec.global_shape[0]
        expected = wholes[name].reshape(-1)
        assert torch.equal(values.view(spec.global_shape)[:rows].reshape(-1), expected)
        assert torch.equal(moments["exp_avg"](None).view(spec.global_shape)[:rows].reshape(-1), expected / 8)
        assert moments.keys() == {"exp_avg", "exp_avg_sq"} and scalars["step"] == STEP


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_the_weights_in_plain_pytorch(name: str, tmp_path: Path) -> None:
    fields = MODELS[name]
    wholes = write(tmp_path, fields)
    model = GPTModel(config_for(tmp_path, **fields), VOCAB, EOD)
    UniversalReader(find(tmp_path, **fields)).load_weights(model)
    samples = sample_tokens(0, 2)
    plain = plain_gpt_logits(
        wholes,
        samples[:, :-1],
        layers=fields.get("num_layers", 4),
        heads=4,
        positions=fields.get("position_embedding_type", "absolute"),
        glu=fields.get("glu_activation"),
        vocab=VOCAB,
        groups=fields.get("num_query_groups"),
        exact_gelu=fields.get("activation") == "gelu_exact",
        rotary={"base": fields.get("rotary_base", 10000.0)},
    )
    logits = model(samples[:, :-1])
    losses = [
        F.cross_entropy(found.reshape(-1, VOCAB), samples[:, 1:].reshape(-1)).item()
        for found in (logits, plain)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(logits, plain, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "pipeline, words",
    [
        (True, "transformer layers 2 to 5 are 3 to 6 in this program, the final norm 6 is 8"),
        (False, "--no-pipeline-parallel: language_model.encoder.layers.0 is layer 3 in this"),
    ],
)
def test_the_start_says_how_the_layers_are_numbered(pipeline: bool, words: str, tmp_path: Path) -> None:
    write(tmp_path, pipeline=pipeline)
    assert words in describe_start(find(tmp_path), str(tmp_path))


def test_a_vocabulary_of_another_size_is_refused_without_a_pipeline_too(tmp_path: Path) -> None:
    for pipeline in (True, False):
        folder = tmp_path / str(pipeline)
        write(folder, pipeline=pipeline, client_state={"universal_checkpoint_info": {}})
        with pytest.raises(UserError, match=f"the vocabulary had {VOCAB} rows with padding, and has 4096"):
            find_checkpoint(unconnected_run(config_for(folder), 4096))


def test_part_of_the_names_without_a_pipeline_is_another_model(tmp_path: Path) -> None:
    """If names with and without a pipeline were mixed, two names could stand for one parameter."""
    write(tmp_path, pipeline=False)
    zero = tmp_path / f"global_step{STEP}_universal" / "zero"
    (zero / "language_model.encoder.layers.0.input_layernorm.bias").rename(zero / "3.input_layernorm.bias")
    with pytest.raises(UserError, match="it lacks .* parameters"):
        find(tmp_path)


ROTARY, ABSOLUTE = ({"position_embedding_type": kind} for kind in ("rotary", "absolute"))


def llama_without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GROUPED.items() if key != name}


# (The written model, changed arguments in the checkpoint, the model of the run, words of the error.)
REFUSED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    *(
        ({}, {name: value}, {}, f"by Microsoft's Megatron-DeepSpeed.*{name} is")
        for name, value in (("apply_layernorm_1p", True), ("squared_relu", True), ("num_experts", [4]))
    ),
    *(
        ({}, arguments, {"activation": other}, f"--activation was {activation}, is {other}$")
        for arguments, activation, other in (
            ({"bias_gelu_fusion": False}, "gelu_exact", "gelu"),
            ({"onnx_safe": True}, "gelu_exact", "gelu"),
            ({"bias_gelu_fusion": False, "openai_gelu": True}, "gelu", "gelu_exact"),
            ({"bias_gelu_fusion": True}, "gelu", "gelu_exact"),
        )
    ),
    (
        *(GROUPED, {"ds_sequence_parallel_fpdt": False, "tensor_model_parallel_size": 1}, GROUPED),
        "num_key_value_heads is 2, expected 4: since commit 676a482c",
    ),
    (ROTARY, {"rope_theta": 500000}, ROTARY, "rotary-base was 500000, is"),
    (ROTARY, {"rotary_percent": 0.25}, ROTARY, "rotary-percent was 0.25, is"),
    *(
        (
            GROUPED,
            {"pipeline": pipeline},
            llama_without(name),
            f"{name.replace('_', '-')} was {was}, is {now}",
        )
        for pipeline in (True, False)
        for name, was, now in (
            ("normalization", "RMSNorm", "LayerNorm"),
            ("disable_bias_linear", True, False),
            ("untie_embeddings_and_output_weights", True, False),
            ("glu_activation", "swiglu", None),
        )
    ),
    *(
        (GROUPED, {"pipeline": pipeline}, LLAMA, "group-query-attention was True, is False")
        for pipeline in (True, False)
    ),
    ({}, {}, {"num_layers": 6}, "num-layers was 4, is 6; it lacks 26 parameters"),
    ({}, {}, {"glu_activation": "swiglu"}, "swiglu False.*: --glu-activation was None, is swiglu"),
    ({}, {}, ROTARY, "position-embedding-type was absolute, is rotary"),
    *(
        ({}, {"client_state": {"checkpoint_version": version}}, {}, f"_version {version}.*query_key_value")
        for version in (0, 1.0)
    ),
]


@pytest.mark.parametrize("written, options, run, words", REFUSED)
def test_another_model_is_refused_by_name(
    written: dict[str, Any], options: dict[str, Any], run: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write(tmp_path, written, **options)
    with pytest.raises(UserError, match=words):
        find(tmp_path, **run)
    if "activation" in run:
        (right,) = {"gelu", "gelu_exact"} - {run["activation"]}
        assert find(tmp_path, activation=right) is not None


@pytest.mark.parametrize("argument, value", [("rope_theta", 500000), ("rotary_percent", 0.25)])
def test_rotary_angles_of_a_model_without_rotation_may_differ(
    argument: str, value: Any, tmp_path: Path
) -> None:
    write(tmp_path, ABSOLUTE, **{argument: value})
    assert find(tmp_path, **ABSOLUTE) is not None


@pytest.mark.parametrize("load, has_latest", [(".", True), (".", False), ("global_step3", True)])
def test_a_native_folder_given_to_load_names_the_converter(
    load: str, has_latest: bool, tmp_path: Path
) -> None:
    """Uses files that Megatron-DeepSpeed itself wrote. The command in the error message makes a checkpoint
    that opens."""
    unpack(tmp_path)
    folder = tmp_path / "swiglu"
    if not has_latest:
        (folder / "latest").unlink()
    config = config_of(Row(), checkpoint={"load": str(folder / load)})
    with pytest.raises(UserError) as refused:
        find_checkpoint(unconnected_run(config))
    (problem,) = inspect_checkpoint(folder / "global_step3").problems
    assert problem in str(refused.value)
    command = shlex.split(re.search("'(python tools/.*)',", str(refused.value))[1])
    ds_to_universal.main(command[2:])
    assert str(refused.value).endswith(f"then pass --load {folder} --universal_checkpoint")
    assert find_universal(folder).state.iteration == 3


def test_a_native_folder_of_this_program_without_its_record_is_not_taken_for_theirs(tmp_path: Path) -> None:
    folder = tmp_path / "global_step3"
    folder.mkdir()
    torch.save({"iteration": 3, "args": None}, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(UserError, match="no checkpoint in .* is complete"):
        find_checkpoint(unconnected_run(config_of(Row(), checkpoint={"load": str(tmp_path)})))


ZERO_3 = [f"zero_pp_rank_0_mp_rank_00_{kind}_states.pt" for kind in ("model", "optim")]
EXPERTS = ["mp_rank_00_model_states.pt", "layer_0_expert_3_mp_rank_00_model_states.pt"]


@pytest.mark.parametrize("tool", ["load", "converter"])
@pytest.mark.parametrize(
    ("files", "sentence"),
    [(ZERO_3, "saved it with ZeRO-3"), (EXPERTS, "with a file for each expert, which this program does not")],
)
def test_files_that_are_not_read_are_refused_by_name(
    files: list[str], sentence: str, tool: str, tmp_path: Path
) -> None:
    (tmp_path / "latest").write_text("global_step3")
    folder = tmp_path / "global_step3"
    folder.mkdir()
    for file in files:
        torch.save({}, folder / file)
    with pytest.raises(UserError, match=sentence):
        if tool == "load":
            find_checkpoint(unconnected_run(config_of(Row(), checkpoint={"load": str(tmp_path)})))
        else:
            open_source(folder)


@pytest.mark.parametrize("ranks", [0, 3, None, [2], "2", 1 << 70])
def test_a_hostile_number_of_ranks_is_refused(ranks: Any, tmp_path: Path) -> None:
    write(tmp_path, **ORDERS["blocks"])
    path = tmp_path / f"global_step{STEP}_universal" / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    content["args"].tensor_model_parallel_size = ranks
    torch.save(content, path)
    with pytest.raises(UserError, match="3.self_attention.query_key_value.bias has 96 rows"):
        UniversalReader(find(tmp_path)).read("3.self_attention.query_key_value.bias", "fp32")


def test_it_can_be_inspected(tmp_path: Path) -> None:
    wholes = write(tmp_path)
    report = inspect_checkpoint(find_universal(tmp_path).folder)
    assert report.problems == []
    assert {parameter.name: parameter.shape for parameter in report.parameters} == {
        name: tuple(whole.shape) for name, whole in wholes.items()
    }


def test_a_hostile_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    zero = tmp_path / f"global_step{STEP}_universal" / "zero"
    (zero / "2..input_layernorm.weight").mkdir()
    with pytest.raises(HostileFileError, match=r"2\.\.input_layernorm"):
        find(tmp_path)
