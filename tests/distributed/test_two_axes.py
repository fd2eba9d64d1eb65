"""A weight that is sharded over two axes has one description, which is used from its initial values to its
export.

The rows of the MLP's first matrix are on the tensor-parallel ranks, as always. Its columns are on the
context-parallel ranks, which all-gather them. The weight starts from the values of the usual matrix, so the
reference is one process with the usual model. No file of the program knows this weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.formats.dcp_writer import DcpWriter
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.native_writer import NativeWriter
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.huggingface.run_export import export_model
from megatron.checkpoint.inspect import inspect_folder
from megatron.checkpoint.saving.run_record import check_sharding
from megatron.errors import UserError
from megatron.model import gpt_model
from megatron.model.layer_context import LayerContext
from megatron.mpu.layers import ColumnParallelLinear, linear
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import Shard
from megatron.mpu.parameters import new_parameter, spec_of
from megatron.training.stability import find_invariant_violation
from tests.distributed.parity import Changes, assert_near
from tests.distributed.resharding import STEPS_BEFORE, resume_midway, uninterrupted
from tests.distributed.test_model_variants import LLAMA
from tests.support.checkpoints import make_manager, state_after
from tests.support.layouts import Row, build_engine, config_of, train
from tests.support.pool import run_world

GATED: Changes = {"model": LLAMA}
NAME = "3.mlp.dense_h_to_4h.weight"
SAVERS = {
    "TP 2 x CP 2, ZeRO-1": Row(tp=2, cp=2, zero=1, micro_batch=4),
    "CP 2 x DP 2, ZeRO-1": Row(cp=2, dp=2, zero=1, micro_batch=2),
    "CP 2 x DP 2, no ZeRO, bf16": Row(cp=2, dp=2, micro_batch=2, precision="bf16"),
    "TP 2 x CP 2 x DP 2, ZeRO-3": Row(tp=2, cp=2, dp=2, zero=3, micro_batch=2),
}
RESUMERS = [
    Row(cp=2, dp=2, zero=1, micro_batch=2),
    Row(tp=2, cp=2, micro_batch=4),
    Row(tp=2, pp=2, micro_batch=2),
    Row(cp=4, micro_batch=4),
]


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        parts = [torch.empty_like(shard) for _ in range(axis.size)]
        dist.all_gather(parts, shard.contiguous(), group=axis.group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        summed = grad.float().contiguous()
        dist.all_reduce(summed, group=ctx.axis.group)
        return summed.chunk(ctx.axis.size, 1)[ctx.axis.rank].to(grad.dtype), None


class TwoAxesLinear(ColumnParallelLinear):
    """A column-parallel layer whose weight's columns are sharded over the context-parallel ranks."""

    def __init__(self, context: LayerContext, usual: ColumnParallelLinear) -> None:
        torch.nn.Module.__init__(self)
        self.tp_group, self.cp_group, self.bias = usual.tp_group, context.cp_group, usual.bias
        spec = spec_of(usual.weight)
        spec = replace(spec, sharding=(*spec.sharding, Shard(1, "cp")))
        self.weight = new_parameter(spec, self.tp_group, self.cp_group)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if self.cp_group.size > 1:
            weight = _GatherColumns.apply(weight, self.cp_group)
        return linear(x, weight, self.bias, None, self.tp_group)


class TwoAxesMLP(gpt_model.ParallelMLP):
    def __init__(self, context: LayerContext, size: int) -> None:
        super().__init__(context, size)
        self.dense_h_to_4h = TwoAxesLinear(context, self.dense_h_to_4h)


def with_two_axes(function: Callable[..., Any], *args: Any) -> Any:
    with patch.object(gpt_model, "ParallelMLP", TwoAxesMLP):
        return function(*args)


def save_and_export(row: Row, folder: Path) -> Any:
    """Trains, saves and exports. Returns (losses and grad norms, number of elements of the weight that this
    rank updates)."""
    options = {"checkpoint": {"save": str(folder), "save_format": "dcp"}}
    engine = build_engine(config_of(row, **GATED, **options))
    check_sharding(engine)
    with patch.object(DcpWriter, "check_sharding", NativeWriter.check_sharding):
        with pytest.raises(UserError, match=f"{NAME} is sharded over .*: use the format dcp"):
            check_sharding(engine)
    history = train(engine, range(STEPS_BEFORE))
    make_manager(engine, folder).save(state_after(STEPS_BEFORE))
    assert export_model(engine, folder / "exported", lambda: None)
    assert find_invariant_violation(engine.optimizer, engine.mesh) is None
    parts = engine.optimizer.pieces({NAME})
    return history, sum(part.values["fp32"].numel() for part in parts)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", SAVERS)
def test_a_weight_on_two_axes_trains_saves_reshards_and_exports(name: str, tmp_path: Path) -> None:
    row = SAVERS[name]
    saved = run_world(row.world_size, with_two_axes, save_and_export, row, tmp_path)
    expected = run_world(1, _reference, Row(micro_batch=2))[0]
    for history, _ in saved:
        assert_near(history, expected, row.precision)
    folder = tmp_path / f"global_step{STEPS_BEFORE}"
    with patch.object(gpt_model, "ParallelMLP", TwoAxesMLP):
        checkpoint = open_checkpoint(folder)
        reader = open_reader(checkpoint)
        assert reader.specs[NAME].axis_names == ("tp", "cp")
        assert checkpoint.run["parameters"][NAME]["sharding"] == [[0, "tp", 2], [1, "cp", 1]]
        assert not inspect_folder(folder).problems
        assert reader.verify()[1] == []
        weight = reader.read(NAME, VALUES)
    # Each element is on one rank with ZeRO, and on one rank per replica without ZeRO.
    assert sum(held for _, held in saved) == weight.numel() * (1 if row.zero else row.dp)
    stored: dict[str, Tensor] = {}
    for path in (tmp_path / "exported").glob("*.safetensors"):
        stored |= load_file(path)
    gate, up = (stored[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(torch.cat([up, gate]).float(), weight.to(up.dtype).float())
    resumer = RESUMERS[list(SAVERS).index(name)]
    if row.precision == "fp32":
        arguments = (resume_midway, resumer, tmp_path, GATED)
        for _, history in run_world(resumer.world_size, with_two_axes, *arguments):
            assert_near(history, uninterrupted(GATED))


def _reference(row: Row) -> Any:
    return train(build_engine(config_of(row, **GATED)), range(STEPS_BEFORE))
