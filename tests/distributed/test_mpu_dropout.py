"""Dropout on real TP ranks: recomputation repeats the masks, gradients are right, and ranks agree where they
must."""

import torch
from torch.utils.checkpoint import checkpoint

from megatron.mpu.mesh import Axis
from megatron.mpu.random import DropoutRNG, dropout
from tests.support.pool import run_world
from tests.support.scatter import world_tp_group


def two_dropouts(x, stream, tp_group):
    """Returns the result of two dropouts: the activation is equal on all ranks in the first, and sharded in
    the second."""
    x = dropout(x, 0.3, stream, "0.hidden", batch_dim=0, tp_group=tp_group)
    own = x.chunk(tp_group.size, -1)[tp_group.rank]
    return dropout(own, 0.3, stream, "0.attention", batch_dim=0, shard_dim=-1, tp_group=tp_group)


def output_and_gradient(x, samples, recompute):
    return outputs_of(x, samples, world_tp_group(), recompute)


def outputs_of(x, samples, tp_group, recompute):
    x = x.clone().requires_grad_()
    stream = DropoutRNG(99)

    def layer(x):
        with stream.use_samples(samples):
            return two_dropouts(x, stream, tp_group)

    y = checkpoint(layer, x, use_reentrant=True) if recompute else layer(x)
    y.sum().backward()
    return y.detach(), x.grad


def test_ranks_drop_their_shards_of_one_tensor_also_when_recomputed():
    x = torch.rand(2, 16, 64) + 1
    unsharded, unsharded_grad = outputs_of(x, (5, 8), Axis("tp"), recompute=False)
    assert 0.4 < (unsharded != 0).float().mean() < 0.58
    for recompute in (False, True):
        results = run_world(4, output_and_gradient, x, (5, 8), recompute)
        assert torch.equal(torch.cat([y for y, _ in results], -1), unsharded)
        torch.testing.assert_close(sum(grad for _, grad in results), unsharded_grad)
