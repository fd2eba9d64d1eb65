"""Digests of elements in host memory, without torch, for the process that writes checkpoints.

`megatron.checkpoint.digests` defines the digests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.mpu.mesh import Axis
from megatron.mpu.mix64 import mix64_in_place
from megatron.mpu.parameter_spec import ParameterSpec, boxes

# Elements per block: the positions and keys of a block fit into a core's cache.
CHUNK = 1 << 16
# Number of first blocks whose keys are cached (64 MB): most of the time of a digest is spent on keys.
_KEPT_BLOCKS = 128
_WORD = 1 << 64


def add_part(digests: dict[Any, int], key: Any, part: int) -> None:
    """Adds the digest of some elements of a tensor to the sum for the tensor, `digests[key]`."""
    digests[key] = (digests.get(key, 0) + part) % _WORD


def host_digests(
    spec: ParameterSpec, axes: Sequence[Axis], start: int, values: Mapping[str, npt.NDArray[np.float32]]
) -> dict[str, int]:
    """Returns a fragment's contribution to the digests of the global tensors: state -> digest. A fragment is
    a range of elements of this rank's shard.

    start: index of the fragment's first element in the shard. values: state -> flat fp32 array; all arrays
    have one length. Padded rows of the vocabulary add 0.
    """
    digests = dict.fromkeys(values, 0)
    for first, keys in _keys_of_fragment(spec, axes, start, len(next(iter(values.values())))):
        for state, value in values.items():
            products = np.multiply(keys, value[first : first + len(keys)].view(np.int32))
            add_part(digests, state, int(products.sum()))
    return digests


def _keys_of_fragment(
    spec: ParameterSpec, axes: Sequence[Axis], start: int, length: int
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yields the keys of a fragment's elements, block by block: (index of the block's first element,
    keys)."""
    if any(axis.size > 1 for axis in axes) or spec.num_valid_rows is not None:
        for first, positions in global_positions(spec, axes, start, length, CHUNK, np.arange):
            yield first, _keys(positions)
        return
    done = 0
    while done < length:
        block, within = divmod(start + done, CHUNK)
        count = min(CHUNK - within, length - done)
        if block < _KEPT_BLOCKS:
            yield done, _keys_of_block(block, CHUNK)[within : within + count]
        else:
            yield done, _keys(np.arange(start + done, start + done + count))
        done += count


@lru_cache(maxsize=_KEPT_BLOCKS)
def _keys_of_block(block: int, size: int) -> npt.NDArray[np.int64]:
    """Returns the keys of a block of positions. All states of all parameters use the same keys."""
    return _keys(np.arange(block * size, (block + 1) * size))


def _keys(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the odd keys of some positions."""
    keys = positions.astype(np.uint64)
    mix64_in_place(keys)
    keys |= np.uint64(1)
    return keys.view(np.int64)


def global_positions(
    spec: ParameterSpec,
    axes: Sequence[Axis],
    start: int,
    length: int,
    limit: int,
    arange: Callable[[int, int, int], Any],
) -> Iterator[tuple[int, Any]]:
    """Yields the positions of a fragment's elements in the flattened global tensor, block by block: (index of
    the block's first element, positions). Padding has no positions.

    limit: the largest number of elements in a block. arange: returns the positions (first, end, step) as an
    array of numpy or of torch.
    """
    # A block of whole rows is one box.
    row = math.prod(spec.local_shape(axes)[min((dim for dim, *_ in spec.sharding), default=0) :])
    step = limit - limit % row if row <= limit else limit
    strides = [math.prod(spec.global_shape[dim + 1 :]) for dim in range(len(spec.global_shape))]
    first = start
    while first < start + length:
        end = min((first // step + 1) * step, start + length)
        for box in boxes(spec, axes, first, end):
            positions = arange(0, 1, 1)
            for offset, size, stride in zip(box.offsets, box.sizes, strides, strict=True):
                along = arange(offset * stride, (offset + size) * stride, stride)
                positions = (positions[:, None] + along).reshape(-1)
            yield box.first - start, positions
        first = end
