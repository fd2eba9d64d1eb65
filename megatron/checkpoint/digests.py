"""Digests of global parameters and moments, equal on every layout.

The digest of a tensor is a sum over its elements, modulo 2^64. Each element adds its 32 bits times an odd
64-bit key, which is a hash of its position in the global tensor. The order of a sum does not matter, so each
rank sums its own elements. One changed element always changes the digest, because an odd key has an inverse.
Several changes cancel with a probability of about 2^-60. The digest detects errors, not forgeries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.layout import ParallelLayout, TPGroup
from megatron.mpu.mix64 import mix64, mix64_in_place
from megatron.mpu.parameters import ParameterSpec, local_shape, shard_boxes
from megatron.mpu.world import broadcast_from_rank_0

if TYPE_CHECKING:  # they import DeepSpeed, which takes seconds in the process that writes files
    from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
    from megatron.optimizer.zero import LocalParamState

# Elements per block: their positions and keys fit in a core's cache.
CHUNK = 1 << 16
# On a device large blocks need few launches.
DEVICE_CHUNK = 1 << 24
# Keys of the first blocks of positions are kept, 64 MB: computing them takes most of the time of a digest.
_KEPT_BLOCKS = 128
_WORD = 1 << 64
# Parameter -> state -> digest of a rank's part.
PartDigests = dict[str, dict[str, int]]


@dataclass(frozen=True)
class StateDigests:
    """Digests of the state of all optimizers of a run."""

    tensors: dict[str, dict[str, str]]
    """State ('fp32', 'exp_avg', ...) -> parameter -> digest in hex."""
    step: float | None
    """Number of updates, if the optimizer counts them."""
    quantized: frozenset[str]
    """The parameters with 8-bit moments."""
    mismatched: tuple[str, ...]
    """'<state> of <parameter>' for each state whose replicas on several ranks differ."""


@dataclass
class RankDigests:
    """One rank's part of the digests of all parameters and moments."""

    place: tuple[int, int]
    """Pipeline stage, and the data-parallel rank if each replica has the whole optimizer state, else 0."""
    tp_rank: int
    digests: dict[str, dict[str, int]] = field(default_factory=dict)
    """By parameter and state."""
    sharded: set[str] = field(default_factory=set)
    """The parameters that are divided over tensor-parallel ranks."""
    quantized: set[str] = field(default_factory=set)
    steps: set[float] = field(default_factory=set)


def digest_state(
    optimizer: MixedPrecisionOptimizer, layout: ParallelLayout, unquantized: PartDigests | None = None
) -> StateDigests:
    """Returns the digests of the optimizer state of all ranks, on every rank. Collective.

    unquantized: digests of this rank's moments before they were rounded to 8 bits, which replace the digests
    of the rounded moments.
    """
    is_replicated = optimizer.partition_count == 1

    def digests_of(part: LocalParamState) -> dict[str, int]:
        return part_digests(part) | (unquantized or {}).get(part.name, {})

    own = rank_digests(optimizer.local_param_states(), layout, is_replicated, digests_of)
    records: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(own, records if dist.get_rank() == 0 else None)
    shared = broadcast_from_rank_0(combined(records) if dist.get_rank() == 0 else None)
    assert shared is not None
    return shared


def rank_digests(
    parts: Iterable[LocalParamState],
    layout: ParallelLayout,
    is_replicated: bool,
    digests_of: Callable[[LocalParamState], dict[str, int]],
) -> RankDigests:
    """Returns this rank's part of the digests. is_replicated: whether each data-parallel rank has the whole
    state. digests_of: returns the digests of a part of a parameter, by state."""
    place = (layout.pipeline_stage, layout.dp_cp_rank if is_replicated else 0)
    own = RankDigests(place, layout.tp_rank)
    for part in parts:
        own.digests[part.name] = digests_of(part)
        if part.spec.shard_dim is not None:
            own.sharded.add(part.name)
        if part.quantized:
            own.quantized.add(part.name)
        if part.step is not None:
            own.steps.add(part.step)
    return own


def part_digests(part: LocalParamState) -> dict[str, int]:
    """Returns the digests of a part of a parameter and its moments, by state."""
    return fragment_digests(part.spec, part.tp_group, part.start, part.values)


def add_part(digests: dict[Any, int], key: Any, part: int) -> None:
    """Adds the digest of some elements of a tensor to the digest of its other elements."""
    digests[key] = (digests.get(key, 0) + part) % _WORD


