"""Runs load universal checkpoints of a plain DeepSpeed engine, which have no pipeline, no arguments of
Megatron, and no patterns. DeepSpeed trains, saves and converts (--inject_missing_state)."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor

from megatron.checkpoint.formats.universal import UniversalReader
from megatron.checkpoint.manager import load_checkpoint
from megatron.checkpoint.record import TrainingState
from megatron.checkpoint.selection import find_checkpoint
from megatron.data.loader import MicroBatch
from megatron.model.inference.single_process import GPTModel, model_specs
from megatron.mpu.mesh import Axis
from megatron.mpu.pieces import Piece
from tests.distributed.test_deepspeed_engine_files import module_of
from tests.reference.shards import shard_of
from tests.support.checkpoints import FINGERPRINT
from tests.support.layouts import (
    EOD,
    GLOBAL_BATCH,
    SEQ,
    VOCAB,
    Row,
    build_engine,
    config_of,
    sample_tokens,
    unconnected_run,
)
from tests.support.pool import run_world
from tests.unit.checkpoint.megatron_deepspeed_folder import their_name
from tests.unit.checkpoint.native_folder import random_wholes

STEPS, MORE_STEPS, RATE = 3, 4, 1e-2
SAMPLES = STEPS * GLOBAL_BATCH
OPTIMIZER = {"weight_decay": 0.0, "clip_grad": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999}
SWIGLU = {"glu_activation": "swiglu"}


def settings_of(zero: int, batch: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "Adam", "params": {"lr": RATE, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
    }


def states_of(engine: Any) -> dict[str, dict[str, Tensor]]:
    """Returns DeepSpeed's fp32 values and moments of this rank's parameters, by name."""
    return {
        name: {
            "fp32": safe_get_full_fp32_param(parameter).detach().clone(),
            **{
                key: safe_get_full_optimizer_state(parameter, key).clone()
                for key in ("exp_avg", "exp_avg_sq")
            },
        }
        for name, parameter in engine.module.named_parameters()
    }


def train_and_save(
    folder: Path, zero: int, replicas: int
) -> tuple[dict[str, dict[str, Tensor]], list[float]]:
    """Returns (the saved states, the losses of the next steps)."""
    config = config_of(Row())
    model, wholes = GPTModel(config, VOCAB, EOD), random_wholes(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_()
            parameter[: len(wholes[name])].copy_(wholes[name])
    size = GLOBAL_BATCH // replicas
    settings = settings_of(zero, size)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings, dist_init_required=False
    )

    def step(number: int) -> float:
        tokens = sample_tokens(number * GLOBAL_BATCH + dist.get_rank() * size, size)
        logits = engine(tokens[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / replicas

    for number in range(STEPS):
        step(number)
    engine.save_checkpoint(str(folder), tag="mine")
    states = states_of(engine)
    return states, [step(number) for number in range(STEPS, STEPS + MORE_STEPS)]


def convert_as_deepspeed(folder: Path) -> None:
    """Runs DeepSpeed's converter on the checkpoint `mine`."""
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    flags = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    source, target = folder / "mine", folder / "mine_universal"
    target.mkdir()
    ds_to_universal.main(Namespace(input_folder=str(source), output_folder=str(target), **workers, **flags))


def config_for(row: Row, folder: Path, **model: Any) -> Any:
    options = {"load": str(folder), "universal_checkpoint": True}
    return config_of(row, model=model, optimizer=OPTIMIZER, checkpoint=options)


def resume(row: Row, folder: Path) -> tuple[TrainingState, list[float]]:
    config = config_for(row, folder)
    checkpoint = find_checkpoint(unconnected_run(config))
    engine = build_engine(config)
    load_checkpoint(engine, checkpoint, FINGERPRINT)
    size, mesh, losses = row.micro_batch, engine.mesh, []
    for number in range(STEPS, STEPS + MORE_STEPS):
        batch = sample_tokens(number * GLOBAL_BATCH, GLOBAL_BATCH)
        firsts = range(mesh.dp.rank * size, GLOBAL_BATCH, mesh.dp_size * size)
        micro_batches = (MicroBatch.from_rows(batch[first : first + size], first) for first in firsts)
        losses.append(engine.train_step(micro_batches, GLOBAL_BATCH, RATE).item())
    return checkpoint.state, losses


