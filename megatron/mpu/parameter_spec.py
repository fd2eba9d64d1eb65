"""The spec of a parameter: how the axes of a mesh shard it, and which elements of it a rank holds.

This module does not import torch, which would take seconds and 200 MB in each process that writes
checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from megatron.mpu.mesh import DATA_AXES, DENSE, EXPERT, Axis, place_on


class Shard(NamedTuple):
    """One dimension of a parameter, and the axis over which it is sharded.

    parts: number of equal fused parts along the dimension. Each part is sharded (a gated MLP has 2 parts).
    """

    dim: int
    axis: str = "tp"
    parts: int = 1


@dataclass(frozen=True)
class ParameterSpec:
    """Description of a full parameter, which is equal on every layout.

    global_shape: shape of the full parameter, over all ranks.
    sharding: the dimensions that are sharded, each over one axis of the mesh; empty: replicated.
    init_std: standard deviation of the normal initialization; None: constant init_value.
    num_valid_rows: rows from this number on are padding, initialized to zero.
    weight_decay: whether the optimizer applies weight decay.
    lr_mult: multiplier of the learning rate.
    matrix_rows: for the weight of a linear layer, the numbers of consecutive rows of each of its fused
        matrices; the pattern repeats until all rows are assigned. (2, 1, 1): rows 0, 1, 4, 5, ... are the
        first matrix, rows 2, 6, ... the second one. Empty for parameters without such matrices. It does not
        affect how a parameter is sharded or stored.
    has_gradient: false for a state that a rule of the model changes after each step, such as the experts'
        bias. Such a state is fp32 in every precision, and is saved like a parameter.
    """

    global_shape: tuple[int, ...]
    sharding: tuple[Shard, ...] = ()
    init_std: float | None = None
    init_value: float = 0.0
    num_valid_rows: int | None = None
    weight_decay: bool = True
    lr_mult: float = 1.0
    matrix_rows: tuple[int, ...] = field(default=(), compare=False)
    has_gradient: bool = True

    def __post_init__(self) -> None:
        names, dims = self.axis_names, [shard.dim for shard in self.sharding]
        views = [set(view[1:]) for view in (DENSE, EXPERT)]
        if not any(view >= set(names) for view in views) or len({*names}) + len({*dims}) < 2 * len(names):
            raise ValueError(
                f"a parameter cannot be sharded as {self.sharding}: expected different dimensions, over "
                f"different axes of {' or '.join(', '.join(sorted(view)) for view in views)}"
            )

    @property
    def valid_shape(self) -> tuple[int, ...]:
        """The shape of the full parameter without its rows of padding."""
        if self.num_valid_rows is None:
            return tuple(self.global_shape)
        return (self.num_valid_rows, *self.global_shape[1:])

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes that shard the parameter."""
        return tuple(shard.axis for shard in self.sharding)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes, except `pp`, that do not shard the parameter. Ranks along these axes hold equal
        elements."""
        view = EXPERT if "ep" in self.axis_names else DENSE
        return tuple(name for name in view[1:] if name not in self.axis_names)

    @property
    def reduced_axes(self) -> tuple[str, ...]:
        """The replica axes whose ranks read different tokens. The gradient is summed over these axes, and
        ZeRO partitions the parameter over them."""
        return tuple(name for name in self.replica_axes if name in DATA_AXES)

    def segments(self, axes: Sequence[Axis]) -> list[list[range]]:
        """Returns, for each dimension, the ranges of indices that a rank holds, in the order of its shard.

        axes: the rank's position on the axes; an axis that is not given has one rank. Raises ValueError if a
        dimension cannot be sharded.
        """
        segments = [[range(size)] for size in self.global_shape]
        for dim, name, parts in self.sharding:
            axis, size = place_on(axes, name), self.global_shape[dim]
            if size % (parts * axis.size) != 0:
                raise ValueError(
                    f"dimension {dim} of a parameter of shape {self.global_shape} cannot be sharded: "
                    f"expected a multiple of {parts} fused parts x {axis.size} ranks"
                )
            part, width = size // parts, size // parts // axis.size
            starts = (index * part + axis.rank * width for index in range(parts))
            segments[dim] = [range(start, start + width) for start in starts]
        return segments

    def local_shape(self, axes: Sequence[Axis]) -> tuple[int, ...]:
        """Returns the shape of a rank's shard. axes: see `segments`."""
        return tuple(sum(map(len, ranges)) for ranges in self.segments(axes))

    def local_numel(self, axes: Sequence[Axis]) -> int:
        """Returns the number of elements of a rank's shard. axes: see `segments`."""
        return math.prod(self.local_shape(axes))

    def all_shards(self, axes: Sequence[Axis]) -> list[tuple[Axis, ...]]:
        """Returns the positions of the ranks that together hold one replica of the parameter. The last axis
        of `sharding` varies fastest. axes: the sizes of the axes."""
        sizes = [place_on(axes, name).size for name in self.axis_names]
        along = (
            [Axis(name, rank, size) for rank in range(size)]
            for name, size in zip(self.axis_names, sizes, strict=True)
        )
        return list(product(*along))


