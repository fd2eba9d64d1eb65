"""Runs continue from native files of DeepSpeed's own engine for a model without a pipeline, as Microsoft's
Megatron-DeepSpeed writes them with --no-pipeline-parallel: ZeRO-1 and 2, bf16, and several replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from megatron.checkpoint.conversion.source import open_source
from megatron.checkpoint.formats.universal import UniversalReader
from megatron.checkpoint.record import TrainingState
from megatron.checkpoint.selection import find_checkpoint
from megatron.model.inference.single_process import model_specs
from tests.support.conversion import to_universal
from tests.support.layouts import EOD, VOCAB, Row, config_of, unconnected_run
from tests.support.pool import run_world
from tests.unit.checkpoint.megatron_deepspeed_folder import their_args, their_name
from tests.unit.checkpoint.native_folder import random_wholes

STEPS = 3
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
# Megatron-DeepSpeed's `_universal_checkpoint_info` for a model without tensor parallelism.
INFO = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": VOCAB,
    "padded_vocab_size": VOCAB,
    "vocabulary_parameter_patterns": ["language_model.embedding.word_embeddings.weight"],
}


def module_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """Returns a module with these parameters, given by dotted names. The output of the module is the sum of
    their squares."""

    class SumOfSquares(nn.Module):
        def forward(self) -> torch.Tensor:
            return sum((parameter.float() ** 2).sum() for parameter in self.parameters())

    root = SumOfSquares()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        parent = root
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        parent.register_parameter(last, nn.Parameter(tensor.clone()))
    return root


def save(folder: Path, precision: str, zero: int) -> dict[str, dict[str, torch.Tensor]]:
    """Trains and saves. Returns DeepSpeed's unsharded fp32 values and moments, by Megatron-DeepSpeed's
    names."""
    config = config_of(Row())
    wholes = random_wholes(config)
    layers = config.model.num_layers
    module = module_of({their_name(name, layers, False): whole for name, whole in wholes.items()})
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        **PRECISIONS[precision],
    }
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=settings, dist_init_required=False
    )
    for _ in range(STEPS):
        engine.backward(engine())
        engine.step()
    args = their_args(config, iteration=STEPS, consumed_train_samples=8 * STEPS, consumed_train_tokens=0)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": STEPS, "universal_checkpoint_info": INFO}
    engine.save_checkpoint(str(folder), client_state=state)
    return {
        name: {
            "fp32": safe_get_full_fp32_param(parameter).clone(),
            **{key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")},
        }
        for name, parameter in engine.module.named_parameters()
    }


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(
    "replicas, precision, zero",
    [(2, "bf16", 1), (2, "fp32", 1), (1, "bf16", 1), (3, "bf16", 2), (1, "fp32", 2)],
)
def test_values_and_moments_are_those_of_the_engine(
    replicas: int, precision: str, zero: int, tmp_path: Path
) -> None:
    expected, *_ = run_world(replicas, save, tmp_path, precision, zero)
    source = tmp_path / f"global_step{STEPS}"
    files = {path.name for path in source.iterdir()}
    prefix = "bf16_" if precision == "bf16" else ""
    assert files == {"mp_rank_00_model_states.pt"} | {
        f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(replicas)
    }
    for _ in to_universal(open_source(source), tmp_path / f"{source.name}_universal"):
        pass
    config = config_of(Row(), checkpoint={"load": str(tmp_path), "universal_checkpoint": True})
    checkpoint = find_checkpoint(unconnected_run(config))
    assert checkpoint is not None and checkpoint.state == TrainingState(STEPS, 8 * STEPS, 0)
    reader = UniversalReader(checkpoint)
    specs = model_specs(config, VOCAB, EOD)
    assert set(reader.stored_names) == set(specs)
    for name in specs:
        states = expected[their_name(name, config.model.num_layers, False)]
        for kind, tensor in states.items():
            assert torch.equal(reader.read(name, kind), tensor), (name, kind)
        assert reader.optimizer_scalars(name)["step"] == STEPS
