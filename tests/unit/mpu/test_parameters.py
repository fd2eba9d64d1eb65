import math

import numpy as np
import pytest
import torch
from torch import nn

from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.parameter_spec import ParameterSpec, Shard, boxes
from megatron.mpu.parameters import (
    initial_values,
    initialize_parameters,
    is_norm_owner,
    merge_shards,
    new_parameter,
    own_storage,
    reshard,
    spec_of,
)
from megatron.mpu.parameters import shard_of as product_shard_of
from tests.reference.shards import shard_of

ONE = (Axis("tp"),)
SPECS = [
    ParameterSpec((256, 40), sharding=(Shard(0),), init_std=0.02),
    ParameterSpec((200, 24), sharding=(Shard(0),), init_std=0.02),  # shards end within a stream of 64 rows
    ParameterSpec((24, 200), sharding=(Shard(1),), init_std=0.5),
    ParameterSpec(
        (1300, 136), sharding=(Shard(1),), init_std=0.5
    ),  # streams of 256 rows; shards end within one
    ParameterSpec((400, 24), sharding=(Shard(0, parts=2),), init_std=0.02),
    ParameterSpec((24, 400), sharding=(Shard(1, parts=2),), init_std=0.02),
    ParameterSpec((256, 40), sharding=(Shard(0),), init_std=0.02, num_valid_rows=131),
    ParameterSpec((400,), sharding=(Shard(0, parts=2),), init_std=1.0),
    ParameterSpec((96, 40), init_std=0.02),
    ParameterSpec((96,), init_value=1.0),
]


