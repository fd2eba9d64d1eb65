"""--tp-comm-overlap: products in chunks that overlap with their collectives have unchanged results."""

import pytest
import torch

from megatron.mpu import layers
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.mesh import Axis
from megatron.mpu.parameters import initialize_parameters
from tests.distributed.parity import assert_same_numbers
from tests.support.layouts import STEPS, Row
from tests.support.pool import run_world

OVERLAP = {"parallel": {"sequence_parallel": True, "tp_comm_overlap": True, "tp_comm_overlap_chunks": 4}}
BATCH, WIDE, NARROW = 3, 24, 16


def through_layers(ranks, length, dtype, overlap):
    """Returns output and gradients of a column-parallel and a row-parallel layer for this rank's shard."""
    tp_group = Axis("tp", torch.distributed.get_rank(), ranks, torch.distributed.group.WORLD)
    settings = {"init_std": 0.1, "sequence_parallel": True, "overlap_chunks": 4 if overlap else 1}
    column = ColumnParallelLinear(NARROW, WIDE, tp_group, **settings)
    row = RowParallelLinear(WIDE, NARROW, tp_group, **settings)
    for seed, layer in enumerate((column, row)):
        initialize_parameters(layer, seed, [tp_group])
        layer.to(dtype)
    generator = torch.Generator().manual_seed(tp_group.rank)
    x, weights = torch.randn(2, length, BATCH, NARROW, generator=generator).to(dtype)
    x.requires_grad_()
    y = row(column(x).square())
    (y * weights).sum().backward()
    parameters = [*column.parameters(), *row.parameters()]
    return [t.detach().float() for t in (y, x.grad, *(p.grad for p in parameters))]


@pytest.mark.gate(rows=2)
@pytest.mark.parametrize(
    "ranks, length, dtype",
    [(2, 8, torch.float32), (4, 3, torch.float32), (2, 5, torch.float32), (2, 8, torch.bfloat16)],
    ids=str,
)
def test_chunks_change_results_by_rounding_only(ranks, length, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    expected = run_world(ranks, through_layers, ranks, length, dtype, False)
    for plain, found in zip(
        expected, run_world(ranks, through_layers, ranks, length, dtype, True), strict=True
    ):
        for wanted, value in zip(plain, found, strict=True):
            assert (value - wanted).norm() <= tolerance * wanted.norm()


def sum_in_order(length):
    """Returns the chunked sum over ranks and the plain sum of small integers, which are exact in every order
    of summation."""
    size = torch.distributed.get_world_size()
    tp_group = Axis("tp", torch.distributed.get_rank(), size, torch.distributed.group.WORLD)
    generator = torch.Generator().manual_seed(tp_group.rank)
    x = torch.randint(-8, 8, (size * length, 2, 4), generator=generator).float()
    factor = torch.randint(-8, 8, (4, 5), generator=torch.Generator().manual_seed(9)).float()
    total = x @ factor
    torch.distributed.all_reduce(total)
    own = total[tp_group.rank * length : (tp_group.rank + 1) * length]
    gathered = [torch.empty_like(own) for _ in range(size)]
    torch.distributed.all_gather(gathered, own.contiguous())
    full = torch.cat(gathered)
    product, rows_in_chunk_order = layers.gather_and_multiply(own, factor.t(), None, tp_group, 4)
    return (
        torch.equal(layers.multiply_and_reduce(x, factor, tp_group, 4), own),
        torch.equal(product, full @ factor.t()),
        torch.equal(
            rows_in_chunk_order.flatten(0, 2),
            layers.rows_in_chunk_order(full, len(rows_in_chunk_order), tp_group),
        ),
    )


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("length", [6, 4, 7])
def test_every_element_is_at_its_place(length):
    assert run_world(2, sum_in_order, length) == [(True, True, True)] * 2


def test_the_number_of_chunks_divides_the_shard():
    assert [layers.number_of_chunks(n, 4) for n in (1, 2, 3, 6, 7, 1024)] == [1, 2, 3, 3, 1, 4]


@pytest.mark.full
@pytest.mark.parametrize(
    "row",
    [
        Row(tp=2, micro_batch=2),
        Row(tp=2, pp=2, dp=2, zero=1, recompute=True, positions="alibi"),
        Row(tp=2, dp=2, zero=3, micro_batch=2),
        Row(tp=4, micro_batch=2, positions="rotary"),
    ],
    ids=str,
)
def test_training_in_chunks_has_the_losses_of_one_process(row):
    assert_same_numbers(row, STEPS, layout=OVERLAP)
