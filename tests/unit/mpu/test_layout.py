import pytest

from megatron.config import ConfigError
from megatron.mpu.layout import ParallelLayout, TPGroup


@pytest.mark.parametrize(
    ("world_size", "tp_size", "pp_size", "cp_size"),
    [(1, 1, 1, 1), (8, 2, 2, 1), (8, 1, 4, 1), (12, 3, 2, 1), (6, 6, 1, 1), (24, 2, 2, 3), (16, 2, 1, 4)],
)
def test_coordinates_are_those_of_deepspeeds_topology(world_size, tp_size, pp_size, cp_size):
    """Its axis `data` holds the data- and context-parallel ranks."""
    for rank in range(world_size):
        layout = ParallelLayout.create(world_size, tp_size, pp_size, rank, cp_size)
        assert layout.rank_at(*layout.coordinates_of(rank)) == rank
        assert divmod(layout.dp_cp_rank, cp_size) == (layout.dp_rank, layout.cp_rank)
        coordinate = layout.topology.get_coord(rank)
        assert (layout.pipeline_stage, layout.dp_cp_rank, layout.tp_rank) == (
            coordinate.pipe,
            coordinate.data,
            coordinate.model,
        )
        assert layout.world_size == layout.topology.world_size() == world_size


def test_processes_that_cannot_be_divided_are_refused_with_numbers_and_flags():
    with pytest.raises(ConfigError) as error:
        ParallelLayout.create(10, tp_size=4, pp_size=2)
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
        ParallelLayout.create(*arguments)


def test_a_tp_group_of_one_needs_no_process_group():
    assert ParallelLayout.create(4, 1, 2, 3).make_tp_group() == TPGroup(rank=0, size=1, group=None)
