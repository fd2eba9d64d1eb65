"""Tensor-parallel parameters: the spec of the full parameter, its shards, and its initial values.

The initial values are a function of (seed, global name, index in the full parameter). So every layout starts
from the same weights, and each rank generates only its own shard.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product

import numpy as np
import torch
from torch import nn

from megatron.mpu.layout import TPGroup

# Random numbers come from independent streams, one per this many rows (or columns) of the full parameter.
_UNITS_PER_STREAM = 64


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


InitialValues = Callable[[ParameterSpec, int, str, TPGroup, range | None], torch.Tensor]
"""(spec, seed, name, TP group) -> the initial values of this rank's shard, fp32, on the CPU."""


def spec_of(parameter: torch.Tensor) -> ParameterSpec:
    """Returns the spec of a parameter made by `new_parameter`; raises ValueError for any other tensor."""
    spec = getattr(parameter, "spec", None)
    if not isinstance(spec, ParameterSpec):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has no ParameterSpec: use new_parameter"
        )
    return spec


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
    for first, offsets, sizes in _boxes(divided, start, stop, single):
        offset = slices[offsets[dim]].start + offsets[dim + 1]
        offsets = (*offsets[:dim], offset, *offsets[dim + 2 :])
        sizes = (*sizes[:dim], *sizes[dim + 1 :])
        if spec.num_valid_rows is not None:
            sizes = (min(sizes[0], spec.num_valid_rows - offsets[0]), *sizes[1:])
        if sizes[0] > 0:
            yield ShardBox(first, offsets, sizes)


