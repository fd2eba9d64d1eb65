"""Sharded parameters: shards, resharding and initial values.

The initial values are a function of (seed, global name, index in the full parameter). Therefore every layout
starts from equal weights, and each rank generates only its own shard.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, product

import numpy as np
import torch
from torch import nn

from megatron.mpu.mesh import Axis, Mesh, place_on
from megatron.mpu.parameter_spec import Box, ParameterSpec, boxes

# Random numbers come from independent streams. A stream covers at most _UNITS_PER_STREAM indices of the first
# sharded dimension (of the rows, if the parameter is replicated). If this dimension is not the rows, a stream
# also covers at most _ROWS_PER_STREAM rows.
_UNITS_PER_STREAM, _ROWS_PER_STREAM = 64, 256


InitialValues = Callable[[ParameterSpec, int, str, Sequence[Axis], range | None], torch.Tensor]
"""A function (spec, seed, name, this rank's position, elements) -> the initial values of its shard, fp32, on
the CPU."""


def spec_of(parameter: torch.Tensor) -> ParameterSpec:
    """Returns the spec of a parameter made by `new_parameter`. Raises ValueError for any other tensor."""
    spec = getattr(parameter, "spec", None)
    if not isinstance(spec, ParameterSpec):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has no ParameterSpec: use new_parameter"
        )
    return spec


def merge_shards(
    spec: ParameterSpec, shards: Sequence[torch.Tensor], axes: Sequence[Axis] | None = None
) -> torch.Tensor:
    """Returns the full parameter from the shards of all ranks, which are in the order of
    `ParameterSpec.all_shards`.

    axes: the sizes of the axes; None: the single axis that shards the parameter has as many ranks as there
    are shards. Only the shape of the shards matters, not the spec's shape. For a replicated parameter the
    function returns the first replica; the caller checks whether the replicas are equal. Raises ValueError
    for shards of different shapes.
    """
    if not spec.sharding or len(shards) == 1:
        return shards[0]
    if any(shard.shape != shards[0].shape for shard in shards):
        raise ValueError(f"shards of different shapes: {[tuple(shard.shape) for shard in shards]}")
    axes = [Axis(spec.sharding[0].axis, size=len(shards))] if axes is None else axes
    shape = list(shards[0].shape)
    for dim, name, _ in spec.sharding:
        shape[dim] *= place_on(axes, name).size
    saved, whole = ParameterSpec(tuple(shape), spec.sharding), ParameterSpec(tuple(shape))
    full, flat = shards[0].new_empty(shape), [shard.reshape(-1) for shard in shards]
    reshard(whole, (), 0, full.numel(), saved, axes, lambda i, a, b: flat[i][a:b], full.view(-1))
    return full


def shard_of(full: torch.Tensor, spec: ParameterSpec, axes: Sequence[Axis]) -> torch.Tensor:
    """Returns a rank's shard of a full tensor, the inverse of `merge_shards`. axes: the rank's position."""
    if not spec.sharding:
        return full
    whole, flat = replace(spec, sharding=(), num_valid_rows=None), full.reshape(-1)
    shard = full.new_empty(spec.local_shape(axes))
    own = replace(spec, num_valid_rows=None)
    reshard(own, axes, 0, shard.numel(), whole, (), lambda _, a, b: flat[a:b], shard.view(-1))
    return shard


def reshard(
    spec: ParameterSpec,
    axes: Sequence[Axis],
    start: int,
    stop: int,
    saved: ParameterSpec,
    saved_axes: Sequence[Axis],
    saved_elements: Callable[[int, int, int], torch.Tensor],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the elements start to stop - 1 of a rank's flattened shard, fp32, made from the saved shards of
    other ranks.

    axes: the rank's position. saved: the spec of the run that saved. Its vocabulary padding may differ;
    padded rows become zeros. saved_axes: sizes of the axes in that run. saved_elements: a function (index in
    `ParameterSpec.all_shards`, first, last) -> the elements first to last - 1 of a saved shard, flat. It is
    called only for elements that this rank needs, or that lie between them. out: if given, it receives the
    elements and is returned. Without `out` the result may be a tensor that saved_elements returned.
    """
    target = torch.empty(stop - start) if out is None else out
    if spec.num_valid_rows is not None:
        target.zero_()
    stored = [
        (index, box)
        for index, place in enumerate(saved.all_shards(saved_axes))
        for box in boxes(saved, place)
    ]
    for box in boxes(spec, axes, start, stop):
        rectangle = target[box.first - start : box.first - start + box.numel].view(box.sizes)
        for index, other in stored:
            if (common := box.intersection(other)) is None:
                continue
            values = part_of_box(other, common, partial(saved_elements, index))
            if out is None and values.numel() == stop - start:
                return values.reshape(-1)  # one saved shard holds all elements
            narrowed(rectangle, common, box.offsets).copy_(values)
    return target


def part_of_box(
    box: Box, part: tuple[range, ...], elements: Callable[[int, int], torch.Tensor]
) -> torch.Tensor:
    """Returns a part of a box, in the shape of the part. elements: a function (first, last) -> the elements
    first to last - 1 of the flattened shard. It is called once, for the consecutive elements from the first
    to the last element of the part. These are whole rows along the first dimension in which the part has
    several indices."""
    first, dim = box.first, 0
    while dim < len(part) - 1 and len(part[dim]) == 1:
        first += (part[dim].start - box.offsets[dim]) * math.prod(box.sizes[dim + 1 :])
        dim += 1
    inner = math.prod(box.sizes[dim + 1 :])
    low, high = part[dim].start - box.offsets[dim], part[dim].stop - box.offsets[dim]
    shape = (*(1 for _ in part[:dim]), high - low, *box.sizes[dim + 1 :])
    values = elements(first + low * inner, first + high * inner).view(shape)
    offsets = (*(indices.start for indices in part[: dim + 1]), *box.offsets[dim + 1 :])
    return narrowed(values, part, offsets)


def narrowed(values: torch.Tensor, part: tuple[range, ...], offsets: Sequence[int]) -> torch.Tensor:
    """Returns `part` of the full parameter from `values`, which begin at `offsets` of the full parameter."""
    return values[tuple(slice(r.start - o, r.stop - o) for r, o in zip(part, offsets, strict=True))]


def new_parameter(spec: ParameterSpec, *axes: Axis, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Returns this rank's shard of a new parameter, uninitialized, on torch's default device. Its attribute
    `spec` is set. axes: this rank's position on the axes that shard the parameter."""
    parameter = nn.Parameter(torch.empty(spec.local_shape(axes), dtype=dtype))
    parameter.spec = spec  # type: ignore[attr-defined]
    parameter.requires_grad_(spec.has_gradient)
    if spec.sharding:
        # DeepSpeed reads this attribute. It counts parameters without it only on tensor-parallel rank 0.
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    return parameter


def without_memory(parameter: torch.Tensor) -> torch.Tensor:
    """Returns data for a parameter whose values are stored elsewhere (ZeRO-3). It has the parameter's shape,
    NaN values, and the memory of one element. `copy_` to it raises RuntimeError."""
    return parameter.new_full((), math.nan).expand(parameter.shape)


def has_memory(parameter: torch.Tensor) -> bool:
    """Returns whether the parameter holds its values, that is, whether its data is not from
    `without_memory`."""
    return parameter.untyped_storage().nbytes() >= parameter.nbytes


def set_main_grad(parameter: torch.Tensor, total: torch.Tensor) -> None:
    """Sets `total`, fp32, as the sum of the parameter's gradients over micro-batches. The sum always has
    memory."""
    # `total.data` hides from autograd that the sum is a view of the flat buffer. Otherwise a graph that saves
    # the sum for its backward pass would fail after a change of any other sum in the buffer.
    parameter.main_grad = total.data  # type: ignore[attr-defined]
    mark_main_grad(parameter, is_defined=True)


def mark_main_grad(parameter: torch.Tensor, is_defined: bool) -> None:
    """Declares the values of the sum defined or undefined. If they are undefined, the next gradient
    overwrites them."""
    parameter.main_grad_beta = float(is_defined)  # type: ignore[attr-defined]


def has_main_grad(parameter: torch.Tensor) -> bool:
    """Returns whether `set_main_grad` was called for the parameter."""
    return getattr(parameter, "main_grad", None) is not None


def main_grad_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns the fp32 sum of the parameter's gradients, for reading it or adding to it. Before the first
    gradient of a step the sum is set to zero. Returns None if the optimizer has not set a sum."""
    total: torch.Tensor | None = getattr(parameter, "main_grad", None)
    if total is not None and main_grad_beta(parameter) == 0.0:
        total.zero_()
        mark_main_grad(parameter, is_defined=True)
    return total


def next_main_grad(parameter: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Returns the fp32 sum of the parameter's gradients and a factor beta. The caller must write beta * sum +
    gradient to all elements. If beta is 0.0, the values of the sum are undefined, possibly NaN, and the
    caller must not read them."""
    total: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
    beta = main_grad_beta(parameter)
    if beta == 0.0:
        mark_main_grad(parameter, is_defined=True)
    return total, beta


def main_grad_beta(parameter: torch.Tensor) -> float:
    """Returns 0.0 if the values of the gradient sum are undefined, otherwise 1.0."""
    beta: float = getattr(parameter, "main_grad_beta", 1.0)
    return beta


def is_norm_owner(parameter: torch.Tensor, mesh: Mesh, is_partitioned: bool = True) -> bool:
    """Returns whether this rank counts the parameter in sums over all ranks (norms, counts).

    Each element has exactly one owner. A parameter is counted on every rank of the axes that shard it, on the
    first rank of the axes that replicate it, and on the first stage that holds it if it is tied. (DeepSpeed
    sets `ds_pipe_replicated` on the replicas of other stages.) is_partitioned: see `Mesh.replica_of`.
    """
    is_replica_of_stage = getattr(parameter, "ds_pipe_replicated", False)
    return not is_replica_of_stage and mesh.counts(spec_of(parameter), is_partitioned)


def is_tp_replicated(parameter: torch.Tensor) -> bool:
    """Returns whether all tensor-parallel ranks hold equal elements of the parameter."""
    return "tp" in spec_of(parameter).replica_axes


def mark_sequence_parallel_grad(parameter: torch.Tensor) -> None:
    """Marks a replicated parameter whose gradients on the tensor-parallel ranks are partial sums and must be
    summed: with --sequence-parallel the parameters of embedding and transformer layers, and in all cases the
    parameters of --qk-layernorm."""
    parameter.is_sequence_parallel_grad = True  # type: ignore[attr-defined]


def mark_sequence_parallel_grads(module: nn.Module) -> None:
    """Marks the replicated parameters of a module that computes this rank's part of the sequence."""
    for parameter in module.parameters():
        if is_tp_replicated(parameter):
            mark_sequence_parallel_grad(parameter)


def is_sequence_parallel_grad(parameter: torch.Tensor) -> bool:
    """Returns whether `mark_sequence_parallel_grad` was called for the parameter."""
    return getattr(parameter, "is_sequence_parallel_grad", False)


def initial_values(
    spec: ParameterSpec, seed: int, name: str, axes: Sequence[Axis], elements: range | None = None
) -> torch.Tensor:
    """Returns a rank's shard of the initial values of the parameter `name`, fp32, on the CPU.

    axes: the rank's position. elements: the elements of the flattened shard that the caller reads; all other
    elements may be undefined."""
    shard = np.empty(spec.local_shape(axes), dtype=np.float32)
    if spec.init_std is None:
        shard.fill(spec.init_value)
    else:
        _fill_matrices(shard, spec, seed, name, axes, elements or range(shard.size))
    if spec.num_valid_rows is not None:
        if any(dim != 0 or parts != 1 for dim, _, parts in spec.sharding):
            raise ValueError(f"num_valid_rows needs a parameter replicated or sharded along its rows: {spec}")
        first_row = spec.segments(axes)[0][0].start
        shard[max(spec.num_valid_rows - first_row, 0) :] = 0.0
    return torch.from_numpy(shard)


def initialize_parameters(
    module: nn.Module, seed: int, axes: Sequence[Axis], values: InitialValues = initial_values
) -> None:
    """Initializes every parameter of `module` that has memory, in place, with `values`.

    The default `values` depend only on the seed and the full name. They are generated on the CPU in fp32 and
    rounded to the parameter's dtype, so they are equal on every device.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if has_memory(parameter):
                parameter.copy_(values(spec_of(parameter), seed, name, axes, None))


def _fill_matrices(
    shard: np.ndarray, spec: ParameterSpec, seed: int, name: str, axes: Sequence[Axis], elements: range
) -> None:
    """Fills the shard of one matrix, or of a stack of matrices [experts, rows, columns]. Each matrix of a
    stack has its own stream, so a rank generates only its own experts."""
    if len(spec.global_shape) < 3:
        _fill_normal(shard, spec, seed, name, axes, elements)
        return
    if any(dim != 0 for dim, _, _ in spec.sharding):
        raise ValueError(f"a stack of matrices is sharded only along its first dimension, not as {spec}")
    matrix = replace(spec, global_shape=spec.global_shape[1:], sharding=())
    owned = [index for indices in spec.segments(axes)[0] for index in indices]
    size = math.prod(matrix.global_shape)
    for place, index in enumerate(owned):
        first, stop = max(elements.start - place * size, 0), min(elements.stop - place * size, size)
        if first < stop:
            _fill_normal(shard[place], matrix, seed, f"{name}/{index}", (), range(first, stop))


def _fill_normal(
    shard: np.ndarray, spec: ParameterSpec, seed: int, name: str, axes: Sequence[Axis], elements: range
) -> None:
    dim = spec.sharding[0].dim if spec.sharding else 0
    shape, inner = spec.global_shape, math.prod(shard.shape[1:])
    std = np.float32(spec.init_std)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8")
    scratch = np.empty(_UNITS_PER_STREAM * (math.prod(shape) // shape[dim]), dtype=np.float32)
    # For each dimension and segment: the first index in the shard, and the indices in the full parameter.
    placed = [
        list(zip(accumulate(map(len, ranges), initial=0), ranges, strict=False))
        for ranges in spec.segments(axes)
    ]
    for own in placed[dim]:
        for stream in range(own[1].start // _UNITS_PER_STREAM, -(-own[1].stop // _UNITS_PER_STREAM)):
            first = stream * _UNITS_PER_STREAM
            region = [range(size) for size in shape]
            region[dim] = range(first, min(first + _UNITS_PER_STREAM, shape[dim]))
            step = _ROWS_PER_STREAM if dim else shape[0]
            for index, row in enumerate(range(0, shape[0], step)):
                if dim:
                    region[0] = range(row, min(row + step, shape[0]))
                segments = [[own] if d == dim else placed[d] for d in range(len(shape))]
                targets = [
                    slices
                    for combination in product(*segments)
                    if (slices := _overlap(combination, region)) is not None
                    and slices[0][0].start * inner < elements.stop
                    and slices[0][0].stop * inner > elements.start
                ]
                if not targets:
                    continue
                # The two highest words of the counter are the stream's position, so streams do not overlap.
                generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, index, stream]))
                # The full stream is generated even if this rank needs only a part of it, so that all ranks
                # agree.
                sizes = [len(indices) for indices in region]
                values = scratch[: math.prod(sizes)].reshape(sizes)
                generator.standard_normal(out=values, dtype=np.float32)
                for target, source in targets:
                    np.multiply(values[source], std, out=shard[target])


def _overlap(
    segments: Sequence[tuple[int, range]], region: Sequence[range]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Returns the positions of a region's elements in the shard and in the region, for the elements that lie
    in the given segment of each dimension. Returns None if there are none."""
    target, source = [], []
    for (offset, own), indices in zip(segments, region, strict=True):
        low, high = max(own.start, indices.start), min(own.stop, indices.stop)
        if low >= high:
            return None
        target.append(slice(offset + low - own.start, offset + high - own.start))
        source.append(slice(low - indices.start, high - indices.start))
    return tuple(target), tuple(source)


def own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values of a tensor in a storage without other values. torch.save writes whole storages, and
    weights are parts of a flat buffer. A tensor on a device is copied; a tensor in host memory is not."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0:
        return tensor.detach().clone()
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # keeps the memory alive
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
