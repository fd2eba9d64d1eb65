"""Checkpoints of models with experts load on every number of expert-parallel ranks, with the bits of weights,
moments and the experts' bias. Models with experts also start from a dense model (upcycling)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.inspect import inspect_folder
from megatron.checkpoint.integrity import canary_loss
from megatron.checkpoint.manager import load_checkpoint
from megatron.checkpoint.reading import load_model, read_checkpoint
from megatron.checkpoint.report import compare_checkpoints
from megatron.checkpoint.selection import find_checkpoint
from megatron.commands import convert_checkpoint, inspect_checkpoint
from megatron.config import ParallelConfig
from megatron.errors import UserError
from megatron.model.inference.generation import Continuation, Sampling, generate
from megatron.model.layer_list import ONLY_IN_TRAINING
from megatron.training.build import load_distributed_model, run_of_layout
from tests.distributed.test_experts import GLM, MIXTRAL, OSS
from tests.distributed.test_model_variants import LLAMA
from tests.support.checkpoints import FINGERPRINT, make_manager, state_after
from tests.support.conversion import to_universal, write_hugging_face
from tests.support.layouts import EOD, SEQ, VOCAB, Row, build_engine, config_of, train, unconnected_run
from tests.support.pool import run_world

STEPS = 3
# (layout, expert-parallel size) of the run that trains, then of the runs that load and save.
LAYOUTS = [
    (Row(dp=2, zero=1, micro_batch=2), 2),
    (Row(tp=2, dp=2, zero=1, micro_batch=2), 4),
    (Row(pp=2, dp=2, zero=3, micro_batch=2), 2),
    (Row(micro_batch=4), 1),
]
# Name -> (precision, changes of the run, largest relative error of the next loss and grad norm).
SETTINGS: dict[str, tuple[str, dict[str, Any], float]] = {
    "Adam": ("fp32", {}, 1e-5),
    "8-bit Adam": ("fp32", {"optimizer": {"use_bnb_optimizer": True}}, 1e-5),
    "Muon": ("fp32", {"optimizer": {"optimizer": "muon"}}, 1e-5),
    "bf16": ("bf16", {}, 1e-2),
}
GLOBAL = {"model": GLM | {"moe_router_load_balancing_type": "global_aux_loss"}}


def load_and_save(row: Row, ep: int, folder: Path | None, target: Path, changes: dict[str, Any]) -> list[Any]:
    """Loads a checkpoint, or trains if `folder` is None, and saves. Returns loss and grad norm of the next
    step."""
    parallel = {"expert_model_parallel_size": ep, "sequence_parallel": row.tp > 1}
    options = {"save": str(target), "save_format": "dcp", "load": folder and str(folder)}
    changes = {"model": GLM, **changes, "parallel": parallel}
    config = config_of(row, **changes, checkpoint=options)
    engine = build_engine(config)
    if folder is None:
        train(engine, range(STEPS))
    else:
        checkpoint = find_checkpoint(
            unconnected_run(replace(config, checkpoint=replace(config.checkpoint, save=None)))
        )
        train(engine, [9])  # other weights and moments: the load must replace all
        load_checkpoint(engine, checkpoint, FINGERPRINT)
    make_manager(engine, target).save(state_after(STEPS))
    return train(engine, range(STEPS, STEPS + 1))


def states_of(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    reader = open_reader(open_checkpoint(folder / f"global_step{STEPS}"))
    return {
        (name, state): reader.read_unpadded(name, state)
        for name in reader.names
        for state in reader.state_names(name)
    }


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_checkpoint_opens_on_every_number_of_expert_parallel_ranks(name: str, tmp_path: Path) -> None:
    precision, changes, bound = SETTINGS[name]
    (row, ep), *others = [(replace(row, precision=precision), ep) for row, ep in LAYOUTS]
    first = tmp_path / "0"
    ((expected, *_), *_) = run_world(row.world_size, load_and_save, row, ep, None, first, changes)
    states = states_of(first)
    moments = {state for name, state in states if name == "4.mlp.experts.dense_h_to_4h.weight"} - {"fp32"}
    assert moments and all(states["4.mlp.experts.dense_h_to_4h.weight", state].any() for state in moments)
    assert states["4.mlp.router.expert_bias", "fp32"].any()
    assert not inspect_folder(first / f"global_step{STEPS}").problems
    source = first
    for number, (row, ep) in enumerate(others, 1):
        target = tmp_path / str(number)
        for history, *_ in run_world(row.world_size, load_and_save, row, ep, source, target, changes):
            assert history == pytest.approx(expected, rel=bound)
        found = states_of(target)
        assert found.keys() == states.keys()
        assert all(torch.equal(found[key], states[key]) for key in states)
        source = target


def change_balance(folder: Path) -> None:
    row = Row(micro_batch=4)
    load_and_save(row, 1, None, folder / "sequences", {})
    load_and_save(row, 1, folder / "sequences", folder / "global", GLOBAL)
    load_and_save(row, 1, folder / "global", folder / "again", {})


def test_a_resume_may_change_the_balance_loss(tmp_path: Path) -> None:
    """Only global_aux_loss stores the tokens per expert of the last step. A resume that changes to
    global_aux_loss starts with a balanced load."""
    run_world(1, change_balance, tmp_path)
    first, second, third = (states_of(tmp_path / name) for name in ("sequences", "global", "again"))
    assert second.keys() - first.keys() >= {("4.mlp.router.expert_load", "fp32")}
    assert torch.equal(second["4.mlp.router.expert_load", "fp32"], torch.ones(8))
    assert all(torch.equal(second[key], first[key]) for key in first)
    assert third.keys() == first.keys() and all(torch.equal(third[key], first[key]) for key in first)


# --- every format, balancing method and tool ---

FORMATS = ("torch_dist", "universal", "dcp", "native")
# Name -> the model. The models save: the experts' bias and the load of the last step; only the bias; neither
# (the last two).
BALANCES = {
    "global_aux_loss": GLOBAL["model"],
    "expert bias": GLM,
    "seq_aux_loss": MIXTRAL,
    "biases, sinks and windows": {
        **{**OSS, "window_size": 7, "window_pattern": ("W", "F"), "window_rope_scaling": True},
        **{"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_exact_range": True},
        "rope_original_max_position_embeddings": 16,
    },
}


def texts() -> torch.Tensor:
    return torch.randint(VOCAB, (3, 21), generator=torch.Generator().manual_seed(3))


def scores_of(folder: Path) -> torch.Tensor:
    """Returns the scores that `tools/evaluate.py` computes in one process."""
    model = load_model(read_checkpoint(folder), verify=True)
    return model.score(texts()[:, :-1], texts()[:, 1:]).log_probs


def scores_on_ranks(folder: Path, **sizes: int) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Returns rank 0's scores, and the state of the routers after an evaluation."""
    checkpoint = read_checkpoint(folder)
    run = run_of_layout(checkpoint, ParallelConfig(world_size=4, **sizes)).connected(dist.get_rank())
    model = load_distributed_model(checkpoint, run, 2)
    scores = None
    if run.mesh.rank == 0:
        scores = model.score(texts()[:, :-1], texts()[:, 1:]).log_probs
        model.stop()
    else:
        model.serve()
    assert not any(name.endswith(ONLY_IN_TRAINING) for name, _ in model.module.named_parameters())
    state = [value for name, value in model.module.named_parameters() if name.endswith("expert_bias")]
    return scores, state


