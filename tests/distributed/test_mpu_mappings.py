import pytest
import torch
import torch.distributed as dist

from megatron.mpu.mappings import gather_from_rank_block, gather_from_tensor_region
from megatron.mpu.mesh import Axis, Mesh
from tests.support.pool import run_world
from tests.support.scatter import world_tp_group


def tensor_group_of_layout(tp_group, pipeline):
    group = Mesh.create(dist.get_world_size(), tp_group, pipeline, dist.get_rank()).connect().tp
    members = torch.tensor([dist.get_rank()])
    dist.all_reduce(members, group=group.group)
    return group.rank, group.size, dist.get_process_group_ranks(group.group), members.item()


def gathered(xs, upstreams, block=None):
    """Returns outputs and gradients, and whether the mapping left its input and its upstream gradient
    unchanged."""
    tp_group = world_tp_group()
    x, upstream = xs[tp_group.rank].clone().requires_grad_(), upstreams[tp_group.rank].clone()
    y = gather_from_rank_block(x, tp_group, block) if block else gather_from_tensor_region(x, tp_group)
    y.backward(upstream)
    untouched = torch.equal(x, xs[tp_group.rank]) and torch.equal(upstream, upstreams[tp_group.rank])
    return y.detach(), x.grad, untouched


def parts(*shape, size, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(size)]


@pytest.mark.parametrize(("tp_group", "pipeline"), [(2, 2), (4, 2), (2, 1)])
def test_tensor_groups_are_neighbouring_ranks(tp_group, pipeline):
    for rank, (place, size, members, total) in enumerate(
        run_world(8, tensor_group_of_layout, tp_group, pipeline)
    ):
        first = rank - rank % tp_group
        assert (place, size, members) == (rank % tp_group, tp_group, list(range(first, first + tp_group)))
        assert total == sum(members)


def test_in_a_group_of_one_the_argument_itself_comes_back():
    x = torch.randn(3, 4)
    assert gather_from_tensor_region(x, Axis("tp")) is x


@pytest.mark.parametrize("size", [2, 4])
def test_gather_joins_the_parts_and_returns_each_its_gradient(size):
    xs, upstreams = parts(3, 2, size=size, seed=1), parts(3, 2 * size, size=1, seed=2) * size
    for rank, (output, grad, untouched) in enumerate(run_world(size, gathered, xs, upstreams)):
        assert torch.equal(output, torch.cat(xs, -1)) and untouched
        assert torch.equal(grad, upstreams[0].chunk(size, -1)[rank])


@pytest.mark.parametrize("block", [2, 4])
def test_a_block_of_ranks_gathers_its_parts_and_sums_their_gradients(block):
    xs, upstreams = parts(3, 2, 5, size=4, seed=1), parts(3, 2, 5 * block, size=4, seed=2)
    for rank, (y, grad, untouched) in enumerate(run_world(4, gathered, xs, upstreams, block)):
        first = rank // block * block
        ranks = range(first, first + block)
        assert torch.equal(y, torch.cat([xs[other] for other in ranks], dim=-1)) and untouched
        own = slice((rank - first) * 5, (rank - first + 1) * 5)
        torch.testing.assert_close(grad, sum(upstreams[other][..., own] for other in ranks))
