"""Parameters that know their whole: shape, how it is cut over the tensor ranks, and how it starts.

The initial values of a parameter are a function of (seed, global name, position in the whole), so every
layout starts from the same weights, and a rank makes its own shard and nothing else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from megatron.mpu.layout import TensorGroup

# Random numbers are drawn in independent streams, one per this many rows (or columns) of the whole parameter.
_UNITS_PER_STREAM = 64


@dataclass(frozen=True)
class ParameterSpec:
    """What a parameter is in the whole model, whichever part of it a rank holds.

    whole_shape: shape of the whole parameter, over all tensor ranks.
    shard_dim: the dimension that is cut over the tensor ranks; None if each of them holds the whole.
    blocks: the whole is this many equal blocks along shard_dim, each cut over the ranks (a gated MLP has 2).
    init_std: standard deviation of the normal distribution it starts from; None: it starts as init_value.
    used_rows: rows of the whole beyond these are padding and start as zeros.
    weight_decay: whether the optimizer decays it.
    rate_factor: what the learning rate is multiplied by for it.
    """

    whole_shape: tuple[int, ...]
    shard_dim: int | None = None
    blocks: int = 1
    init_std: float | None = None
    init_value: float = 0.0
    used_rows: int | None = None
    weight_decay: bool = True
    rate_factor: float = 1.0


def spec_of(parameter: torch.Tensor) -> ParameterSpec:
    """The spec of a parameter made by `new_parameter`; ValueError for any other tensor."""
    spec = getattr(parameter, "spec", None)
    if not isinstance(spec, ParameterSpec):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} has no ParameterSpec: use new_parameter"
        )
    return spec


def local_slices(spec: ParameterSpec, tensor: TensorGroup) -> tuple[slice, ...]:
    """Where this rank's shard lies in the whole, along shard_dim (dim 0 if replicated): one slice per block.

    The shard is these slices, one after the other.
    """
    if spec.shard_dim is None:
        return (slice(0, spec.whole_shape[0]),)
    units = spec.whole_shape[spec.shard_dim]
    if units % (spec.blocks * tensor.size) != 0:
        raise ValueError(
            f"dimension {spec.shard_dim} of a parameter of shape {spec.whole_shape} cannot be cut into "
            f"{spec.blocks} blocks x {tensor.size} tensor ranks"
        )
    block = units // spec.blocks
    width = block // tensor.size
    starts = [index * block + tensor.rank * width for index in range(spec.blocks)]
    return tuple(slice(start, start + width) for start in starts)


def local_shape(spec: ParameterSpec, tensor: TensorGroup) -> tuple[int, ...]:
    """Shape of this rank's shard."""
    if spec.shard_dim is None:
        return spec.whole_shape
    shape = list(spec.whole_shape)
    shape[spec.shard_dim] = sum(part.stop - part.start for part in local_slices(spec, tensor))
    return tuple(shape)


