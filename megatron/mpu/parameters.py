"""Tensor-parallel parameters: their shards, and their initial values.

The initial values are a function of (seed, global name, index in the full parameter). So every layout starts
from the same weights, and each rank generates only its own shard.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch
from torch import nn

from megatron.mpu.layout import TPGroup
from megatron.mpu.parameter_spec import ParameterSpec, boxes, local_shape, local_slices, placed_slices

# Random numbers come from independent streams. A stream has at most _UNITS_PER_STREAM indices of the sharded
# dimension (rows, if the parameter is replicated). If columns are sharded, a stream has at most
# _ROWS_PER_STREAM rows.
_UNITS_PER_STREAM, _ROWS_PER_STREAM = 64, 256


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
    for position, (row, first), (rows, columns) in boxes((math.prod(shape[:dim]), width), start, stop, 0):
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


def without_memory(parameter: torch.Tensor) -> torch.Tensor:
    """Returns data for a parameter whose values are elsewhere (ZeRO-3): of its shape, NaN, with the memory of
    one element. `copy_` to it raises RuntimeError."""
    return parameter.new_full((), math.nan).expand(parameter.shape)


def has_memory(parameter: torch.Tensor) -> bool:
    """Returns whether the parameter holds its values: its data is not from `without_memory`."""
    return parameter.untyped_storage().nbytes() >= parameter.nbytes


def set_main_grad(parameter: torch.Tensor, total: torch.Tensor) -> None:
    """Makes `total`, fp32, the sum of the parameter's gradients over micro-batches. It always has memory."""
    parameter.main_grad = total  # type: ignore[attr-defined]


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

    elements: the elements of the flat shard that the caller reads; the others may be undefined."""
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
            if has_memory(parameter):
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
            own = slice(offset + start - part.start, offset + stop - part.start)
            step = _ROWS_PER_STREAM
            blocks = [slice(row, row + step) for row in range(0, len(shard), step)] if dim else [own]
            for index, rows in enumerate(blocks):
                target = shard[rows]
                if (
                    rows.start * inner >= elements.stop
                    or (rows.start + len(target)) * inner <= elements.start
                ):
                    continue
                # The two highest words of the counter are the stream's place, so streams do not overlap.
                generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, index, stream]))
                shape = [len(target), *spec.global_shape[1:]]
                shape[dim] = last - first
                # Generates the full stream even if this rank needs a part of it, so that all ranks agree.
                values = scratch[: math.prod(shape)].reshape(shape)
                generator.standard_normal(out=values, dtype=np.float32)
                kept = values[_slice_along_dim(dim, slice(start - first, stop - first))]
                np.multiply(kept, std, out=target[_slice_along_dim(dim, own)] if dim else target)


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
