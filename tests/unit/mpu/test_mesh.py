import pytest
import torch.distributed as dist

from megatron.config import ConfigError
from megatron.mpu.mesh import EXPERT, ONE_RANK, Axis, Mesh
from megatron.mpu.parameter_spec import ParameterSpec, Shard
from tests.support.pool import run_world
from tests.support.simulation.matching import rank_at


@pytest.mark.parametrize(
    ("world_size", "tp_size", "pp_size", "cp_size"),
    [(1, 1, 1, 1), (8, 2, 2, 1), (8, 1, 4, 1), (12, 3, 2, 1), (6, 6, 1, 1), (24, 2, 2, 3), (16, 2, 1, 4)],
)
def test_coordinates_are_those_of_deepspeeds_topology(world_size, tp_size, pp_size, cp_size):
    """The topology's axis `data` contains the data-parallel and context-parallel ranks."""
    for rank in range(world_size):
        mesh = Mesh.create(world_size, tp_size, pp_size, rank, cp_size)
        assert rank_at(mesh, mesh.coordinates_of(rank)) == rank
        assert divmod(mesh.dp_cp.rank, cp_size) == (mesh.dp.rank, mesh.cp.rank)
        coordinate = mesh.topology.get_coord(rank)
        assert (mesh.pp.rank, mesh.dp_cp.rank, mesh.tp.rank) == (
            coordinate.pipe,
            coordinate.data,
            coordinate.model,
        )
        assert mesh.world_size == mesh.topology.world_size() == world_size


def test_processes_that_cannot_be_divided_are_refused_with_numbers_and_flags():
    with pytest.raises(ConfigError) as error:
        Mesh.create(10, tp_size=4, pp_size=2)
    for part in ("10", "8", "--tensor-model-parallel-size (4)", "--pipeline-model-parallel-size (2)"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ((4, 0, 1), "--tensor-model-parallel-size"),
        ((4, 1, -1), "--pipeline-model-parallel-size"),
        ((0, 1, 1), "--world-size"),
        ((4, 1, 1, 4), "RANK"),
    ],
)
def test_impossible_degrees_are_refused(arguments, flag):
    with pytest.raises(ConfigError, match=flag):
        Mesh.create(*arguments)


@pytest.mark.parametrize("sizes", [(2, 2, 3, 2, 4), (1, 2, 4, 1, 2), (2, 1, 2, 2, 8), (4, 1, 2, 1, 4)])
def test_both_views_number_the_ranks_of_a_stage(sizes):
    """Experts are sharded over consecutive ranks of a stage, over tp first, then cp, then dp."""
    tp, pp, dp, cp, ep = sizes
    for rank in range(tp * pp * dp * cp):
        mesh = Mesh(tp, pp, dp, rank, cp, ep)
        pipeline, edp, expert = mesh.coordinates_of(rank, EXPERT).values()
        assert rank_at(mesh, {"pp": pipeline, "edp": edp, "ep": expert}, EXPERT) == rank
        stage = ((mesh.dp.rank * cp) + mesh.cp.rank) * tp + mesh.tp.rank
        assert (pipeline, edp * ep + expert) == (mesh.pp.rank, stage)
        assert (mesh.axis("ep").size, mesh.axis("edp").size) == (ep, tp * dp * cp // ep)
        for names in (("tp",), ("cp",), ("dp", "cp"), ("pp", "tp"), STAGE, ("ep",), ("edp",)):
            ranks = mesh.ranks_along(names, rank)
            assert ranks[mesh.axis(*names).rank] == rank and len(ranks) == mesh.axis(*names).size
            assert all(mesh.ranks_along(names, other) == ranks for other in ranks)
    with pytest.raises(ValueError, match="6 ranks are not divisible into groups of 4"):
        Mesh(2, 1, 3, ep_size=4).axis("ep")


DENSE_SPECS = {
    "sharded over tp": ParameterSpec((8, 8), (Shard(0),)),
    "replicated": ParameterSpec((8,)),
    "sharded over cp": ParameterSpec((8, 8), (Shard(0, "cp"),)),
    "sharded over two axes": ParameterSpec((8, 8), (Shard(0, "cp"), Shard(1))),
    "expert": ParameterSpec((8, 4, 4), (Shard(0, "ep"),)),
}
REDUCED = ["dp_cp", "dp_cp", "dp", "dp", "edp"]


@pytest.mark.parametrize(("name", "reduced"), zip(DENSE_SPECS, REDUCED, strict=True))
def test_what_follows_from_a_sharding(name, reduced):
    """The parts over which a gradient is reduced, the shards and the replicas together are all ranks of the
    stage. With ZeRO and without it, exactly one rank counts each element in the norm."""
    spec, meshes = DENSE_SPECS[name], [Mesh(2, 1, 2, rank, 2, 4) for rank in range(8)]
    assert {mesh.reduced_over(spec).name for mesh in meshes} == {reduced}
    for is_partitioned in (True, False):
        holders = {}
        for mesh in meshes:
            part = mesh.reduced_over(spec).rank if is_partitioned else 0
            shard = (part, *(axis.rank for axis in mesh.axes_of(spec)))
            holders.setdefault(shard, []).append(mesh)
        for held in holders.values():
            assert len({mesh.replica_of(spec, is_partitioned) for mesh in held}) == len(held)
            assert sum(mesh.counts(spec, is_partitioned) for mesh in held) == 1
        num_shards = len(spec.all_shards(meshes[0].axes))
        assert len(holders) == num_shards * (meshes[0].reduced_over(spec).size if is_partitioned else 1)


STAGE = ("dp", "cp", "tp")


def groups_of(sizes):
    mesh = Mesh(*sizes[:3], dist.get_rank(), *sizes[3:]).connect()
    found = {}
    for names in (("tp",), ("cp",), ("dp", "cp"), ("pp",), ("pp", "tp"), STAGE, ("ep",), ("edp",)):
        axis = mesh.axis(*names)
        if axis.size > 1:
            assert dist.get_process_group_ranks(axis.group) == list(mesh.ranks_along(names, mesh.rank))
            assert dist.get_rank(axis.group) == axis.rank
            found[names] = id(axis.group)
    return len(found), len(set(found.values()))


@pytest.mark.parametrize(
    ("sizes", "kinds", "groups"),
    [
        ((1, 1, 4), 3, 1),  # dp_cp, stage and edp are one set
        ((2, 1, 2, 1, 2), 6, 3),  # tp, pp_tp and ep; dp_cp and edp; stage
        ((2, 2, 1), 5, 3),  # tp, stage and edp; pp; pp_tp
    ],
)
def test_equal_sets_of_ranks_share_a_process_group(sizes, kinds, groups):
    assert set(run_world(4, groups_of, sizes)) == {(kinds, groups)}


def test_a_single_process_needs_no_process_group():
    assert ONE_RANK.connect().tp == Axis("tp") and ONE_RANK.tp.group is None