@pytest.mark.gate(rows=1)  # tested with ZeRO-1 by test_shards_of_tensor_parallel_ranks_are_merged
@pytest.mark.parametrize("zero", [3, 2, 1], ids=str)
def test_the_next_losses_are_those_of_the_engine(zero: int, tmp_path: Path) -> None:
    (states, expected), _ = run_world(2, train_and_save, tmp_path, zero, 2)
    convert_as_deepspeed(tmp_path)
    checkpoint = find_checkpoint(unconnected_run(config_for(Row(), tmp_path)))
    reader = UniversalReader(checkpoint)
    for name, kinds in states.items():
        assert all(torch.equal(reader.read(name, kind), tensor) for kind, tensor in kinds.items()), name
        assert reader.optimizer_scalars(name)["step"] == STEPS
    for row in (Row(tp=2, pp=2, micro_batch=2), Row(dp=2, zero=1, micro_batch=4)):
        for state, losses in run_world(row.world_size, resume, row, tmp_path):
            assert state == TrainingState(STEPS, SAMPLES, SAMPLES * SEQ)
            assert losses == pytest.approx(expected, rel=1e-6)


class TwoTensorRanks:
    """The `mpu` that a Megatron program with TP 2 passes to DeepSpeed: it describes the process groups."""

    def __init__(self) -> None:
        self.own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.own


def save_shards(folder: Path, megatron_names: bool) -> dict[str, dict[str, Tensor]]:
    """Trains the shards of two tensor-parallel ranks with the sum of their squares as loss, and saves
    them."""
    config = config_of(Row(), model=SWIGLU)
    group = Axis("tp", dist.get_rank(), 2)
    wholes, specs = random_wholes(config), model_specs(config, VOCAB, EOD)
    shards = {}
    for name, whole in wholes.items():
        padded = torch.zeros(specs[name].global_shape)
        padded[: len(whole)] = whole
        shard = shard_of(specs[name], padded, [group]).contiguous()
        if megatron_names and ".mlp.dense_h_to_4h." in name:
            shard = torch.cat(shard.chunk(2)[::-1])  # Megatron has the gate before the values
        own = f"module.{their_name(name, config.model.num_layers, False)}" if megatron_names else name
        shards[own] = shard
    module = module_of(shards)
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=module.parameters(),
        config=settings_of(1, 1),
        mpu=TwoTensorRanks(),
        dist_init_required=False,
    )
    for _ in range(STEPS):
        engine.backward(engine())
        engine.step()
    engine.save_checkpoint(str(folder), tag="mine")
    return states_of(engine)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("megatron_names", [True, False])
def test_shards_of_tensor_parallel_ranks_are_merged(megatron_names: bool, tmp_path: Path) -> None:
    """Without patterns, DeepSpeed's converter concatenates all shards, replicas included. The reader must
    find the parameters in them. The model has a gated MLP, which the saved arguments do not mention."""
    ranks = run_world(2, save_shards, tmp_path, megatron_names)
    convert_as_deepspeed(tmp_path)
    config = config_for(Row(), tmp_path, **SWIGLU)
    checkpoint = find_checkpoint(unconnected_run(config))
    assert checkpoint.state.iteration == STEPS
    reader = UniversalReader(checkpoint)
    specs = model_specs(config, VOCAB, EOD)
    assert set(reader.stored_names) == set(specs)
    for name, spec in specs.items():
        own = f"module.{their_name(name, config.model.num_layers, False)}" if megatron_names else name
        for kind, state in (("fp32", None), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            for rank, states in enumerate(ranks):
                shard = states[own][kind]
                if megatron_names and ".mlp.dense_h_to_4h." in name:
                    shard = torch.cat(shard.chunk(2)[::-1])
                found = reader.read_piece(Piece.of_shard(name, spec, [Axis("tp", rank, 2)]), state or "fp32")
                rows = spec.num_valid_rows
                if rows is not None:  # padded rows are not kept
                    width = spec.global_shape[1]
                    valid = max(0, min(rows - rank * len(shard), len(shard))) * width
                    found, shard = found[:valid], shard.reshape(-1)[:valid]
                assert torch.equal(found, shard.reshape(-1)), (name, kind, rank)
