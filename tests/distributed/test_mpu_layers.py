"""Outputs and gradients of each parallel layer equal its single-process reference."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.mpu.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    parallel_logits,
)
from megatron.mpu.mappings import gather_from_tensor_region
from megatron.mpu.mesh import Axis
from megatron.mpu.parameters import initial_values, initialize_parameters, merge_shards, spec_of
from tests.reference.shards import shard_of
from tests.support.pool import run_world
from tests.support.scatter import scatter, world_tp_group

SEED = 1234
HIDDEN, INNER, VOCAB, USED_ROWS = 24, 48, 128, 100


class Column(nn.Module):
    """A column-parallel layer whose outputs are gathered for the comparison."""

    def __init__(self, tp_group: Axis) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.layer = ColumnParallelLinear(HIDDEN, INNER, tp_group, init_std=0.3)

    def forward(self, x):
        return gather_from_tensor_region(self.layer(x), self.tp_group)


class Row(nn.Module):
    def __init__(self, tp_group: Axis) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.layer = RowParallelLinear(INNER, HIDDEN, tp_group, init_std=0.3)

    def forward(self, x):
        return self.layer(scatter(x, self.tp_group))


class GatedMlp(nn.Module):
    """A gated MLP: a column-parallel layer with two fused blocks, the product of the blocks, and a
    row-parallel layer."""

    def __init__(self, tp_group: Axis) -> None:
        super().__init__()
        self.columns = ColumnParallelLinear(HIDDEN, 2 * INNER, tp_group, init_std=0.3, num_fused_parts=2)
        self.rows = RowParallelLinear(INNER, HIDDEN, tp_group, init_std=0.3, bias=False)

    def forward(self, x):
        gate, value = self.columns(x).chunk(2, -1)
        return self.rows(F.gelu(gate) * value)


class EmbeddingAndHead(nn.Module):
    """A module that computes logits of its embedded tokens. Its table is both embedding and LM head."""

    def __init__(self, tp_group: Axis) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.table = VocabParallelEmbedding(VOCAB, HIDDEN, tp_group, num_valid_rows=USED_ROWS, init_std=0.3)

    def forward(self, token_ids):
        logits = parallel_logits(self.table(token_ids).tanh(), self.table.weight, self.tp_group)
        return gather_from_tensor_region(logits, self.tp_group)


def plain_column(w, x):
    return F.linear(x, w["layer.weight"], w["layer.bias"])


def plain_gated_mlp(w, x):
    gate, value = F.linear(x, w["columns.weight"], w["columns.bias"]).chunk(2, -1)
    return F.linear(F.gelu(gate) * value, w["rows.weight"])


def plain_embedding_and_head(w, token_ids):
    return w["table.weight"][token_ids].tanh() @ w["table.weight"].t()


CASES = {
    "column": (Column, plain_column, HIDDEN),
    "row": (Row, plain_column, INNER),
    "gated mlp": (GatedMlp, plain_gated_mlp, HIDDEN),
    "embedding and head": (EmbeddingAndHead, plain_embedding_and_head, None),
}


def model_input(n_in):
    generator = torch.Generator().manual_seed(5)
    if n_in is None:
        return torch.randint(0, USED_ROWS, (2, 7), generator=generator)
    return torch.randn(2, 7, n_in, generator=generator, requires_grad=True)


def perturbed(full):
    """Returns values without zeros. Zero biases would hide a bias that is added twice."""
    return full + torch.linspace(-0.5, 0.5, full.numel()).view(full.shape)


def run_layer(case):
    tp_group = world_tp_group()
    size = tp_group.size
    make, _, n_in = CASES[case]
    layer = make(tp_group)
    initialize_parameters(layer, SEED, [tp_group])
    with torch.no_grad():
        for parameter in layer.parameters():
            parts = [torch.empty_like(parameter) for _ in range(size)]
            dist.all_gather(parts, parameter.detach())
            spec = spec_of(parameter)
            full = perturbed(merge_shards(spec, parts))
            parameter.copy_(shard_of(spec, full, [tp_group]))
    x = model_input(n_in)
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    grads = {name: (spec_of(p), p.grad) for name, p in layer.named_parameters()}
    return y.detach(), x.grad, grads


def plain(case):
    make, function, n_in = CASES[case]
    specs = {name: spec_of(p) for name, p in make(Axis("tp")).named_parameters()}
    weights = {
        name: perturbed(initial_values(spec, SEED, name, ())).double().requires_grad_()
        for name, spec in specs.items()
    }
    x = model_input(n_in)
    inner = x if n_in is None else x.detach().double().requires_grad_()
    y = function(weights, inner)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape))
    return y.detach(), inner.grad, {name: weight.grad for name, weight in weights.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_parallel_layer_computes_what_its_reference_does(case, size):
    expected_y, expected_x_grad, expected_grads = plain(case)
    ranks = run_world(size, run_layer, case)
    for y, x_grad, _ in ranks:
        torch.testing.assert_close(y.double(), expected_y, rtol=1e-5, atol=1e-5)
        assert (x_grad is None) == (expected_x_grad is None)
        if x_grad is not None:
            torch.testing.assert_close(x_grad.double(), expected_x_grad, rtol=1e-5, atol=1e-5)
    for name, expected in expected_grads.items():
        spec = ranks[0][2][name][0]
        shards = [grads[name][1] for _, _, grads in ranks]
        torch.testing.assert_close(merge_shards(spec, shards).double(), expected, rtol=1e-5, atol=2e-5)
        if not spec.sharding:
            assert all(torch.equal(shard, shards[0]) for shard in shards)


def frozen_weights_and_inputs():
    tp_group = world_tp_group()
    layer = ColumnParallelLinear(HIDDEN, INNER, tp_group, init_std=0.3)
    initialize_parameters(layer, SEED, [tp_group])
    x = model_input(HIDDEN)
    layer.requires_grad_(False)
    layer(x).sum().backward()
    input_grad, x.grad = x.grad, None
    layer.requires_grad_(True)
    layer(x.detach()).sum().backward()
    return (
        input_grad is not None
        and layer.weight.grad is not None
        and layer.bias.grad is not None
        and x.grad is None
    )


def test_only_the_gradients_that_are_wanted_are_made():
    assert run_world(2, frozen_weights_and_inputs) == [True, True]


def test_biases_are_not_decayed_and_weights_are():
    for layer in (
        ColumnParallelLinear(4, 8, Axis("tp"), init_std=1.0),
        RowParallelLinear(4, 8, Axis("tp"), init_std=1.0),
    ):
        assert spec_of(layer.weight).weight_decay and not spec_of(layer.bias).weight_decay
