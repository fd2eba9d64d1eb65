"""Checks that replicas are equal on all ranks, and that all values are finite (--check-invariants-interval).

Replicas are: the tied embedding on the first and the last stage; parameters that are not sharded, on tensor
ranks; all weights, and the optimizer's state unless ZeRO shards it, on data-parallel ranks. Only their
digests are communicated (see `megatron.checkpoint.verification.digests`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.verification.digests import fragment_digests
from megatron.mpu.layout import ParallelLayout, TPGroup
from megatron.mpu.parameters import ParameterSpec, spec_of
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.text_table import rank_list

_WORD = 1 << 64
# Violations that the sentence names.
_MAX_NAMED = 3
# Elements per digest computation, to bound its memory.
_CHUNK = 1 << 24

# A tensor that is compared: its kind ('weights' in the run's precision, 'fp32' for master weights, or the
# name of a moment), the parameter's name, and the TP rank if the parameter is sharded.
TensorKey = tuple[str, str, int | None]
# The place of a replica: stage, TP rank, DP rank (None if the data-parallel ranks shard the tensor).
ReplicaKey = tuple[int, int, int | None]


@dataclass
class _LocalDigests:
    """The digests of this rank's parts of replicas, and the names of non-finite tensors."""

    rank: int
    parts: dict[tuple[TensorKey, ReplicaKey], int] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)


def find_invariant_violation(optimizer: MixedPrecisionOptimizer, layout: ParallelLayout) -> str | None:
    """One sentence that names replicas that differ and non-finite values, with their ranks; None if
    there are none. The same on every rank. Collective."""
    local = _local_digests(optimizer, layout)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(local, everywhere if dist.get_rank() == 0 else None)
    sentence = [_sentence(everywhere) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sentence)
    return sentence[0]


def _local_digests(optimizer: MixedPrecisionOptimizer, layout: ParallelLayout) -> _LocalDigests:
    held = _LocalDigests(layout.rank)
    place = (layout.pipeline_stage, layout.tp_rank)

    def add(
        kind: str, name: str, is_sharded: bool, dp_rank: int | None, digest: int, is_finite: bool
    ) -> None:
        held.parts[(kind, name, layout.tp_rank if is_sharded else None), (*place, dp_rank)] = digest
        if not is_finite:
            held.not_finite.append(f"{kind} of {name} on rank {layout.rank}")

    optimizer.wait_for_params()
    for flat in optimizer.flat:
        if flat.shards_weights:
            continue  # ZeRO-3: between steps only the partitions exist, which are compared below
        for parameter in flat.parameters:
            spec, weights = spec_of(parameter), parameter.detach().reshape(-1)
            digest, is_finite = _digest(spec, optimizer.tp_group, 0, weights)
            name, is_sharded = optimizer.names[parameter], spec.shard_dim is not None
            add("weights", name, is_sharded, layout.dp_rank, digest, is_finite)
    dp_rank = layout.dp_rank if optimizer.partition_count == 1 else None
    for part in optimizer.local_param_states():
        for kind, values in part.values.items():
            digest, is_finite = _digest(part.spec, part.tp_group, part.start, values)
            add(kind, part.name, part.spec.shard_dim is not None, dp_rank, digest, is_finite)
    if not math.isfinite(optimizer.scaler.scale):
        held.not_finite.append(f"the loss scale on rank {layout.rank}")
    return held


def _digest(spec: ParameterSpec, tp_group: TPGroup, start: int, values: Tensor) -> tuple[int, bool]:
    """The digest of a rank's flat elements from `start` on, in any precision, and whether all are finite."""
    digest, finite = 0, values.new_ones((), dtype=torch.bool)
    for first in range(0, values.numel(), _CHUNK):
        piece = values[first : first + _CHUNK].float()
        digest += fragment_digests(spec, tp_group, start + first, {"": piece})[""]
        finite &= piece.isfinite().all()
    return digest % _WORD, bool(finite)


def _sentence(everywhere: list[_LocalDigests]) -> str | None:
    """The violations in the digests of all ranks."""
    replicas: dict[TensorKey, dict[ReplicaKey, int]] = {}
    holders: dict[tuple[TensorKey, ReplicaKey], list[int]] = {}
    for held in everywhere:
        for (tensor, replica), digest in held.parts.items():
            digests = replicas.setdefault(tensor, {})
            digests[replica] = (digests.get(replica, 0) + digest) % _WORD
            holders.setdefault((tensor, replica), []).append(held.rank)
    found = [what for held in everywhere for what in held.not_finite]
    found = [f"non-finite: {', '.join(found[:_MAX_NAMED])}{_more(found)}"] if found else []
    mismatches = []
    for (kind, name, tp_rank), digests in sorted(replicas.items(), key=lambda item: str(item[0])):
        if len(set(digests.values())) == 1:
            continue
        # Without a majority the first replica is the reference.
        reference = Counter(digests[replica] for replica in sorted(digests, key=str)).most_common(1)[0][0]
        ranks: dict[bool, set[int]] = {True: set(), False: set()}
        for replica, digest in digests.items():
            ranks[digest == reference] |= set(holders[(kind, name, tp_rank), replica])
        mismatches.append(
            f"{kind} of {name} on {rank_list(ranks[False])} differs from {rank_list(ranks[True])}"
        )
    if mismatches:
        found.append(f"replicas differ: {'; '.join(mismatches[:_MAX_NAMED])}{_more(mismatches)}")
    return " and ".join(found) or None


def _more(found: list[str]) -> str:
    return f" (and {len(found) - _MAX_NAMED} more)" if len(found) > _MAX_NAMED else ""