def resume(folder: Path, universal: bool, model: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """Resumes on 4 expert-parallel ranks. Returns loss and grad norm of the next step."""
    row = Row(dp=4, zero=1, micro_batch=2)
    options = {"load": str(folder), "universal_checkpoint": universal, **options}
    parallel = {"expert_model_parallel_size": row.dp}
    config = config_of(row, model=model, parallel=parallel, checkpoint=options)
    engine = build_engine(config)
    train(engine, [9])  # other weights and moments: the load must replace all
    load_checkpoint(engine, find_checkpoint(unconnected_run(config)), FINGERPRINT)
    return train(engine, range(STEPS, STEPS + 1))


def convert(source: Path, folder: Path, kind: str) -> Path:
    convert_checkpoint.run(["--from", str(source), "--to", str(folder), "--format", kind])
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def assert_equal(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("balance", BALANCES)
def test_every_tool_takes_every_format(balance: str, kind: str, tmp_path: Path) -> None:
    """The tools convert to each other format, convert to a Hugging Face model and back, verify, compare,
    evaluate and generate. Runs resume on more expert-parallel ranks than have saved."""
    model, saved = BALANCES[balance], tmp_path / "saved"
    row, folder = Row(dp=2, zero=1, micro_batch=2), saved / f"global_step{STEPS}"
    ((expected, *_), *_) = run_world(2, load_and_save, row, 2, None, saved, {"model": model})
    states, scores, source = states_of(saved), scores_of(folder), folder
    assert (("4.mlp.router.expert_load", "fp32") in states) == (balance == "global_aux_loss")
    if kind != "dcp":
        folder = convert(source, tmp_path / kind / f"global_step{STEPS}", kind)
    assert inspect_checkpoint.main([str(folder), "--verify"]) == 0
    compared = compare_checkpoints(read_checkpoint(source), read_checkpoint(folder)).parameters
    assert len(compared) == len({name for name, _ in states}) and all(each.is_equal for each in compared)
    assert torch.equal(scores_of(folder), scores)
    for history, *_ in run_world(4, resume, folder, kind == "universal", model, {}):
        assert history == pytest.approx(expected, rel=1e-5)
    for other in {*FORMATS} - {kind}:
        target = tmp_path / f"to_{other}"
        convert(folder, target / f"global_step{STEPS}", other)
        assert_equal(states_of(target), states)

    exported = tensors_of(convert(folder, tmp_path / "model", "huggingface"))
    assert_equal(exported, tensors_of(convert(source, tmp_path / "reference", "huggingface")))
    assert "expert_load" not in " ".join(exported)
    back = convert(tmp_path / "model", tmp_path / "back" / "universal", "universal")
    assert torch.equal(scores_of(back), scores)
    assert_equal(tensors_of(convert(back, tmp_path / "again", "huggingface")), exported)
    for (loss, _), *_ in run_world(4, resume, tmp_path / "model", False, model, {"finetune": True}):
        assert loss == pytest.approx(expected[0], rel=1e-5)
    gpt = load_model(read_checkpoint(folder), fp32_on_cpu=True)
    text = Continuation(str, [5, 7], 5)
    assert len(list(generate(gpt, [text], Sampling(0.0), window=SEQ, eod=EOD, seed=1))) == 5


@pytest.mark.parametrize("balance", [pytest.param("seq_aux_loss", marks=pytest.mark.full), "global_aux_loss"])
def test_a_model_is_evaluated_on_expert_parallel_ranks(balance: str, tmp_path: Path) -> None:
    """The scores equal one process's scores, and an evaluation neither needs nor changes the state of the
    routers."""
    model = BALANCES[balance]
    run_world(2, load_and_save, Row(dp=2, zero=1, micro_batch=2), 2, None, tmp_path, {"model": model})
    states, scores = states_of(tmp_path), scores_of(folder := tmp_path / f"global_step{STEPS}")
    tensor, pipeline, expert = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))
    layouts = (
        {expert: 4},
        {tensor: 2, expert: 4},
        {pipeline: 2, expert: 2},
        {"context_parallel_size": 2, expert: 4},
    )
    for sizes in layouts:
        for found, biases in run_world(4, scores_on_ranks, folder, **sizes):
            if found is not None:
                torch.testing.assert_close(found, scores, rtol=1e-5, atol=1e-5)
            assert all(any(torch.equal(bias, state) for state in states.values()) for bias in biases)
    for sizes, sentence in (
        ({expert: 3, "world_size": 3}, "--num-experts 8 is not divisible by --expert-model-parallel-size 3"),
        ({expert: 8, "world_size": 4}, "--expert-model-parallel-size 8 does not divide the 4 ranks"),
        ({tensor: 16, "world_size": 16}, "--num-attention-heads|--moe-shared-expert-intermediate-size"),
    ):
        with pytest.raises(UserError, match=sentence):
            run_of_layout(read_checkpoint(folder), ParallelConfig(**sizes))