class Box(NamedTuple):
    """A box (a rectangular part) of the full parameter whose elements are consecutive in a shard.

    first: index of the first element in the flattened shard. offsets, sizes: the box in the full parameter.
    """

    first: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the box."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the full parameter."""
        return tuple(slice(first, first + size) for first, size in zip(self.offsets, self.sizes, strict=True))

    def intersection(self, other: Box) -> tuple[range, ...] | None:
        """Returns, for each dimension, the indices of the full parameter that are in both boxes. Returns None
        if the boxes have no common element."""
        both = tuple(
            range(max(start, other_start), min(start + size, other_start + other_size))
            for start, size, other_start, other_size in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, strict=True
            )
        )
        return both if all(both) else None


def boxes(
    spec: ParameterSpec, axes: Sequence[Axis], start: int = 0, stop: int | None = None
) -> Iterator[Box]:
    """Yields the boxes of the full parameter that make up the elements start to stop - 1 of a rank's
    flattened shard, without rows of padding. axes: see `ParameterSpec.segments`. stop: None stands for the
    end of the shard."""
    segments = spec.segments(axes)
    # A dimension with several segments becomes two dimensions: the segment, and the index in the segment.
    # Segments are not adjacent in the full parameter. Therefore a box lies within one segment, and has one
    # index in each earlier dimension.
    divided: list[int] = []
    num_single = 0
    for ranges in segments:
        if len(ranges) > 1:
            divided.append(len(ranges))
            num_single = len(divided)
        divided.append(len(ranges[0]))
    for first, places, box_sizes in _consecutive(
        tuple(divided), start, math.prod(divided) if stop is None else stop, num_single
    ):
        offsets, sizes, position = [], [], 0
        for ranges in segments:
            segment = ranges[0]
            if len(ranges) > 1:
                segment = ranges[places[position]]
                position += 1
            offsets.append(segment.start + places[position])
            sizes.append(box_sizes[position])
            position += 1
        if spec.num_valid_rows is not None:
            sizes[0] = min(sizes[0], spec.num_valid_rows - offsets[0])
        if not sizes or sizes[0] > 0:
            yield Box(first, tuple(offsets), tuple(sizes))


def _consecutive(
    shape: tuple[int, ...], start: int, stop: int, num_single: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yields (first element, offsets, sizes) of the boxes that make up the elements start to stop - 1 of a
    tensor. The elements of each box are consecutive. A box has one index in each of the first `num_single`
    dimensions."""
    if not shape:
        yield start, (), ()
        return
    inner = math.prod(shape[1:])
    while start < stop:
        row, column = divmod(start, inner)
        rows = (stop - start) // inner if column == 0 and num_single == 0 else 0
        if rows:
            yield start, (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
            start += rows * inner
            continue
        end = min(inner, column + stop - start)
        for first, offsets, sizes in _consecutive(shape[1:], column, end, max(num_single - 1, 0)):
            yield row * inner + first, (row, *offsets), (1, *sizes)
        start += end - column
