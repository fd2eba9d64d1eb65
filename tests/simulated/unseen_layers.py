"""Parts of a model that no file of the program knows, and whether they are planned as they are simulated.

    python -m tests.simulated.unseen_layers FLAGS

The command registers the parts, plans a training step with these flags, simulates the step, and prints the
figures that differ. Python also executes a program's statements in the processes that it starts, which record
and simulate.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.registries import (
    ACTIVATIONS,
    GLU_ACTIVATIONS,
    LAYER_ARRANGEMENTS,
    NORMALIZATIONS,
    Choice,
    LayerArrangement,
)
from megatron.model import gpt_model
from megatron.model.layer_context import LayerContext
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec, Shard
from megatron.mpu.parameters import new_parameter
from tests.simulated.comparison import disagreements
from tests.simulated.layouts import config_of
from tests.support.simulation.stages import simulate_ranks


def half_sandwich(layer: Any, x: Tensor, document_ids: Tensor | None) -> Tensor:
    """Computes a layer with three norms: before attention, before the MLP and after the MLP."""
    attended = layer.self_attention(layer.input_layernorm(x), document_ids)
    x = layer.dropout_add(attended, x, "self_attention")
    return layer.dropout_add(layer.post_mlp_layernorm(layer.mlp(layer.post_attention_layernorm(x))), x, "mlp")


def mish(x: Tensor) -> Tensor:
    """Computes an activation of three kernels, which keep three tensors for the backward pass."""
    return x * torch.tanh(F.softplus(x))


class PeakNorm(nn.Module):
    """Divides by the largest deviation from the mean, in fp32. It has a weight per column and one weight for
    all columns."""

    def __init__(self, hidden_size: int, epsilon: float, use_apex: bool = False) -> None:
        super().__init__()
        self.epsilon = epsilon
        ones = {"init_value": 1.0, "weight_decay": False}
        self.weight = new_parameter(ParameterSpec((hidden_size,), **ones), Axis("tp"))
        self.scale = new_parameter(ParameterSpec((1,), **ones), Axis("tp"))

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalizes hidden: [..., hidden]. The result has this shape, too."""
        centered = hidden.float() - hidden.float().mean(-1, keepdim=True)
        peak = centered.abs().amax(-1, keepdim=True) + self.epsilon
        return (centered / peak).to(self.weight.dtype) * self.weight * self.scale


class CausalMean(nn.Module):
    """A mixer instead of attention: the gated mean of all values so far. Keeps [seq, batch, hidden]."""

    def __init__(self, context: LayerContext, layer_index: int) -> None:
        super().__init__()
        hidden, first, second = context.config.model.hidden_size, *gpt_model._linear_layer_settings(context)
        self.value_and_gate = ColumnParallelLinear(
            hidden, 3 * hidden, context.tp_group, num_fused_parts=2, **first
        )
        self.decay = new_parameter(
            ParameterSpec((3 * hidden // 2,), sharding=(Shard(0),), init_value=0.5), context.tp_group
        )
        self.dense = RowParallelLinear(3 * hidden // 2, hidden, context.tp_group, **second)
        self.skipped_bias = self.dense.skipped_bias

    def forward(self, hidden: Tensor, document_ids: Tensor | None) -> Tensor:
        value, gate = self.value_and_gate(hidden).chunk(2, dim=-1)
        count = torch.arange(1, len(value) + 1, device=value.device).view(-1, 1, 1)
        mean = value.float().cumsum(0) / count
        return self.dense(mean.to(value.dtype) * torch.sigmoid(gate * self.decay))


class TwoMLPs(nn.Module):
    """A wide MLP beside an MLP of low rank, with four matrices in total. It keeps [seq, batch, hidden]."""

    def __init__(self, context: LayerContext, size: int) -> None:
        super().__init__()
        model, group = context.config.model, context.tp_group
        first, second = gpt_model._linear_layer_settings(context)
        rank = model.hidden_size // 4
        self.down = ColumnParallelLinear(model.hidden_size, rank, group, **first)
        self.up = RowParallelLinear(rank, model.hidden_size, group, **{**second, "skip_bias_add": False})
        self.dense_h_to_4h = ColumnParallelLinear(model.hidden_size, size, group, **first)
        self.dense_4h_to_h = RowParallelLinear(size, model.hidden_size, group, **second)
        self.skipped_bias = self.dense_4h_to_h.skipped_bias

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up(self.down(hidden)) + self.dense_4h_to_h(F.silu(self.dense_h_to_4h(hidden)))


def _attention(context: LayerContext, layer_index: int) -> nn.Module:
    kind = CausalMean if context.config.model.layer_arrangement == "causal-mean" else ParallelSelfAttention
    return kind(context, layer_index)


def _mlp(context: LayerContext, size: int) -> nn.Module:
    if context.config.model.layer_arrangement == "two-mlps":
        return TwoMLPs(context, size)
    return ParallelMLP(context, size)


def _register() -> None:
    """Registers each part, as a line in registries.py or gpt_model.py would."""
    path = "tests.simulated.unseen_layers:"
    norms = ("input_layernorm", "post_attention_layernorm")
    half_sandwich = (path + "half_sandwich", (*norms, "post_mlp_layernorm"))
    for name, (arrange, its_norms) in {
        "half-sandwich": half_sandwich,
        "two-mlps": half_sandwich,
        "causal-mean": ("megatron.model.residual:pre_norm", norms),
    }.items():
        LAYER_ARRANGEMENTS._choices[name] = LayerArrangement(
            name, arrange, norms=its_norms, ends_with_norm="post_mlp_layernorm" in its_norms
        )
    for registry, name, attribute in (
        (ACTIVATIONS, "mish", "mish"),
        (GLU_ACTIVATIONS, "mish-glu", "mish"),
        (NORMALIZATIONS, "PeakNorm", "PeakNorm"),
    ):
        registry._choices[name] = Choice(name, path + attribute)
    gpt_model.ParallelSelfAttention, gpt_model.ParallelMLP = _attention, _mlp


def _report(flags: str) -> dict[str, Any]:
    """Returns the disagreements of plan and simulation, the names of operations, and each
    stage's parameters."""
    config = config_of(flags)
    parallel = config.parallel
    per_stage = parallel.world_size // parallel.pipeline_model_parallel_size
    records = simulate_ranks(config, range(0, parallel.world_size, per_stage))
    return {
        "disagreements": disagreements(config, records),
        "operations": sorted(
            {name for record in records for work in record.counts for name in work.operations}
        ),
        "parameters": [record.parameters for record in records],
    }


ParallelSelfAttention, ParallelMLP = gpt_model.ParallelSelfAttention, gpt_model.ParallelMLP
_register()
if __name__ == "__main__":
    print(json.dumps(_report(" ".join(sys.argv[1:]))))