def ranks(size):
    return [(Axis("tp", rank, size),) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_tensor_degree_starts_from_the_same_full_parameter(spec, size):
    full = initial_values(spec, 1234, "3.mlp.weight", ONE)
    assert full.shape == spec.global_shape
    shards = [initial_values(spec, 1234, "3.mlp.weight", axes) for axes in ranks(size)]
    for axes, shard in zip(ranks(size), shards, strict=True):
        assert torch.equal(shard, shard_of(spec, full, axes))
        assert torch.equal(shard, product_shard_of(full, spec, axes))
    assert torch.equal(merge_shards(spec, shards), full)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_rank_can_make_only_some_elements_of_its_shard(spec, monkeypatch):
    """With ZeRO-3 a rank makes only the elements that it owns. It draws the values of these elements and, at
    both ends, the rest of random streams, which have 64 rows, or 256 rows of some columns."""
    axes = ranks(2)[1]
    drawn = []

    class CountingGenerator(np.random.Generator):
        def standard_normal(self, *, out, dtype):
            drawn.append(out.size)
            return super().standard_normal(out=out, dtype=dtype)

    monkeypatch.setattr(np.random, "Generator", CountingGenerator)
    full = initial_values(spec, 1234, "3.mlp.weight", axes).view(-1)
    of_all, rows = sum(drawn), spec.local_shape(axes)[0]
    of_end = (
        min(256, rows) * (of_all // rows)
        if spec.sharding and spec.sharding[0].dim
        else 64 * math.prod(spec.global_shape[1:])
    )
    drawn.clear()
    step = -(-full.numel() // 3)
    for first in range(0, full.numel(), step):
        part = range(first, min(first + step, full.numel()))
        own = initial_values(spec, 1234, "3.mlp.weight", axes, part).view(-1)
        assert torch.equal(own[part.start : part.stop], full[part.start : part.stop])
    assert sum(drawn) <= of_all + 2 * of_end


def test_each_fused_part_is_sharded_separately():
    spec = ParameterSpec((8, 1), sharding=(Shard(0, parts=2),))
    full = torch.arange(8.0).unsqueeze(1)
    shards = [shard_of(spec, full, axes).flatten().tolist() for axes in ranks(2)]
    assert shards == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert spec.segments(ranks(2)[1]) == [[range(2, 4), range(6, 8)], [range(1)]]


@pytest.mark.parametrize("shard_dim", [0, 1])
def test_values_have_the_wanted_distribution(shard_dim):
    spec = ParameterSpec((512, 512), sharding=(Shard(shard_dim),), init_std=0.02)
    values = initial_values(spec, 1, "weight", ONE) / 0.02
    count = values.numel()
    assert abs(values.mean()) < 5 / count**0.5
    assert abs(values.std() - 1) < 5 / (2 * count) ** 0.5
    assert abs((values.abs() < 0.6745).float().mean() - 0.5) < 5 * 0.5 / count**0.5
    # No two rows are correlated, in particular not the rows of neighboring streams.
    correlation = torch.corrcoef(values)
    assert (correlation - torch.eye(512)).abs().max() < 6 / 512**0.5


def test_seed_and_name_matter_and_nothing_else_does():
    spec = SPECS[0]
    values = initial_values(spec, 1, "a", ONE)
    assert torch.equal(values, initial_values(spec, 1, "a", ONE))
    assert not torch.equal(values, initial_values(spec, 2, "a", ONE))
    assert not torch.equal(values, initial_values(spec, 1, "b", ONE))


def test_the_padding_of_the_vocabulary_holds_zeros_and_changes_no_other_row():
    small = initial_values(
        ParameterSpec((160, 24), (Shard(0),), init_std=1.0, num_valid_rows=131), 1, "embedding", ONE
    )
    large = initial_values(
        ParameterSpec((512, 24), (Shard(0),), init_std=1.0, num_valid_rows=131), 1, "embedding", ONE
    )
    assert torch.equal(small[:131], large[:131])
    assert small[:131].abs().min() > 0
    assert small[131:].abs().max() == 0 and large[131:].abs().max() == 0


def test_a_module_is_filled_by_dotted_names_and_rounded_to_its_type():
    spec = ParameterSpec((64, 8), sharding=(Shard(0),), init_std=1.0)
    module = nn.Module()
    module.add_module("3", nn.Module())
    module.get_submodule("3").register_parameter("weight", new_parameter(spec, dtype=torch.bfloat16))
    initialize_parameters(module, 7, ONE)
    expected = initial_values(spec, 7, "3.weight", ONE).bfloat16()
    assert torch.equal(module.get_parameter("3.weight"), expected)


def test_a_parameter_knows_its_spec_and_is_marked_for_deepspeed():
    sharded = new_parameter(SPECS[0], Axis("tp", rank=1, size=4))
    assert (
        sharded.shape == (64, 40) and spec_of(sharded) is SPECS[0] and sharded.tensor_model_parallel is True
    )
    replicated = new_parameter(SPECS[-1], Axis("tp", rank=1, size=4))
    assert replicated.shape == (96,) and not hasattr(replicated, "tensor_model_parallel")
    with pytest.raises(ValueError, match="no ParameterSpec"):
        spec_of(nn.Parameter(torch.zeros(3)))


def test_each_parameter_is_counted_once():
    sharded, replicated, tied = (new_parameter(spec) for spec in (SPECS[0], SPECS[-1], SPECS[0]))
    tied.ds_pipe_replicated = True
    meshes = [Mesh(2, 1, 1, rank) for rank in range(2)]
    owners = [[is_norm_owner(p, mesh) for p in (sharded, replicated, tied)] for mesh in meshes]
    assert owners == [[True, True, False], [True, False, False]]


def test_a_dimension_that_cannot_be_sharded_evenly_is_refused():
    with pytest.raises(ValueError, match="cannot be sharded"):
        new_parameter(ParameterSpec((12, 4), sharding=(Shard(0, parts=2),)), Axis("tp", rank=0, size=4))
    with pytest.raises(ValueError, match="num_valid_rows"):
        initial_values(ParameterSpec((12, 4), sharding=(Shard(1),), num_valid_rows=3), 1, "a", ONE)


@pytest.mark.parametrize("shape", [(6, 4), (2, 8)])
def test_shards_of_different_shapes_are_refused(shape):
    spec = ParameterSpec((8, 4), (Shard(0),))
    with pytest.raises(ValueError, match="shards of different shapes"):
        merge_shards(spec, [torch.zeros(4, 4), torch.zeros(shape)])


@pytest.mark.parametrize(
    "sharding",
    [
        (Shard(0, "tpp"),),
        (Shard(0, "pp"),),
        (Shard(0, "ep"), Shard(1)),
        (Shard(0), Shard(1)),
        (Shard(0), Shard(0, "cp")),
    ],
)
def test_a_sharding_that_no_mesh_has_is_refused(sharding):
    with pytest.raises(ValueError, match="cannot be sharded as"):
        ParameterSpec((8, 8), sharding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_a_buffer_has_a_storage_of_its_own_without_a_copy(dtype):
    flat = torch.arange(1000.0).to(dtype)
    part = own_storage(nn.Parameter(flat[10:30].view(4, 5)))
    assert part.untyped_storage().nbytes() == part.nbytes and part.data_ptr() == flat[10:].data_ptr()
    assert torch.equal(part, flat[10:30].view(4, 5)) and not part.requires_grad
    flat.untyped_storage().resize_(flat.nbytes)  # ZeRO-3 frees gathered weights by resizing
    assert own_storage(torch.full((100_000,), 7.0)).sum() == 700_000  # the tensor keeps its own memory


BOX_SPECS = [
    ParameterSpec((5,)),
    ParameterSpec((12, 7), sharding=(Shard(0),), num_valid_rows=7),
    ParameterSpec((12, 5), sharding=(Shard(0, parts=2),)),
    ParameterSpec((5, 12), sharding=(Shard(1),)),
    ParameterSpec((3, 8, 2), sharding=(Shard(1, parts=2),)),
    ParameterSpec((2, 3, 4), sharding=(Shard(2),)),
    ParameterSpec((4, 8, 3), sharding=(Shard(0, "cp"), Shard(1, parts=2))),
    ParameterSpec((4, 3, 2), sharding=(Shard(0, "ep"),)),
    ParameterSpec((4, 6, 2), sharding=(Shard(2, "cp"), Shard(0, parts=2))),
]


@pytest.mark.parametrize("spec", BOX_SPECS, ids=lambda spec: str(spec.global_shape))
def test_the_boxes_of_every_range_of_a_shard_are_its_elements(spec: ParameterSpec) -> None:
    """Each box has consecutive elements of the shard. Together the boxes are the range without the
    padding."""
    full = torch.arange(math.prod(spec.global_shape)).view(spec.global_shape)
    for size in (1, 2):
        for axes in spec.all_shards([Axis(name, size=size) for name in spec.axis_names]):
            shard = shard_of(spec, full, axes).reshape(-1)
            limit = math.prod(spec.valid_shape)
            for start in range(len(shard) + 1):
                for stop in range(start, len(shard) + 1):
                    found = []
                    for box in boxes(spec, axes, start, stop):
                        region = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                        elements = full[region].reshape(-1)
                        assert len(elements) == box.numel > 0
                        assert torch.equal(elements, shard[box.first : box.first + box.numel])
                        found += elements.tolist()
                    assert found == [value for value in shard[start:stop].tolist() if value < limit]


@pytest.mark.parametrize("spec", BOX_SPECS, ids=lambda spec: str(spec.global_shape))
@pytest.mark.parametrize(("saved_size", "size"), [(1, 2), (2, 1), (2, 2)])
def test_any_part_of_a_shard_is_made_from_the_shards_of_another_layout(
    spec: ParameterSpec, saved_size: int, size: int
) -> None:
    """Only elements between the first and the last needed one are read, and padding becomes zeros."""
    full = torch.arange(1.0, 1 + math.prod(spec.global_shape)).view(spec.global_shape)
    if spec.num_valid_rows is not None:
        full[spec.num_valid_rows :] = 0
    saved_axes, axes = ([Axis(name, size=n) for name in spec.axis_names] for n in (saved_size, size))
    saved = [shard_of(spec, full, place).reshape(-1) for place in spec.all_shards(saved_axes)]
    assert torch.equal(
        merge_shards(spec, [s.view(spec.local_shape(saved_axes)) for s in saved], saved_axes), full
    )

    def read(index: int, first: int, last: int) -> torch.Tensor:
        return saved[index][first:last]

    for place in spec.all_shards(axes):
        shard = shard_of(spec, full, place).reshape(-1)
        for start in range(0, len(shard), 5):
            stop = min(start + 7, len(shard))
            for out in (None, torch.full((stop - start,), -1.0)):
                assert torch.equal(
                    reshard(spec, place, start, stop, spec, saved_axes, read, out), shard[start:stop]
                )
