"""Checkpoints of models with experts: on every number of expert-parallel ranks, with the bits of weights,
moments and the bias of experts; and models with experts that start from a dense model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.inspect import inspect_folder
from megatron.checkpoint.integrity import canary_loss
from megatron.checkpoint.manager import load_checkpoint
from megatron.checkpoint.selection import find_checkpoint
from megatron.errors import UserError
from tests.distributed.test_experts import GLM
from tests.distributed.test_model_variants import LLAMA
from tests.support.checkpoints import FINGERPRINT, make_manager, state_after
from tests.support.conversion import to_universal, write_hugging_face
from tests.support.layouts import Row, build_engine, config_of, train, unconnected_run
from tests.support.pool import run_world

STEPS = 3
# (layout, expert-parallel size) of the run that trains, and of the runs that load and save again.
LAYOUTS = [
    (Row(dp=2, zero=1, micro_batch=2), 2),
    (Row(tp=2, dp=2, zero=1, micro_batch=2), 4),
    (Row(pp=2, dp=2, zero=3, micro_batch=2), 2),
    (Row(micro_batch=4), 1),
]
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss"}


def load_and_save(row: Row, ep: int, folder: Path | None, target: Path, **model: Any) -> list[Any]:
    """Loads a checkpoint, or trains if there is none, and saves. Returns loss and norm of the next step."""
    parallel = {"expert_model_parallel_size": ep, "sequence_parallel": row.tp > 1}
    options = {"save": str(target), "save_format": "dcp", "load": folder and str(folder)}
    config = config_of(row, model=GLM | model, parallel=parallel, checkpoint=options)
    engine = build_engine(config)
    if folder is None:
        train(engine, range(STEPS))
    else:
        checkpoint = find_checkpoint(
            unconnected_run(replace(config, checkpoint=replace(config.checkpoint, save=None)))
        )
        train(engine, [9])  # other weights and moments: all must be replaced
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


def test_a_checkpoint_opens_on_every_number_of_expert_parallel_ranks(tmp_path: Path) -> None:
    (row, ep), *others = LAYOUTS
    first = tmp_path / "0"
    ((expected, *_), *_) = run_world(row.world_size, load_and_save, row, ep, None, first)
    states = states_of(first)
    bias = states["4.mlp.router.expert_bias", "fp32"]
    assert bias.abs().max() > 0 and states["4.mlp.experts.dense_h_to_4h.weight", "exp_avg"].abs().max() > 0
    assert not inspect_folder(first / f"global_step{STEPS}").problems
    source = first
    for number, (row, ep) in enumerate(others, 1):
        target = tmp_path / str(number)
        for history, *_ in run_world(row.world_size, load_and_save, row, ep, source, target):
            assert history == pytest.approx(expected, rel=1e-5)
        found = states_of(target)
        assert found.keys() == states.keys()
        assert all(torch.equal(found[key], states[key]) for key in states)
        source = target


def change_balance(folder: Path) -> None:
    row = Row(micro_batch=4)
    load_and_save(row, 1, None, folder / "sequences")
    load_and_save(row, 1, folder / "sequences", folder / "global", **GLOBAL)
    load_and_save(row, 1, folder / "global", folder / "again")


def test_a_resume_may_change_the_balance_loss(tmp_path: Path) -> None:
    """Only global_aux_loss has the load of the last step, which begins balanced."""
    run_world(1, change_balance, tmp_path)
    first, second, third = (states_of(tmp_path / name) for name in ("sequences", "global", "again"))
    assert second.keys() - first.keys() >= {("4.mlp.router.expert_load", "fp32")}
    assert torch.equal(second["4.mlp.router.expert_load", "fp32"], torch.ones(8))
    assert all(torch.equal(second[key], first[key]) for key in first)
    assert third.keys() == first.keys() and all(torch.equal(third[key], first[key]) for key in first)


# --- upcycling ---

EXPERTS = {"num_experts": 4, "moe_router_topk": 2}


def save_dense(folder: Path) -> float:
    engine = build_engine(config_of(Row(micro_batch=2), model=LLAMA))
    train(engine, range(STEPS))
    make_manager(engine, folder).save(state_after(STEPS))
    return canary_loss(engine)


def upcycle(row: Row, options: dict[str, Any], **model: Any) -> tuple[float, float, int]:
    """Returns the loss of the dense model's canary, the next loss, and the step of the next checkpoint."""
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
    for model, sentence in (
        ({"moe_ffn_hidden_size": 24}, "--moe-ffn-hidden-size 24 and --ffn-hidden-size 48: .* equal sizes"),
        ({"num_attention_heads": 8}, "num_attention_heads was 4|num_query_groups"),
    ):
        with pytest.raises(UserError, match=sentence):
            find_checkpoint(
                unconnected_run(
                    config_of(
                        row,
                        model=LLAMA | EXPERTS | {"kv_channels": 8} | model,
                        checkpoint={**options, "finetune": True, "moe_use_upcycling": True},
                    )
                )
            )
