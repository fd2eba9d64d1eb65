"""Replicas of a parameter (tied, on DP ranks, on TP ranks) stay equal to the last bit, for any number of
replicas and any order in which a process group sums."""

import random
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.data.loader import MicroBatch
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec, Shard
from megatron.mpu.parameters import new_parameter
from megatron.optimizer.flat_group import FlatGroup
from megatron.optimizer.gradient_reduction import GradientReduction
from megatron.training.stability import find_invariant_violation
from tests.distributed.parity import EIGHT_BIT, SEQUENCE_PARALLEL
from tests.support.layouts import RATE, Row, build_engine, config_of, sample_tokens
from tests.support.pool import run_world

# The embedding is more than half of a stage: 4096 rows of 32, beside at most three layers of 12 * 32 * 32.
LARGE_VOCABULARY = {"make_vocab_size_divisible_by": 4096}
UNEQUAL = {"num_layers": 3}
CLIPPED = {"clip_grad": 0.01}


class Finished:
    """A collective that is complete."""

    def wait(self):
        """Returns at once."""


def shuffled_sum(tensor, group):
    """Sums over a group, in an order that depends on the group's ranks and on the tensor's length."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    random.Random(f"{dist.get_process_group_ranks(group)} {tensor.numel()}").shuffle(parts)
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


def sums_in_another_order():
    """Patches all-reduce with the weakest guarantee of a backend: all members of a group receive the same
    bits."""
    all_reduce = dist.all_reduce

    def any_all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        size = dist.get_world_size(group)
        if op != dist.ReduceOp.SUM or not tensor.is_floating_point() or size < 3:
            return all_reduce(tensor, op=op, group=group, async_op=async_op)
        tensor.copy_(shuffled_sum(tensor, group))
        return Finished() if async_op else None

    return mock.patch.object(dist, "all_reduce", any_all_reduce)


def copies_after(row, changes, steps, other_order):
    """Returns the violation that `find_invariant_violation` finds after some steps, or None. It compares
    digests of all replicas of weights, fp32 values and moments."""
    batch_size = 2 * row.dp * row.micro_batch
    model = {"num_layers": 2, **LARGE_VOCABULARY, **changes.get("model", {})}
    batch = {"global_batch_size": batch_size}
    engine = build_engine(config_of(row, **{**changes, "model": model, "batch": batch}))

    def micro_batches(step):
        size, dp_rank = row.micro_batch, engine.mesh.dp.rank
        start = step * batch_size
        for first in range(start + dp_rank * size, start + batch_size, row.dp * size):
            yield MicroBatch.from_rows(sample_tokens(first, size), first)

    with sums_in_another_order() if other_order else nullcontext():
        for step in range(steps):
            engine.train_step(micro_batches(step), batch_size, RATE)
        return find_invariant_violation(engine.optimizer, engine.mesh)


BUCKETS = {"parallel": {"ddp_bucket_size": 1}, "model": {"num_layers": 4}}
# Name -> (layout, changes of its configuration, whether the backend sums in a shuffled order).
REPRESENTATIVE = {
    "three replicas, partitions of odd lengths": (Row(pp=2, dp=3, zero=1), {"model": UNEQUAL}, False),
    "four replicas, any order": (Row(pp=2, dp=4), {}, True),
    "buckets of one layer, any order": (Row(pp=2, dp=3, zero=1), BUCKETS, True),
    "TP ranks, any order": (Row(tp=2, dp=3, zero=1, positions="rotary"), SEQUENCE_PARALLEL, True),
    "16 bits": (
        Row(tp=2, pp=2, dp=2, zero=1, precision="fp16"),
        {"model": {"embed_layernorm": True}},
        False,
    ),
}


@pytest.mark.parametrize("case", REPRESENTATIVE)
def test_tied_copies_and_replicas_stay_equal(case):
    row, changes, other_order = REPRESENTATIVE[case]
    assert set(run_world(row.world_size, copies_after, row, changes, 3, other_order)) == {None}


def every_case():
    for dp in (3, 4):
        for positions in ("absolute", "rotary", "alibi"):
            for layers in (2, 3):
                for zero in (0, 1):
                    row = Row(pp=2, dp=dp, zero=zero, positions=positions)
                    yield row, {"model": {"num_layers": layers}}, dp == 4 or zero == 0
    for row in (Row(tp=2, dp=4), Row(tp=4, dp=2), Row(tp=4, pp=2), Row(tp=2, pp=2, dp=2, zero=1)):
        for options in ({}, SEQUENCE_PARALLEL):
            # Clipping by a norm that each replica sums in its own order would also make replicas differ.
            yield row, {**options, "optimizer": CLIPPED, "model": {"embed_layernorm": True}}, True
    for row in (Row(tp=2, dp=4, zero=1), Row(tp=2, pp=2, dp=2, zero=1), Row(dp=4, zero=1)):
        yield row, {**BUCKETS, "parallel": {"ddp_bucket_size": 1, "sequence_parallel": row.tp > 1}}, True
    for stage in (2, 3):
        yield Row(tp=2, dp=4, zero=stage), SEQUENCE_PARALLEL, True
    for precision in ("bf16", "fp16"):
        yield Row(pp=2, dp=3, zero=1, precision=precision), {"model": {"hidden_dropout": 0.1}}, True
        for zero in (0, 1):
            yield Row(tp=2, pp=2, dp=2, zero=zero, precision=precision), {}, False
    yield Row(pp=2, dp=4, zero=1), {"optimizer": {"optimizer": "sgd"}}, True
    for zero in (0, 1):
        yield Row(tp=2, pp=2, dp=2, zero=zero), EIGHT_BIT, False


@pytest.mark.full
@pytest.mark.parametrize("case", every_case(), ids=str)
def test_tied_copies_and_replicas_stay_equal_on_every_layout(case):
    row, changes, other_order = case
    assert set(run_world(row.world_size, copies_after, row, changes, 10, other_order)) == {None}


def gradients_after_reduction(values):
    """Returns the reduced gradients of a parameter that both TP ranks replicate, and of a parameter that they
    shard."""
    rank = dist.get_rank()
    tp_group = Axis("tp", rank, 2, dist.group.WORLD)
    replicated = new_parameter(ParameterSpec((2,)), tp_group)
    part = new_parameter(ParameterSpec((4,), sharding=(Shard(0),)), tp_group)
    flat = FlatGroup({"params": [replicated, part]}, Axis("dp_cp"), False)
    replicated.main_grad.copy_(torch.tensor(values[rank]))
    part.main_grad.fill_(rank + 1.0)
    GradientReduction([flat], [], tp_group).run()
    return replicated.main_grad.tolist(), part.main_grad.tolist()


def test_tensor_ranks_take_the_gradient_of_the_first_of_them():
    values = [[0.1, 3e38], [0.1000001, -3e38]]
    first, second = run_world(2, gradients_after_reduction, values)
    assert first[0] == second[0] == torch.tensor(values[0]).tolist()
    assert (first[1], second[1]) == ([1.0, 1.0], [2.0, 2.0])


def test_a_gradient_that_only_a_later_tensor_rank_finds_bad_is_bad_on_all():
    for replicated, _ in run_world(2, gradients_after_reduction, [[0.5, 0.5], [0.5, float("inf")]]):
        assert replicated[0] == 0.5 and replicated[1] != replicated[1]


def three_holders():
    parameter = new_parameter(ParameterSpec((2,)))
    with pytest.raises(ValueError, match="on 3 stages: expected 2"):
        GradientReduction(
            [FlatGroup({"params": [parameter]}, Axis("dp_cp"), False)],
            [(parameter, dist.group.WORLD)],
            Axis("tp"),
        )


def test_a_weight_on_three_stages_is_refused():
    run_world(3, three_holders)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_an_optimizer_step_does_not_depend_on_the_place_in_the_buffer(kind):
    """PyTorch's fused kernels compute the last elements of a buffer differently from the rest. Padding at the
    end of each partition keeps parameters away from it."""
    generator = torch.Generator().manual_seed(1)
    values, factors = torch.randn(101, generator=generator), torch.randn(10, 101, generator=generator)

    def stepped(parameters_before):
        others = [new_parameter(ParameterSpec((size,))) for size in parameters_before]
        own = new_parameter(ParameterSpec((101,)))
        own.data.copy_(values)
        flat = FlatGroup({"params": [*others, own]}, Axis("dp_cp"), False)
        optimizer = {
            "adam": lambda: torch.optim.AdamW([flat.master], lr=1e-3, fused=True),
            "sgd": lambda: torch.optim.SGD([flat.master], lr=1e-3, momentum=0.9, fused=True),
        }[kind]()
        for factor in factors:
            own.main_grad.copy_(factor)
            flat.set_master_grad(1.0)
            optimizer.step()
        moments = [v for v in optimizer.state[flat.master].values() if v.dim()]
        start, length = flat.fragment(own)
        return [own.detach().clone(), *(moment[start : start + length] for moment in moments)]

    for sizes in ((3,), (64,), (11, 6)):
        for other, alone in zip(stepped(sizes), stepped(()), strict=True):
            assert torch.equal(other, alone)