def shard_of(spec: ParameterSpec, whole: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
    """Cut this rank's shard out of `whole`. The result may share memory with it."""
    if spec.shard_dim is None:
        return whole
    dim = spec.shard_dim
    parts = [whole.narrow(dim, part.start, part.stop - part.start) for part in local_slices(spec, tensor)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def merge_shards(spec: ParameterSpec, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put the whole together from the shards of all tensor ranks, in rank order.

    Of a replicated parameter the first copy is returned: whether the copies agree is for the caller to check.
    """
    if spec.shard_dim is None or len(shards) == 1:
        return shards[0]
    per_rank = [shard.chunk(spec.blocks, spec.shard_dim) for shard in shards]
    return torch.cat([blocks[index] for index in range(spec.blocks) for blocks in per_rank], spec.shard_dim)


def new_parameter(spec: ParameterSpec, tensor: TensorGroup, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Make this rank's shard, uninitialised, on torch's default device, with the spec attached."""
    parameter = nn.Parameter(torch.empty(local_shape(spec, tensor), dtype=dtype))
    parameter.spec = spec  # type: ignore[attr-defined]
    if spec.shard_dim is not None:
        # DeepSpeed reads this mark: it counts a parameter without it on tensor rank 0 only.
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    return parameter


def is_counted_here(parameter: torch.Tensor, tensor: TensorGroup) -> bool:
    """Whether this rank counts the parameter, so that over all ranks of a replica each is counted once.

    Norms, numbers of zeros and numbers of parameters are summed over the tensor and pipeline ranks with this.
    A replicated parameter counts on tensor rank 0; a tied copy, which DeepSpeed marks on all stages but the
    first of its holders, nowhere.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return spec_of(parameter).shard_dim is not None or tensor.rank == 0


def mark_partial_gradient(parameter: torch.Tensor) -> None:
    """Says that each tensor rank computes a part of this replicated parameter's gradient, to be summed."""
    parameter.has_partial_gradient = True  # type: ignore[attr-defined]


def has_partial_gradient(parameter: torch.Tensor) -> bool:
    """Whether the gradients of the tensor ranks have to be summed: see `mark_partial_gradient`."""
    return getattr(parameter, "has_partial_gradient", False)


def initialize_parameters(module: nn.Module, seed: int, tensor: TensorGroup) -> None:
    """Fill every parameter of `module`, in place, with values that depend on the seed and its full name only.

    They are made on the CPU in fp32 and rounded to the parameter's type, so every device gets the same ones.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(initial_values(spec_of(parameter), seed, name, tensor))


def initial_values(spec: ParameterSpec, seed: int, name: str, tensor: TensorGroup) -> torch.Tensor:
    """This rank's shard of the values that the parameter called `name` starts from, fp32, on the CPU."""
    shard = np.empty(local_shape(spec, tensor), dtype=np.float32)
    if spec.init_std is None:
        shard.fill(spec.init_value)
    else:
        _fill_normal(shard, spec, seed, name, tensor)
    if spec.used_rows is not None:
        _zero_padding(shard, spec, tensor)
    return torch.from_numpy(shard)


def _fill_normal(shard: np.ndarray, spec: ParameterSpec, seed: int, name: str, tensor: TensorGroup) -> None:
    dim = spec.shard_dim or 0
    units = spec.whole_shape[dim]
    std = np.float32(spec.init_std)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8")
    scratch = np.empty(_UNITS_PER_STREAM * (math.prod(spec.whole_shape) // units), dtype=np.float32)
    offset = 0
    for part in local_slices(spec, tensor):
        for stream in range(part.start // _UNITS_PER_STREAM, -(-part.stop // _UNITS_PER_STREAM)):
            first = stream * _UNITS_PER_STREAM
            last = min(first + _UNITS_PER_STREAM, units)
            shape = list(spec.whole_shape)
            shape[dim] = last - first
            # The counter's highest word is the stream's number: no stream is long enough to reach the next.
            generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, stream]))
            values = scratch[: math.prod(shape)].reshape(shape)
            generator.standard_normal(out=values, dtype=np.float32)
            # The stream is made whole, however little of it this rank holds, so it is the same on all ranks.
            start, stop = max(first, part.start), min(last, part.stop)
            kept = _along(dim, slice(start - first, stop - first))
            place = _along(dim, slice(offset + start - part.start, offset + stop - part.start))
            np.multiply(values[kept], std, out=shard[place])
        offset += part.stop - part.start


def _zero_padding(shard: np.ndarray, spec: ParameterSpec, tensor: TensorGroup) -> None:
    if spec.shard_dim not in (None, 0) or spec.blocks != 1:
        raise ValueError(f"used_rows needs a parameter that is whole or cut along its rows, not {spec}")
    first_row = local_slices(spec, tensor)[0].start
    shard[max((spec.used_rows or 0) - first_row, 0) :] = 0.0


def _along(dim: int, part: slice) -> tuple[slice, ...]:
    return (slice(None),) * dim + (part,)
