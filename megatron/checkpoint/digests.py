"""Digests of global parameters and moments, equal on every layout.

The digest of a tensor is the sum over its elements of (their 32 bits) x (an odd 64-bit key, a hash of the
position in the global tensor), modulo 2^64. A sum does not depend on its order, so each rank sums its own
elements. One changed element always changes the digest, because an odd key has an inverse. Several changes
cancel with a probability of about 2^-60. The digest detects errors, not forgeries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.layout import ParallelLayout, TPGroup
from megatron.mpu.parameters import ParameterSpec, local_shape, local_slices
from megatron.mpu.random import mix64
from megatron.mpu.world import of_rank_0

if TYPE_CHECKING:  # they import DeepSpeed, which takes seconds in the process that writes files
    from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
    from megatron.optimizer.zero import LocalParamState

# Elements per step: their positions and keys fit in a core's cache.
CHUNK = 1 << 16
_WORD = 1 << 64


@dataclass(frozen=True)
class StateDigests:
    """Digests of the state of all optimizers of a run."""

    tensors: dict[str, dict[str, str]]
    """Digest in hex by kind ('fp32', 'exp_avg', ...) and parameter."""
    step: float | None
    """Number of updates, if the optimizer counts them."""
    quantized: frozenset[str]
    """The parameters with 8-bit moments."""
    mismatched: tuple[str, ...]
    """'<kind> of <parameter>' whose replicas on several ranks differ."""


@dataclass
class RankDigests:
    """One rank's part of the digests of all parameters and moments."""

    place: tuple[int, int]
    """Pipeline stage, and the data-parallel rank if each replica has the whole optimizer state, else 0."""
    tp_rank: int
    digests: dict[str, dict[str, int]] = field(default_factory=dict)
    """By parameter and kind."""
    sharded: set[str] = field(default_factory=set)
    """The parameters that are divided over tensor-parallel ranks."""
    quantized: set[str] = field(default_factory=set)
    steps: set[float] = field(default_factory=set)


class UnquantizedDigests:
    """This rank's part of the digests of moments as read from a checkpoint, before they are rounded to 8
    bits: parameter -> kind -> digest."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, int]] = {}

    def add(self, part: LocalParamState) -> None:
        """Adds the digest of a part of one moment."""
        digests = fragment_digests(part.spec, part.tp_group, part.start, part.values)
        self.parts.setdefault(part.name, {}).update(digests)


def digest_state(
    optimizer: MixedPrecisionOptimizer, layout: ParallelLayout, unquantized: UnquantizedDigests | None = None
) -> StateDigests:
    """Digests of the optimizer state of all ranks. Collective; every rank gets the result.

    unquantized: digests that are used for the moments that it contains.
    """
    read_parts = unquantized.parts if unquantized is not None else {}
    own = rank_digests(optimizer, layout, lambda part: _computed(part) | read_parts.get(part.name, {}))
    records: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(own, records if dist.get_rank() == 0 else None)
    shared = of_rank_0(combined(records) if dist.get_rank() == 0 else None)
    assert shared is not None
    return shared


def rank_digests(
    optimizer: MixedPrecisionOptimizer,
    layout: ParallelLayout,
    digests_of: Callable[[LocalParamState], dict[str, int]],
) -> RankDigests:
    """This rank's part of the digests. digests_of: the digests of a part of a parameter, by kind."""
    place = (layout.pipeline_stage, layout.dp_rank if optimizer.partition_count == 1 else 0)
    own = RankDigests(place, layout.tp_rank)
    for part in optimizer.local_param_states():
        own.digests[part.name] = digests_of(part)
        if part.spec.shard_dim is not None:
            own.sharded.add(part.name)
        if part.quantized:
            own.quantized.add(part.name)
        if part.step is not None:
            own.steps.add(part.step)
    return own


def _computed(part: LocalParamState) -> dict[str, int]:
    return fragment_digests(part.spec, part.tp_group, part.start, part.values)


def add_part(digests: dict[Any, int], key: Any, part: int) -> None:
    """Adds the digest of some elements of a tensor to the digest of its other elements."""
    digests[key] = (digests.get(key, 0) + part) % _WORD


def fragment_digests(
    spec: ParameterSpec, tp_group: TPGroup, start: int, values: Mapping[str, Tensor]
) -> dict[str, int]:
    """What the elements start, start + 1, ... of this rank's shard add to the digests of the global tensors.

    values: flat fp32 tensors of one length, by kind. Padded rows of the vocabulary add 0.
    """
    length, device = next((value.numel(), value.device) for value in values.values())
    sums = {kind: torch.zeros((), dtype=torch.int64, device=device) for kind in values}
    num_valid_elements = None if spec.num_valid_rows is None else math.prod(spec.valid_shape)
    for first in range(0, length, CHUNK):
        last = min(first + CHUNK, length)
        local = torch.arange(start + first, start + last, device=device)
        positions = _global_positions(spec, tp_group, local)
        keys = mix64(positions) | 1
        if num_valid_elements is not None:
            keys *= positions < num_valid_elements
        for kind, value in values.items():
            sums[kind] += (keys * value[first:last].contiguous().view(torch.int32)).sum()
    return {kind: int(total) % _WORD for kind, total in sums.items()}


def _global_positions(spec: ParameterSpec, tp_group: TPGroup, local: Tensor) -> Tensor:
    """Positions in this rank's flat shard -> positions in the flat global tensor."""
    dim = spec.shard_dim
    if dim is None or tp_group.size == 1:
        return local
    inner = math.prod(spec.global_shape[dim + 1 :])
    units, width = (
        local_shape(spec, tp_group)[dim],
        spec.global_shape[dim] // (spec.num_fused_parts * tp_group.size),
    )
    firsts = torch.tensor([part.start for part in local_slices(spec, tp_group)], device=local.device)
    outer, rest = local // (units * inner), local % (units * inner)
    unit, within = rest // inner, rest % inner
    global_unit = firsts[unit // width] + unit % width
    return (outer * spec.global_shape[dim] + global_unit) * inner + within


def combined(records: Sequence[RankDigests]) -> StateDigests:
    """Sums the parts of each replica, and compares the replicas: tied weights on several stages, replicated
    parameters on TP ranks, and without ZeRO everything on data-parallel ranks."""
    copies: dict[tuple[str, str], dict[Any, int]] = {}
    steps: set[float] = set()
    quantized: set[str] = set()
    for rank in records:
        steps |= rank.steps
        quantized |= rank.quantized
        for name, digests in rank.digests.items():
            copy = rank.place if name in rank.sharded else (*rank.place, rank.tp_rank)
            for kind, part in digests.items():
                add_part(copies.setdefault((kind, name), {}), copy, part)
    tensors: dict[str, dict[str, str]] = {}
    for (kind, name), sums in sorted(copies.items()):
        # A checkpoint is read from the first stage and TP rank that hold a parameter.
        tensors.setdefault(kind, {})[name] = f"{sums[min(sums)]:016x}"
    mismatched = [f"{kind} of {name}" for (kind, name), sums in copies.items() if len(set(sums.values())) > 1]
    if len(steps) > 1:
        mismatched.append(f"number of updates ({', '.join(str(int(step)) for step in sorted(steps))})")
    return StateDigests(tensors, min(steps, default=None), frozenset(quantized), tuple(sorted(mismatched)))
