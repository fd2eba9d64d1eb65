"""Digests of global parameters and moments, equal on every layout.

The digest of a tensor is a sum over its elements, modulo 2^64. Each element adds its 32 bits times an odd
64-bit key, which is a hash of its position in the global tensor. The order of a sum does not matter, so each
rank sums its own elements. One changed element always changes the digest, because an odd key has an inverse.
Several changes cancel with a probability of about 2^-60. The digest detects errors, not forgeries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.host_digests import add_part, global_positions, host_digests
from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.mix64 import mix64
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.pieces import Piece
from megatron.mpu.world import broadcast_from_rank_0

if TYPE_CHECKING:
    from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer

# Elements per block on a device. Large blocks need few kernel launches; the temporaries of a block (four
# values of 8 bytes per element) take 64 MiB.
DEVICE_CHUNK = 1 << 21
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
    """One rank's contribution to the digests of all parameters and moments."""

    digests: dict[str, dict[str, int]] = field(default_factory=dict)
    """Parameter -> state ('fp32', 'exp_avg', ...) -> digest of this rank's elements."""
    replicas: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter -> the replica that this rank's elements belong to, see `Mesh.replica_of`."""
    quantized: set[str] = field(default_factory=set)
    steps: set[float] = field(default_factory=set)


def digest_state(
    optimizer: MixedPrecisionOptimizer, mesh: Mesh, unquantized: PartDigests | None = None
) -> StateDigests:
    """Returns the digests of the optimizer state of all ranks, on every rank. Collective.

    unquantized: the digests of this rank's moments before they were rounded to 8 bits. They replace the
    digests of the rounded moments.
    """

    def digests_of(piece: Piece) -> dict[str, int]:
        return piece_digests(piece) | (unquantized or {}).get(piece.name, {})

    own = rank_digests(optimizer.pieces(), mesh, optimizer.is_partitioned, digests_of)
    records: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(own, records if dist.get_rank() == 0 else None)
    shared = broadcast_from_rank_0(combined(records) if dist.get_rank() == 0 else None)
    assert shared is not None
    return shared


def rank_digests(
    pieces: Iterable[Piece],
    mesh: Mesh,
    is_partitioned: bool,
    digests_of: Callable[[Piece], dict[str, int]],
) -> RankDigests:
    """Returns this rank's contribution to the digests. is_partitioned: see `Mesh.replica_of`. digests_of:
    returns the digests of a piece, state -> digest."""
    own = RankDigests()
    for piece in pieces:
        own.digests[piece.name] = digests_of(piece)
        own.replicas[piece.name] = mesh.replica_of(piece.spec, is_partitioned)
        if piece.quantized:
            own.quantized.add(piece.name)
        if piece.step is not None:
            own.steps.add(piece.step)
    return own


def piece_digests(piece: Piece) -> dict[str, int]:
    """Returns a piece's contribution to the digests of the full parameter and its moments: state ->
    digest."""
    return fragment_digests(piece.spec, piece.axes, piece.start, piece.values)


def fragment_digests(
    spec: ParameterSpec, axes: Sequence[Axis], start: int, values: Mapping[str, Tensor]
) -> dict[str, int]:
    """Returns a fragment's contribution to the digests of the global tensors: state -> digest. A fragment is
    a range of elements of this rank's shard.

    start: index of the fragment's first element in the shard. values: state -> flat fp32 tensor; all tensors
    have one length. Padded rows of the vocabulary add 0.
    """
    device = next(iter(values.values())).device
    if device.type == "cpu":
        arrays = {state: value.numpy() for state, value in values.items()}
        return host_digests(spec, axes, start, arrays)
    sums = {state: torch.zeros((), dtype=torch.int64, device=device) for state in values}
    length = len(next(iter(values.values())))
    arange = partial(torch.arange, device=device)
    for first, positions in global_positions(spec, axes, start, length, DEVICE_CHUNK, arange):
        keys = mix64(positions) | 1
        for state, value in values.items():
            sums[state] += (keys * value[first : first + len(keys)].contiguous().view(torch.int32)).sum()
    return {state: int(total) % 2**64 for state, total in sums.items()}


def combined(records: Sequence[RankDigests]) -> StateDigests:
    """Sums the contributions to each replica and compares the replicas. Tied weights have replicas on several
    pipeline stages, replicated parameters on all tensor-parallel ranks, and without ZeRO all parameters on
    all data-parallel ranks."""
    replicas: dict[tuple[str, str], dict[Any, int]] = {}
    steps: set[float] = set()
    quantized: set[str] = set()
    for rank in records:
        steps |= rank.steps
        quantized |= rank.quantized
        for name, digests in rank.digests.items():
            for state, part in digests.items():
                add_part(replicas.setdefault((state, name), {}), rank.replicas[name], part)
    tensors: dict[str, dict[str, str]] = {}
    for (state, name), sums in sorted(replicas.items()):
        # The digest is the first replica's: loading reads from the first stage and rank with the parameter.
        tensors.setdefault(state, {})[name] = f"{sums[min(sums)]:016x}"
    mismatched = [
        f"{state} of {name}" for (state, name), sums in replicas.items() if len(set(sums.values())) > 1
    ]
    if len(steps) > 1:
        mismatched.append(f"number of updates ({', '.join(str(int(step)) for step in sorted(steps))})")
    return StateDigests(tensors, min(steps, default=None), frozenset(quantized), tuple(sorted(mismatched)))
