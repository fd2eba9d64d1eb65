"""--sequence-parallel changes where activations lie and nothing else."""

import pytest
import torch

from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.mpu.mappings import gather_from_tensor_region, reduce_scatter_to_sequence_region
from tests.support.layouts import (
    FP32_BOUND,
    LOW_PRECISION_BOUND,
    SEQ,
    Row,
    build_engine,
    config_of,
    relative_errors,
    train,
    train_layout,
    weights_of,
)
from tests.support.pool import run_world
from tests.support.scatter import scatter

STEPS = 8
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
SEQUENCE_PARALLEL = {"sequence_parallel": True}


def histories(row, **changes):
    """Losses and grad norms of one process, and of `row` with --sequence-parallel."""
    single = Row(positions=row.positions, micro_batch=4)
    reference = run_world(1, train_layout, single, STEPS, **changes)[0]
    return reference, run_world(
        row.world_size, train_layout, row, STEPS, **changes, parallel=SEQUENCE_PARALLEL
    )


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(
    "row",
    [
        Row(tp=2),
        Row(tp=4, micro_batch=2, positions="alibi"),
        Row(tp=2, pp=2, recompute=True),
        Row(tp=2, dp=2, zero=1, positions="rotary"),
        Row(tp=2, pp=2, dp=2, zero=1, micro_batch=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("dropout", [False, True])
def test_the_numbers_are_those_of_one_process(row, dropout):
    reference, ranks = histories(row, model=DROPOUT if dropout else {})
    for history in ranks:
        loss_error, norm_error = relative_errors(history, reference)
        assert loss_error <= FP32_BOUND and norm_error <= FP32_BOUND


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"apply_residual_connection_post_layernorm": True}},
        {"model": {"glu_activation": "swiglu", "embed_layernorm": True}},
        {"data": {"reset_attention_mask": True, "reset_position_ids": True}},
    ],
    ids=str,
)
def test_the_numbers_are_those_of_one_process_in_other_models(changes):
    reference, ranks = histories(Row(tp=2, pp=2, micro_batch=2), **changes)
    assert max(relative_errors(ranks[0], reference)) <= FP32_BOUND


@pytest.mark.full
@pytest.mark.parametrize("residual", [False, True])
def test_bf16_follows_fp32(residual):
    row = Row(tp=2, pp=2, micro_batch=2, precision="bf16")
    reference = run_world(1, train_layout, Row(), STEPS)[0]
    changes = {"parallel": SEQUENCE_PARALLEL, "precision": {"fp32_residual_connection": residual}}
    ranks = run_world(4, train_layout, row, STEPS, **changes)
    assert relative_errors(ranks[0], reference)[0] <= LOW_PRECISION_BOUND


@pytest.mark.full
def test_dualpipev_with_a_sharded_sequence():
    row = Row(tp=2, pp=2, micro_batch=2)
    changes = {"parallel": {"pipeline_schedule": "dualpipev", **SEQUENCE_PARALLEL}}
    with_dualpipev = run_world(4, train_layout, row, STEPS, **changes)
    assert max(relative_errors(with_dualpipev[0], run_world(1, train_layout, Row(), STEPS)[0])) <= FP32_BOUND


def shapes_and_weights(row):
    engine = build_engine(config_of(row, parallel=SEQUENCE_PARALLEL))
    seen = {}

    def note(module, inputs, output):
        seen[module.layer_index] = tuple(output.shape)

    for function in engine.module.forward_funcs:
        if hasattr(function, "layer_index"):
            function.register_forward_hook(note)
    train(engine, range(3))
    return seen, weights_of(engine)


@pytest.mark.full
def test_between_layers_a_rank_holds_its_part_and_replicated_weights_stay_equal():
    ranks = run_world(4, shapes_and_weights, Row(tp=4, micro_batch=2))
    for seen, _ in ranks:
        assert set(seen.values()) == {(SEQ // 4, 2, 32)} and len(seen) == 4
    first = ranks[0][1]
    replicated = [name for name, spec in first.specs.items() if spec.shard_dim is None]
    assert len(replicated) > 20
    for _, weights in ranks[1:]:
        assert all(torch.equal(weights.shards[name], first.shards[name]) for name in replicated)


# --- the parts, against their plain twins ---


def linear_pair(layout_size, rank_inputs):
    """Outputs and gradients of column, then row-parallel layers on a sharded sequence, gathered."""
    import torch.distributed as dist

    from megatron.mpu.layout import ParallelLayout
    from megatron.mpu.parameters import initialize_parameters

    layout = ParallelLayout.create(dist.get_world_size(), layout_size, 1, dist.get_rank())
    tensor = layout.make_tp_group()
    is_sharded = layout_size > 1
    column = ColumnParallelLinear(6, 8, tensor, init_std=0.5, sequence_parallel=is_sharded)
    row = RowParallelLinear(8, 6, tensor, init_std=0.5, sequence_parallel=is_sharded)
    for number, layer in enumerate((column, row)):
        initialize_parameters(layer, number, tensor)
    inputs = rank_inputs.clone().requires_grad_()
    x = scatter(inputs, tensor, dim=0)
    y = gather_from_tensor_region(row(torch.tanh(column(x))), tensor, dim=0)
    (y * torch.arange(y.numel()).view_as(y)).sum().backward()
    return y.detach(), inputs.grad, column.weight.grad, row.weight.grad, row.bias.grad


def test_a_column_and_a_row_parallel_layer_on_a_sharded_sequence_equal_plain_ones():
    inputs = torch.randn(8, 3, 6, generator=torch.Generator().manual_seed(0))
    ((y, grad, column, row, bias),) = run_world(1, linear_pair, 1, inputs)
    ranks = run_world(2, linear_pair, 2, inputs)
    for parts in ranks:
        torch.testing.assert_close(parts[0], y)
        torch.testing.assert_close(parts[1], grad)
    torch.testing.assert_close(torch.cat([part[2] for part in ranks]), column)
    torch.testing.assert_close(torch.cat([part[3] for part in ranks], 1), row)
    torch.testing.assert_close(sum(part[4] for part in ranks), bias)


def embedding_pair():
    """Outputs and gradients of the embedding sharded along the sequence, and this rank's part of those of the
    replicated one."""
    import torch.distributed as dist

    from megatron.mpu.layout import ParallelLayout
    from megatron.mpu.parameters import initialize_parameters

    ranks, rank = dist.get_world_size(), dist.get_rank()
    tp_group = ParallelLayout.create(ranks, ranks, 1, rank).make_tp_group()
    tokens = torch.randint(0, 60, (3, 8), generator=torch.Generator().manual_seed(0))
    found = []
    for sharded in (True, False):
        table = VocabParallelEmbedding(
            64, 6, tp_group, num_valid_rows=60, init_std=0.5, sequence_parallel=sharded
        )
        initialize_parameters(table, 1, tp_group)
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
    from megatron.mpu.layout import ParallelLayout

    tensor = ParallelLayout.create(2, 2, 1, 0).make_tp_group()
    try:
        reduce_scatter_to_sequence_region(torch.zeros(3, 3), tensor)
    except ValueError as error:
        return str(error)


def test_a_sequence_that_cannot_be_sharded_is_refused():
    for message in run_world(2, shard_a_sequence_that_cannot_be_sharded):
        assert message == "dimension 0 of (3, 3) is not divisible by 2 ranks"