# --- upcycling ---

EXPERTS = {"num_experts": 4, "moe_router_topk": 2}


def save_dense(folder: Path) -> float:
    engine = build_engine(config_of(Row(micro_batch=2), model=LLAMA))
    train(engine, range(STEPS))
    make_manager(engine, folder).save(state_after(STEPS))
    return canary_loss(engine)


def upcycle(row: Row, options: dict[str, Any], **model: Any) -> tuple[float, float, int]:
    """Returns (canary loss of the dense model, next loss, step of the next checkpoint)."""
    parallel = {"expert_model_parallel_size": row.dp}
    options = {**options, "finetune": True, "moe_use_upcycling": True}
    config = config_of(row, model=LLAMA | EXPERTS | model, parallel=parallel, checkpoint=options)
    checkpoint = find_checkpoint(unconnected_run(config))
    engine = build_engine(config)
    load_checkpoint(engine, checkpoint, FINGERPRINT)
    loss = canary_loss(engine)
    return loss, train(engine, [0])[0][0], checkpoint.start_state.iteration


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize("source", ["native", "huggingface", "universal"])
def test_a_model_with_experts_starts_from_a_dense_model_of_any_format(source: str, tmp_path: Path) -> None:
    (dense,) = run_world(1, save_dense, tmp_path / "native")
    folder = tmp_path / "native" / f"global_step{STEPS}"
    options: dict[str, Any] = {"load": str(folder.parent)}
    if source == "huggingface":
        write_hugging_face(open_checkpoint(folder), tmp_path / "model")
        options = {"load": str(tmp_path / "model")}
    elif source == "universal":
        list(to_universal(open_reader(open_checkpoint(folder)), folder.with_name(f"{folder.name}_universal")))
        options |= {"universal_checkpoint": True}
    row = Row(dp=2, zero=1, micro_batch=2)
    for loss, following, iteration in run_world(row.world_size, upcycle, row, options):
        assert loss == pytest.approx(dense, rel=1e-6) and iteration == 0
        assert following < 5
    for model, upcycles, sentence in (
        (
            {"moe_ffn_hidden_size": 24},
            True,
            "--moe-ffn-hidden-size 24 and --ffn-hidden-size 48: .* equal sizes",
        ),
        ({"num_attention_heads": 8}, True, "num_attention_heads was 4|num_query_groups"),
        ({}, False, "has no experts, --num-experts is 4: add --finetune --moe-use-upcycling, .*"),
    ):
        with pytest.raises(UserError, match=sentence):
            find_checkpoint(
                unconnected_run(
                    config_of(
                        row,
                        model=LLAMA | EXPERTS | {"kv_channels": 8} | model,
                        checkpoint={**options, "finetune": True, "moe_use_upcycling": upcycles},
                    )
                )
            )
