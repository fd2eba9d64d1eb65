"""The spec of a tensor-parallel parameter, and which elements of it a rank holds.

It needs no torch, whose import would take seconds and 200 MB in each process that writes checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from megatron.mpu.layout import TPGroup


@dataclass(frozen=True)
class ParameterSpec:
    """Description of a full parameter, equal on every layout.

    global_shape: shape of the full parameter, over all tensor-parallel ranks.
    shard_dim: the dimension that is sharded over the tensor-parallel ranks; None: replicated.
    num_fused_parts: number of equal parts along shard_dim; each part is sharded (2 for a gated MLP).
    init_std: standard deviation of the normal initialization; None: constant init_value.
    num_valid_rows: rows from this number on are padding, initialized to zero.
    weight_decay: whether the optimizer applies weight decay.
    lr_mult: multiplier of the learning rate.
    matrix_rows: for the weight of a linear layer, the numbers of consecutive rows of each of its fused
        matrices; the pattern repeats until all rows are assigned. (2, 1, 1): rows 0, 1, 4, 5, ... are the
        first matrix, rows 2, 6, ... the second one. Empty for parameters without matrices of this kind. It
        does not affect how a parameter is sharded or stored.
    """

    global_shape: tuple[int, ...]
    shard_dim: int | None = None
    num_fused_parts: int = 1
    init_std: float | None = None
    init_value: float = 0.0
    num_valid_rows: int | None = None
    weight_decay: bool = True
    lr_mult: float = 1.0
    matrix_rows: tuple[int, ...] = field(default=(), compare=False)

    @property
    def valid_shape(self) -> tuple[int, ...]:
        """global_shape without the rows of padding."""
        if self.num_valid_rows is None:
            return tuple(self.global_shape)
        return (self.num_valid_rows, *self.global_shape[1:])


def local_slices(spec: ParameterSpec, tp_group: TPGroup) -> tuple[slice, ...]:
    """Returns this rank's slices of the full parameter along shard_dim (dim 0 if replicated), one per part.

    The shard is the concatenation of these slices.
    """
    if spec.shard_dim is None:
        return (slice(0, spec.global_shape[0]),)
    units = spec.global_shape[spec.shard_dim]
    if units % (spec.num_fused_parts * tp_group.size) != 0:
        raise ValueError(
            f"dimension {spec.shard_dim} of a parameter of shape {spec.global_shape} cannot be sharded: "
            f"expected a multiple of {spec.num_fused_parts} fused parts x {tp_group.size} ranks"
        )
    block = units // spec.num_fused_parts
    width = block // tp_group.size
    starts = [index * block + tp_group.rank * width for index in range(spec.num_fused_parts)]
    return tuple(slice(start, start + width) for start in starts)


def placed_slices(spec: ParameterSpec, tp_group: TPGroup) -> list[tuple[int, slice]]:
    """Returns `local_slices`, each with the index of its first unit in the shard."""
    slices = local_slices(spec, tp_group)
    lengths = (part.stop - part.start for part in slices)
    return list(zip(accumulate(lengths, initial=0), slices, strict=False))


@dataclass(frozen=True)
class ShardBox:
    """A box of the full parameter whose elements are consecutive in a shard.

    first: index of the first element in the flattened shard. offsets, sizes: the box in the full parameter.
    """

    first: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def shard_boxes(spec: ParameterSpec, tp_group: TPGroup, start: int, stop: int) -> Iterator[ShardBox]:
    """Yields the boxes of the full parameter that make up elements start to stop - 1 of this rank's flattened
    shard, without the padding of the vocabulary."""
    dim, slices = spec.shard_dim or 0, local_slices(spec, tp_group)
    shape = local_shape(spec, tp_group)
    # The sharded dimension becomes two: the slice, and the index in it. Slices are far apart in the full
    # parameter, so a box lies in one slice, and in one row of the dimensions before.
    width = slices[0].stop - slices[0].start
    divided = (*shape[:dim], len(slices), width, *shape[dim + 1 :])
    single = dim + 1 if len(slices) > 1 else 0
    for first, offsets, sizes in boxes(divided, start, stop, single):
        offset = slices[offsets[dim]].start + offsets[dim + 1]
        offsets = (*offsets[:dim], offset, *offsets[dim + 2 :])
        sizes = (*sizes[:dim], *sizes[dim + 1 :])
        if spec.num_valid_rows is not None:
            sizes = (min(sizes[0], spec.num_valid_rows - offsets[0]), *sizes[1:])
        if sizes[0] > 0:
            yield ShardBox(first, offsets, sizes)


def boxes(
    shape: tuple[int, ...], start: int, stop: int, single: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yields (first element, offsets, sizes) of the boxes that make up elements start to stop - 1 of a
    tensor, each with consecutive elements. single: a box has one index of each of the first dimensions."""
    if not shape:
        yield start, (), ()
        return
    inner = math.prod(shape[1:])
    while start < stop:
        row, column = divmod(start, inner)
        rows = (stop - start) // inner if column == 0 and single == 0 else 0
        if rows:
            yield start, (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * inner
            continue
        end = min(inner, column + stop - start)
        for first, offsets, sizes in boxes(shape[1:], column, end, max(single - 1, 0)):
            yield row * inner + first, (row, *offsets), (1, *sizes)
        start += end - column


def local_shape(spec: ParameterSpec, tp_group: TPGroup) -> tuple[int, ...]:
    """Returns the shape of this rank's shard."""
    if spec.shard_dim is None:
        return spec.global_shape
    shape = list(spec.global_shape)
    shape[spec.shard_dim] = sum(part.stop - part.start for part in local_slices(spec, tp_group))
    return tuple(shape)