def fragment_digests(
    spec: ParameterSpec, tp_group: TPGroup, start: int, values: Mapping[str, Tensor]
) -> dict[str, int]:
    """Returns the contribution of a fragment of this rank's shard to the digests of the global tensors.

    start: index of the fragment's first element in the shard. values: state -> flat fp32 tensor; all have one
    length. Padded rows of the vocabulary add 0.
    """
    length, device = next((value.numel(), value.device) for value in values.values())
    sums = {state: torch.zeros((), dtype=torch.int64, device=device) for state in values}
    if device.type == "cpu" and tp_group.size == 1 and spec.num_valid_rows is None:
        blocks = _consecutive_keys(start, length)
    else:
        blocks = _keys_of_shard(spec, tp_group, start, length, device)
    for first, keys in blocks:
        for state, value in values.items():
            bits = value[first : first + len(keys)].contiguous().view(torch.int32)
            sums[state] += _sum_of_products(keys, bits)
    return {state: int(total) % _WORD for state, total in sums.items()}


def _consecutive_keys(start: int, length: int) -> Iterator[tuple[int, Tensor]]:
    """Yields the keys of consecutive positions, block by block: (index of the first one, keys)."""
    done = 0
    while done < length:
        block, within = divmod(start + done, CHUNK)
        count = min(CHUNK - within, length - done)
        if block < _KEPT_BLOCKS:
            keys = _block_keys(block, CHUNK)[within : within + count]
        else:
            keys = _keys(torch.arange(start + done, start + done + count))
        yield done, keys
        done += count


@lru_cache(maxsize=_KEPT_BLOCKS)
def _block_keys(block: int, size: int) -> Tensor:
    """Returns the keys of a block of positions. All states of all parameters share them."""
    return _keys(torch.arange(block * size, (block + 1) * size))


def _keys_of_shard(
    spec: ParameterSpec, tp_group: TPGroup, start: int, length: int, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Yields (index of the first element, keys) of the blocks of a fragment. Padding has no keys."""
    limit = CHUNK if device.type == "cpu" else DEVICE_CHUNK
    # Blocks of whole rows are one box each.
    row = math.prod(local_shape(spec, tp_group)[spec.shard_dim or 0 :])
    step = limit - limit % row if row <= limit else limit
    strides = [math.prod(spec.global_shape[dim + 1 :]) for dim in range(len(spec.global_shape))]
    first = start
    while first < start + length:
        end = min((first // step + 1) * step, start + length)
        for box in shard_boxes(spec, tp_group, first, end):
            positions = torch.zeros((), dtype=torch.int64, device=device)
            for offset, size, stride in zip(box.offsets, box.sizes, strides, strict=True):
                along = torch.arange(offset * stride, (offset + size) * stride, stride, device=device)
                positions = positions[..., None] + along
            yield box.first - start, _keys(positions.view(-1))
        first = end


def _keys(positions: Tensor) -> Tensor:
    """Returns the odd keys of some positions."""
    if positions.device.type != "cpu":
        return mix64(positions) | 1
    keys = positions.numpy().astype(np.uint64)
    mix64_in_place(keys)
    keys |= np.uint64(1)
    return torch.from_numpy(keys.view(np.int64))


def _sum_of_products(keys: Tensor, bits: Tensor) -> Tensor | int:
    """Returns the sum, modulo 2^64, of the keys times the bits of elements."""
    if keys.device.type != "cpu":
        return (keys * bits).sum()
    return int(np.multiply(keys.numpy(), bits.numpy()).sum())


def combined(records: Sequence[RankDigests]) -> StateDigests:
    """Sums the parts of each replica and compares the replicas. Tied weights have replicas on several stages,
    replicated parameters on TP ranks, and without ZeRO all parameters on data-parallel ranks."""
    replicas: dict[tuple[str, str], dict[Any, int]] = {}
    steps: set[float] = set()
    quantized: set[str] = set()
    for rank in records:
        steps |= rank.steps
        quantized |= rank.quantized
        for name, digests in rank.digests.items():
            replica = rank.place if name in rank.sharded else (*rank.place, rank.tp_rank)
            for state, part in digests.items():
                add_part(replicas.setdefault((state, name), {}), replica, part)
    tensors: dict[str, dict[str, str]] = {}
    for (state, name), sums in sorted(replicas.items()):
        # A checkpoint is read from the first stage and TP rank that hold a parameter.
        tensors.setdefault(state, {})[name] = f"{sums[min(sums)]:016x}"
    mismatched = [
        f"{state} of {name}" for (state, name), sums in replicas.items() if len(set(sums.values())) > 1
    ]
    if len(steps) > 1:
        mismatched.append(f"number of updates ({', '.join(str(int(step)) for step in sorted(steps))})")
    return StateDigests(tensors, min(steps, default=None), frozenset(quantized), tuple(sorted(mismatched)))
