"""--sequence-parallel changes only where activations are stored, and no loss."""

import pytest
import torch

from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.mpu.mappings import gather_from_tensor_region, reduce_scatter_to_sequence_region
from megatron.mpu.parameters import initialize_parameters
from tests.distributed.parity import DUALPIPEV, SEQUENCE_PARALLEL, assert_same_numbers
from tests.support.layouts import (
    DROPOUT,
    SEQ,
    Row,
    build_engine,
    config_of,
    train,
)
from tests.support.pool import run_world
from tests.support.scatter import scatter, world_tp_group

ROWS = [
    Row(tp=2, micro_batch=2),
    Row(tp=4, micro_batch=2, positions="alibi"),
    Row(tp=2, pp=2, recompute=True),
    Row(tp=2, dp=2, zero=1, positions="rotary"),
    Row(tp=2, pp=2, dp=2, zero=1, micro_batch=2),
]
TP2_PP2 = Row(tp=2, pp=2, micro_batch=2)
BF16 = Row(tp=2, pp=2, micro_batch=2, precision="bf16")
FP32_RESIDUAL = {"precision": {"fp32_residual_connection": True}}
# Name -> (the layout, changes of both runs, changes of only the layout's run).
CASES = {
    **{str(row): (row, {}, {}) for row in ROWS},
    **{f"{row}-dropout": (row, {"model": DROPOUT}, {}) for row in ROWS},
    "post-layernorm residual": (TP2_PP2, {"model": {"apply_residual_connection_post_layernorm": True}}, {}),
    "swiglu": (TP2_PP2, {"model": {"glu_activation": "swiglu", "embed_layernorm": True}}, {}),
    "documents": (TP2_PP2, {"data": {"reset_attention_mask": True, "reset_position_ids": True}}, {}),
    "dualpipev": (TP2_PP2, {}, DUALPIPEV),
    "bf16": (BF16, {}, {}),
    "bf16, fp32 residual": (BF16, {}, FP32_RESIDUAL),
}


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_one_process(name):
    row, numbers, layout = CASES[name]
    parallel = {**layout.get("parallel", {}), "sequence_parallel": True}
    assert_same_numbers(row, 8, numbers, {**layout, "parallel": parallel})


def shapes_between_layers(row):
    engine = build_engine(config_of(row, **SEQUENCE_PARALLEL))
    seen = []
    for layer in engine.module.transformer_layers().values():
        layer.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
    train(engine, range(1))
    return seen


@pytest.mark.full
def test_between_layers_a_rank_holds_its_part():
    for seen in run_world(4, shapes_between_layers, Row(tp=4, micro_batch=2)):
        assert set(seen) == {(SEQ // 4, 2, 32)} and len(seen) == 4 * 4


# --- layers, compared with their single-process references ---


def linear_pair(rank_inputs):
    """Returns outputs and gradients of a column-parallel, then a row-parallel layer on a sharded sequence,
    gathered."""
    tensor = world_tp_group()
    is_sharded = tensor.size > 1
    column = ColumnParallelLinear(6, 8, tensor, init_std=0.5, sequence_parallel=is_sharded)
    row = RowParallelLinear(8, 6, tensor, init_std=0.5, sequence_parallel=is_sharded)
    for number, layer in enumerate((column, row)):
        initialize_parameters(layer, number, [tensor])
    inputs = rank_inputs.clone().requires_grad_()
    x = scatter(inputs, tensor, dim=0)
    y = gather_from_tensor_region(row(torch.tanh(column(x))), tensor, dim=0)
    (y * torch.arange(y.numel()).view_as(y)).sum().backward()
    return y.detach(), inputs.grad, column.weight.grad, row.weight.grad, row.bias.grad


def test_a_column_and_a_row_parallel_layer_on_a_sharded_sequence_equal_plain_ones():
    inputs = torch.randn(8, 3, 6, generator=torch.Generator().manual_seed(0))
    ((y, grad, column, row, bias),) = run_world(1, linear_pair, inputs)
    ranks = run_world(2, linear_pair, inputs)
    for parts in ranks:
        torch.testing.assert_close(parts[0], y)
        torch.testing.assert_close(parts[1], grad)
    torch.testing.assert_close(torch.cat([part[2] for part in ranks]), column)
    torch.testing.assert_close(torch.cat([part[3] for part in ranks], 1), row)
    torch.testing.assert_close(sum(part[4] for part in ranks), bias)


def embedding_pair():
    """Returns outputs and gradients of the embedding that is sharded along the sequence, and this rank's part
    of the replicated embedding's outputs and gradients."""
    tp_group = world_tp_group()
    ranks, rank = tp_group.size, tp_group.rank
    tokens = torch.randint(0, 60, (3, 8), generator=torch.Generator().manual_seed(0))
    found = []
    for sharded in (True, False):
        table = VocabParallelEmbedding(
            64, 6, tp_group, num_valid_rows=60, init_std=0.5, sequence_parallel=sharded
        )
        initialize_parameters(table, 1, [tp_group])
        hidden = table(tokens)
        factors = torch.linspace(-1, 1, 3 * 8 * 6).view(3, 8, 6)
        own = factors.transpose(0, 1).chunk(ranks)[rank]
        hidden.backward(own if sharded else factors)
        part = hidden if sharded else hidden.transpose(0, 1).chunk(ranks)[rank]
        found.append((part.detach().contiguous(), table.weight.grad))
    return found


def test_a_sharded_embedding_has_the_bits_of_a_replicated_one():
    for sharded, replicated in run_world(4, embedding_pair):
        for one, other in zip(sharded, replicated, strict=True):
            assert one.abs().max() > 0 and torch.equal(one, other)


def shard_a_sequence_that_cannot_be_sharded():
    try:
        reduce_scatter_to_sequence_region(torch.zeros(3, 3), world_tp_group())
    except ValueError as error:
        return str(error)


def test_a_sequence_that_cannot_be_sharded_is_refused():
    for message in run_world(2, shard_a_sequence_that_cannot_be_sharded):
        assert message == "dimension 0 of (3, 3) is not divisible by 2 ranks"
