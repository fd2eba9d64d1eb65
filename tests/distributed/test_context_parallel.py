"""Context parallelism trains to the losses of one process with every schedule, mask and ZeRO stage."""

from dataclasses import replace

import pytest
import torch

from megatron.mpu.context_parallel import gather_keys_and_values, sequence_chunks, tensor_shard
from megatron.mpu.mesh import Axis, Mesh
from tests.distributed.parity import (
    DUALPIPEV,
    INTERLEAVED,
    SEQUENCE_PARALLEL,
    SHORT,
    ZERO_BUBBLE,
    merged,
    one_process,
)
from tests.distributed.resharding import STEPS_BEFORE, resume_midway, save_before, uninterrupted
from tests.support.checkpoints import state_after
from tests.support.golden import BOUND as GOLDEN_BOUND
from tests.support.golden import GOLDEN_ROWS, committed
from tests.support.layouts import DROPOUT, STEPS, Row, relative_errors, train_layout
from tests.support.pool import run_world

BOUND = 1e-6
GROUPED = {"model": {"group_query_attention": True, "num_query_groups": 2}}
DOCUMENTS = {"data": {"reset_attention_mask": True, "reset_position_ids": True}}
WINDOW = {"model": {"window_size": 7}}
DROPPED = {"model": DROPOUT}
PLAIN = {"training": {"loss_implementation": "plain"}}
PARTITIONED = {"training": {"checkpoint_activations": True, "partition_activations": True}}


def row(*numbers, layout=None, full=True, **settings):
    marks = [pytest.mark.full] if full else []
    return pytest.param(Row(**settings), merged(*numbers), layout or {}, marks=marks)


ROWS = [
    row(DOCUMENTS, DROPPED, GROUPED, cp=2, pp=2, zero=1, micro_batch=2, positions="rotary", full=False),
    row(cp=2, dp=2, zero=3, micro_batch=2, positions="alibi", recompute=True, full=False),
    row(DOCUMENTS, DROPPED, GROUPED, cp=2, tp=2, positions="rotary", layout=SEQUENCE_PARALLEL),
    row(cp=4, positions="rotary"),
    row(WINDOW, cp=4, zero=2),
    row(PLAIN, cp=4, zero=1, dp=2),
    row(DROPPED, DOCUMENTS, cp=2, tp=2, pp=2, positions="alibi"),
    row(GROUPED, cp=2, pp=2, dp=2, zero=1, positions="rotary", layout=INTERLEAVED),
    row(DROPPED, WINDOW, cp=4, pp=2, recompute=True, layout=ZERO_BUBBLE),
    row(cp=2, tp=2, recompute=True, layout=PARTITIONED),
    row(cp=2, pp=2, tp=2, layout=merged(DUALPIPEV, SEQUENCE_PARALLEL)),
]


@pytest.mark.parametrize("row,numbers,layout", ROWS)
def test_context_parallelism_has_the_numbers_of_one_process(row, numbers, layout):
    steps = STEPS if row.world_size == 8 else SHORT
    expected = one_process(row, steps, **numbers)
    for history in run_world(row.world_size, train_layout, row, steps, **merged(numbers, layout)):
        errors = relative_errors(history, expected)
        assert max(errors) <= BOUND, errors


GOLDEN = {
    "absolute on one process": {"cp": 4},
    "rotary with a gated MLP, TP 2": {"cp": 2},
    "alibi with a norm after the embedding, PP 2 x DP 2, ZeRO 1": {"cp": 2, "dp": 1},
    "dropout with recomputation, PP 2": {"cp": 2},
}


@pytest.mark.full
@pytest.mark.parametrize("name", GOLDEN)
def test_the_golden_losses_are_those_of_context_parallel_ranks(name):
    golden, changes = GOLDEN_ROWS[name]
    row = replace(golden, **GOLDEN[name])
    expected = [tuple(step) for step in committed()[name]]
    assert len(expected) == STEPS == 20
    for history in run_world(row.world_size, train_layout, row, **changes):
        assert max(relative_errors(history, expected)) <= GOLDEN_BOUND


@pytest.mark.full
@pytest.mark.parametrize("before, after", [({"cp": 2}, {"pp": 2}), ({"pp": 2}, {"cp": 2, "zero": 1})])
def test_a_run_resumes_with_another_context_parallel_size(before, after, tmp_path):
    changes = {"model": {"hidden_dropout": 0.1}}
    expected = uninterrupted(changes)
    saver, resumer = Row(**before, micro_batch=2), Row(**after, micro_batch=2)
    run_world(saver.world_size, save_before, saver, tmp_path, changes)
    for state, history in run_world(resumer.world_size, resume_midway, resumer, tmp_path, changes):
        assert state == state_after(STEPS_BEFORE)
        assert max(relative_errors(history, expected)) <= BOUND


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_chunks_of_the_ranks_are_the_sequence_and_equal_causal_work(size):
    seq = 2 * size * 128
    groups = [Axis("cp", rank, size) for rank in range(size)]
    positions = [[p for chunk in sequence_chunks(group, seq) for p in chunk] for group in groups]
    assert sorted(sum(positions, [])) == list(range(seq))
    work = [sum(position + 1 for position in own) for own in positions]
    assert max(work) <= 1.02 * sum(work) / size
    for group, own in zip(groups, positions, strict=True):
        shards = [tensor_shard(sequence_chunks(group, seq), Axis("tp", rank, 4)) for rank in range(4)]
        assert [p for shard in shards for part in shard for p in part] == own
    with pytest.raises(ValueError, match="not divisible"):
        sequence_chunks(groups[0], seq + size)


def gathered_attention(seq, cp_size, dtype):
    """Returns this rank's outputs, gradients and positions."""
    mesh = Mesh.create(cp_size, 1, 1, torch.distributed.get_rank(), cp_size=cp_size).connect()
    group = mesh.cp
    own = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in sequence_chunks(group, seq)])
    key, value = (x[own].requires_grad_() for x in keys_and_values(seq, dtype))
    whole = gather_keys_and_values(key, value, group)
    weights = keys_and_values(seq, dtype)
    factor = mesh.cp.rank + 1
    sum(factor * (x * weight).sum() for x, weight in zip(whole, weights, strict=True)).backward()
    return own, [x.detach() for x in whole], key.grad, value.grad


def keys_and_values(seq, dtype):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(seq, 2, 3, generator=generator).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("cp_size, dtype", [(2, torch.float32), (4, torch.bfloat16)])
def test_gathered_keys_have_the_order_of_the_sequence_and_gradients_are_summed_in_fp32(cp_size, dtype):
    expected = keys_and_values(16, dtype)
    for own, whole, *gradients in run_world(cp_size, gathered_attention, 16, cp_size, dtype):
        for found, gradient, values in zip(whole, gradients, expected, strict=True):
            assert torch.equal(found, values)
            total = sum(((rank + 1) * values[own]).float() for rank in range(cp_size))
            torch.testing.assert_close(gradient, total.to(dtype), rtol=1e-6, atol=0)
