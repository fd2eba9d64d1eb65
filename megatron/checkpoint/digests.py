"""Digests of global parameters and moments, equal on every layout.

The digest of a tensor is a sum over its elements, modulo 2^64. Each element adds its 32 bits times an odd
64-bit key, which is a hash of its position in the global tensor. The order of a sum does not matter, so each
rank sums its own elements. One changed element always changes the digest, because an odd key has an inverse.
Several changes cancel with a probability of about 2^-60. The digest detects errors, not forgeries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.layout import ParallelLayout, TPGroup
from megatron.mpu.parameters import ParameterSpec, local_shape, local_slices
from megatron.mpu.random import mix64
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.optimizer.zero import LocalParamState

# Elements per chunk: their positions and keys fit in a core's cache.
CHUNK = 1 << 16
_WORD = 1 << 64


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


class UnquantizedDigests:
    """This rank's part of the digests of moments as read from a checkpoint, before the moments are rounded to
    8 bits: parameter -> state -> digest."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, int]] = {}

    def add(self, part: LocalParamState) -> None:
        """Adds the digests of a part of a parameter's moments."""
        digests = fragment_digests(part.spec, part.tp_group, part.start, part.values)
        self.parts.setdefault(part.name, {}).update(digests)


def digest_state(
    optimizer: MixedPrecisionOptimizer, layout: ParallelLayout, unquantized: UnquantizedDigests | None = None
) -> StateDigests:
    """Returns the digests of the optimizer state of all ranks, on every rank. Collective.

    unquantized: replaces the digests of the moments that it contains.
    """
    read_parts = unquantized.parts if unquantized is not None else {}
    place = (layout.pipeline_stage, layout.dp_rank if optimizer.partition_count == 1 else 0)
    own: dict[str, dict[str, int]] = {}
    sharded: set[str] = set()
    quantized: set[str] = set()
    steps: set[float] = set()
    for part in optimizer.local_param_states():
        digests = fragment_digests(part.spec, part.tp_group, part.start, part.values)
        own[part.name] = digests | read_parts.get(part.name, {})
        if part.spec.shard_dim is not None:
            sharded.add(part.name)
        if part.quantized:
            quantized.add(part.name)
        if part.step is not None:
            steps.add(part.step)
    record = (place, layout.tp_rank, own, sharded, quantized, steps)
    records: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(record, records if dist.get_rank() == 0 else None)
    result: list[Any] = [_combined(records) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result)
    return result[0]


def fragment_digests(
    spec: ParameterSpec, tp_group: TPGroup, start: int, values: Mapping[str, Tensor]
) -> dict[str, int]:
    """Returns the contribution of a fragment of this rank's shard to the digests of the global tensors.

    start: index of the fragment's first element in the shard. values: state -> flat fp32 tensor; all have one
    length. Padded rows of the vocabulary add 0.
    """
    length, device = next((value.numel(), value.device) for value in values.values())
    sums = {state: torch.zeros((), dtype=torch.int64, device=device) for state in values}
    num_valid_elements = None if spec.num_valid_rows is None else math.prod(spec.valid_shape)
    for first in range(0, length, CHUNK):
        last = min(first + CHUNK, length)
        local = torch.arange(start + first, start + last, device=device)
        positions = _global_positions(spec, tp_group, local)
        keys = mix64(positions) | 1
        if num_valid_elements is not None:
            keys *= positions < num_valid_elements
        for state, value in values.items():
            sums[state] += (keys * value[first:last].contiguous().view(torch.int32)).sum()
    return {state: int(total) % _WORD for state, total in sums.items()}


def _global_positions(spec: ParameterSpec, tp_group: TPGroup, local: Tensor) -> Tensor:
    """Converts positions in this rank's flat shard to positions in the flat global tensor."""
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


def _combined(records: list[Any]) -> StateDigests:
    """Sums the parts of each replica and compares the replicas. Tied weights have replicas on several stages,
    replicated parameters on TP ranks, and without ZeRO all parameters on data-parallel ranks."""
    replicas: dict[tuple[str, str], dict[Any, int]] = {}
    steps: set[float] = set()
    quantized: set[str] = set()
    for place, tp_rank, own, sharded, rank_quantized, rank_steps in records:
        steps |= rank_steps
        quantized |= rank_quantized
        for name, digests in own.items():
            replica = place if name in sharded else (*place, tp_rank)
            for state, part in digests.items():
                sums = replicas.setdefault((state, name), {})
                sums[replica] = (sums.get(replica, 0) + part) % _WORD
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