def _boxes(
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
        for first, offsets, sizes in _boxes(shape[1:], column, end, max(single - 1, 0)):
            yield row * inner + first, (row, *offsets), (1, *sizes)
        start += end - column


def local_shape(spec: ParameterSpec, tp_group: TPGroup) -> tuple[int, ...]:
    """Returns the shape of this rank's shard."""
    if spec.shard_dim is None:
        return spec.global_shape
    shape = list(spec.global_shape)
    shape[spec.shard_dim] = sum(part.stop - part.start for part in local_slices(spec, tp_group))
    return tuple(shape)


def merge_shards(spec: ParameterSpec, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the full parameter from the shards of all tensor-parallel ranks, in rank order.

    For a replicated parameter it returns the first replica; the caller checks whether the replicas are equal.
    """
    if spec.shard_dim is None or len(shards) == 1:
        return shards[0]
    per_rank = [shard.chunk(spec.num_fused_parts, spec.shard_dim) for shard in shards]
    return torch.cat(
        [blocks[index] for index in range(spec.num_fused_parts) for blocks in per_rank], spec.shard_dim
    )


def shard_of(full: torch.Tensor, spec: ParameterSpec, tp_group: TPGroup) -> torch.Tensor:
    """Returns this rank's shard of a full tensor: the inverse of `merge_shards`."""
    dim = spec.shard_dim
    if dim is None:
        return full
    parts = [full.narrow(dim, part.start, part.stop - part.start) for part in local_slices(spec, tp_group)]
    return torch.cat(parts, dim)


def reshard(
    spec: ParameterSpec,
    tp_group: TPGroup,
    start: int,
    stop: int,
    saved: ParameterSpec,
    saved_size: int,
    saved_elements: Callable[[int, int, int], torch.Tensor],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns elements start to stop - 1 of this rank's shard, flat, fp32, made from the shards of
    `saved_size` tensor-parallel ranks.

    saved: the spec of the run that saved. Its vocabulary padding may differ; padded rows become zeros.
    saved_elements: (rank, first, last) -> elements first to last - 1 of the shard that a tensor-parallel rank
    saved, flat. It is called only for elements that are in this rank's elements, or in a row between them.
    out: gets the elements and is returned, if given. Without it the result may be a result of saved_elements.
    """
    dim = spec.shard_dim or 0
    # Both shards are matrices whose columns are the elements from the sharded dimension on.
    inner = math.prod(spec.global_shape[dim + 1 :])
    shape = local_shape(spec, tp_group)
    width = shape[dim] * inner
    target = torch.empty(stop - start) if out is None else out
    if spec.num_valid_rows is not None:
        target.zero_()
    used = (spec.num_valid_rows or spec.global_shape[dim]) * inner
    mine = _column_spans(spec, tp_group, inner)
    for position, (row, first), (rows, columns) in _boxes((math.prod(shape[:dim]), width), start, stop, 0):
        rectangle = target[position - start : position - start + rows * columns].view(rows, columns)
        for rank in range(saved_size):
            theirs = _column_spans(saved, TPGroup(rank, saved_size), inner)
            saved_width = sum(end - begin for begin, end, _ in theirs)
            for (begin, end, column), (saved_begin, saved_end, saved_column) in product(mine, theirs):
                low = max(begin, saved_begin, begin + first - column)
                high = min(end, saved_end, begin + first + columns - column, used)
                if low >= high:
                    continue
                source = row * saved_width + saved_column + low - saved_begin
                if rows == 1:
                    values = saved_elements(rank, source, source + high - low)
                    if out is None and values.numel() == stop - start:
                        return values  # one saved shard holds all of them
                else:
                    span = row * saved_width, (row + rows) * saved_width
                    values = saved_elements(rank, *span).view(rows, saved_width)
                    values = values.narrow(1, saved_column + low - saved_begin, high - low)
                rectangle.narrow(1, column + low - begin - first, high - low).copy_(values)
    return target


def _column_spans(spec: ParameterSpec, tp_group: TPGroup, inner: int) -> list[tuple[int, int, int]]:
    """Returns (first column, last column + 1) in the full parameter, and the first column in the shard, of
    each slice of a shard."""
    return [
        (part.start * inner, part.stop * inner, offset * inner)
        for offset, part in placed_slices(spec, tp_group)
    ]


def new_parameter(spec: ParameterSpec, tp_group: TPGroup, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Returns this rank's shard, uninitialized, on torch's default device, with the attribute `spec`."""
    parameter = nn.Parameter(torch.empty(local_shape(spec, tp_group), dtype=dtype))
    parameter.spec = spec  # type: ignore[attr-defined]
    if spec.shard_dim is not None:
        # DeepSpeed reads this attribute: it counts parameters without it only on tensor-parallel rank 0.
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    return parameter


def set_main_grad(parameter: torch.Tensor, total: torch.Tensor, *, stays_allocated: bool) -> None:
    """Makes `total`, fp32, the sum of the parameter's gradients over micro-batches. stays_allocated: whether
    `total` always has memory, so that a product can add to it (`weight_gradient.fuses_accumulation`)."""
    parameter.main_grad = total  # type: ignore[attr-defined]
    parameter.keeps_main_grad = stays_allocated  # type: ignore[attr-defined]


def main_grad_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns the fp32 sum of the parameter's gradients, which the optimizer sets; None if it is not set."""
    return getattr(parameter, "main_grad", None)


def is_norm_owner(parameter: torch.Tensor, tp_group: TPGroup) -> bool:
    """Returns whether this rank counts the parameter in sums over model-parallel ranks (norms, counts).

    Over the tensor and pipeline ranks of one replica, each element has exactly one owner. Sharded parameters
    count on every rank, replicated parameters on tensor-parallel rank 0, and tied parameters on the first
    stage that holds them. (DeepSpeed sets `ds_pipe_replicated` on the replicas of the other stages.)
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return spec_of(parameter).shard_dim is not None or tp_group.rank == 0


def mark_sequence_parallel_grad(parameter: torch.Tensor) -> None:
    """Marks a replicated parameter whose gradients on the tensor-parallel ranks are partial and have to be
    summed: of embedding and transformer layers with --sequence-parallel, and always of --qk-layernorm."""
    parameter.is_sequence_parallel_grad = True  # type: ignore[attr-defined]


def mark_sequence_parallel_grads(module: nn.Module) -> None:
    """Marks the replicated parameters of a module that computes with this rank's part of the sequence."""
    for parameter in module.parameters():
        if spec_of(parameter).shard_dim is None:
            mark_sequence_parallel_grad(parameter)


def is_sequence_parallel_grad(parameter: torch.Tensor) -> bool:
    """Returns whether `mark_sequence_parallel_grad` was called for the parameter."""
    return getattr(parameter, "is_sequence_parallel_grad", False)


def initial_values(
    spec: ParameterSpec, seed: int, name: str, tp_group: TPGroup, elements: range | None = None
) -> torch.Tensor:
    """Returns this rank's shard of the initial values of the parameter `name`, fp32, on the CPU.

    elements: the elements of the flat shard that the caller reads; the others may be undefined. This saves
    time only if no dimension after the first one is sharded over TP."""
    shard = np.empty(local_shape(spec, tp_group), dtype=np.float32)
    if spec.init_std is None:
        shard.fill(spec.init_value)
    else:
        _fill_normal(shard, spec, seed, name, tp_group, elements or range(shard.size))
    if spec.num_valid_rows is not None:
        _zero_padding(shard, spec, tp_group)
    return torch.from_numpy(shard)


def initialize_parameters(
    module: nn.Module, seed: int, tp_group: TPGroup, values: InitialValues = initial_values
) -> None:
    """Initializes every parameter of `module` that has memory, in place, with `values`.

    By default the values depend only on the seed and the full name. They are generated on the CPU in fp32 and
    rounded to the parameter's dtype, so they are equal on every device.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.untyped_storage().nbytes():
                parameter.copy_(values(spec_of(parameter), seed, name, tp_group, None))


def _fill_normal(
    shard: np.ndarray, spec: ParameterSpec, seed: int, name: str, tp_group: TPGroup, elements: range
) -> None:
    dim = spec.shard_dim or 0
    inner = math.prod(shard.shape[1:])
    units = spec.global_shape[dim]
    std = np.float32(spec.init_std)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8")
    scratch = np.empty(_UNITS_PER_STREAM * (math.prod(spec.global_shape) // units), dtype=np.float32)
    for offset, part in placed_slices(spec, tp_group):
        for stream in range(part.start // _UNITS_PER_STREAM, -(-part.stop // _UNITS_PER_STREAM)):
            first = stream * _UNITS_PER_STREAM
            last = min(first + _UNITS_PER_STREAM, units)
            start, stop = max(first, part.start), min(last, part.stop)
            own = range(offset + start - part.start, offset + stop - part.start)
            if dim == 0 and (own.stop * inner <= elements.start or elements.stop <= own.start * inner):
                continue
            shape = list(spec.global_shape)
            shape[dim] = last - first
            # The highest word of the counter is the stream's number, so streams do not overlap.
            generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, stream]))
            values = scratch[: math.prod(shape)].reshape(shape)
            generator.standard_normal(out=values, dtype=np.float32)
            # Generates the full stream even if this rank needs a part of it, so that all ranks agree.
            kept = _slice_along_dim(dim, slice(start - first, stop - first))
            place = _slice_along_dim(dim, slice(own.start, own.stop))
            np.multiply(values[kept], std, out=shard[place])


def _zero_padding(shard: np.ndarray, spec: ParameterSpec, tp_group: TPGroup) -> None:
    if spec.shard_dim not in (None, 0) or spec.num_fused_parts != 1:
        raise ValueError(f"num_valid_rows needs a parameter replicated or sharded along its rows: {spec}")
    first_row = local_slices(spec, tp_group)[0].start
    shard[max((spec.num_valid_rows or 0) - first_row, 0) :] = 0.0


def _slice_along_dim(dim: int, part: slice) -> tuple[slice, ...]:
    return (slice(None),) * dim + (part,)


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values of a tensor in a storage without other values: torch.save writes whole storages, and
    weights are parts of a flat buffer. Copies a tensor on a device, but not one in host memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0:
        return tensor.detach().clone()
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # keeps the memory
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
