import pytest

from megatron.config import ConfigError
from megatron.mpu.mesh import Axis, Mesh


@pytest.mark.parametrize(
    ("world_size", "tp_size", "pp_size", "cp_size"),
    [(1, 1, 1, 1), (8, 2, 2, 1), (8, 1, 4, 1), (12, 3, 2, 1), (6, 6, 1, 1), (24, 2, 2, 3), (16, 2, 1, 4)],
)
def test_coordinates_are_those_of_deepspeeds_topology(world_size, tp_size, pp_size, cp_size):
    """Its axis `data` holds the data- and context-parallel ranks."""
    for rank in range(world_size):
        mesh = Mesh.create(world_size, tp_size, pp_size, rank, cp_size)
        assert mesh.rank_at(*mesh.coordinates_of(rank)) == rank
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


def test_a_tp_group_of_one_needs_no_process_group():
    assert Mesh.create(4, 1, 2, 3).make_tp_group() == Axis("tp", rank=0, size=1, group=None)
