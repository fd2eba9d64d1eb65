"""Whether what should be equal on several ranks still is, and all of it finite (--check-invariants-interval).

Copies are: of the embedding on the first and the last stage; on tensor ranks, of parameters that are not cut;
on replicas, of all weights, and of the optimizer's state where ZeRO does not share it out. They are compared
by digest (see `megatron.checkpoint.verification.digests`), so that nothing but digests travels.
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
_MAX_NAMED = 3
"""Findings, and ranks, that a sentence names."""
# Elements that are looked at together, which bounds the memory that it takes.
_CHUNK = 1 << 24

# What is compared: 'weights' (in the run's precision), 'fp32' (the master weights) or the name of a moment,
# of a parameter; and of a parameter that is cut the tensor rank.
Subject = tuple[str, str, int | None]
# Which of the copies: stage, tensor rank, data rank; the last is None where replicas share one.
Copy = tuple[int, int, int | None]


@dataclass
class _Held:
    """What a rank holds: its parts of copies, each with its digest, and what of it is not finite."""

    rank: int
    parts: dict[tuple[Subject, Copy], int] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)


def find_invariant_violation(optimizer: MixedPrecisionOptimizer, layout: ParallelLayout) -> str | None:
    """What has drifted and on which ranks, or is not finite, in words that are the same on every rank; None
    if nothing. Collective."""
    held = _held(optimizer, layout)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(held, everywhere if dist.get_rank() == 0 else None)
    sentence = [_sentence(everywhere) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sentence)
    return sentence[0]


def _held(optimizer: MixedPrecisionOptimizer, layout: ParallelLayout) -> _Held:
    held = _Held(layout.rank)
    place = (layout.pipeline_stage, layout.tp_rank)

    def add(
        kind: str, name: str, is_sharded: bool, dp_rank: int | None, digest: int, is_finite: bool
    ) -> None:
        held.parts[(kind, name, layout.tp_rank if is_sharded else None), (*place, dp_rank)] = digest
        if not is_finite:
            held.not_finite.append(f"{kind} of {name} on rank {layout.rank}")

    for flat in optimizer.flat:
        if flat.shards_weights:
            continue  # between steps there is one copy of them: the partitions, which are compared below
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
    """The digest of a rank's flat elements from `start` on, of any precision, and whether all are finite."""
    digest, finite = 0, values.new_ones((), dtype=torch.bool)
    for first in range(0, values.numel(), _CHUNK):
        piece = values[first : first + _CHUNK].float()
        digest += fragment_digests(spec, tp_group, start + first, {"": piece})[""]
        finite &= piece.isfinite().all()
    return digest % _WORD, bool(finite)


def _sentence(everywhere: list[_Held]) -> str | None:
    """What is wrong, of all ranks' records."""
    copies: dict[Subject, dict[Copy, int]] = {}
    holders: dict[tuple[Subject, Copy], list[int]] = {}
    for held in everywhere:
        for (subject, copy), digest in held.parts.items():
            digests = copies.setdefault(subject, {})
            digests[copy] = (digests.get(copy, 0) + digest) % _WORD
            holders.setdefault((subject, copy), []).append(held.rank)
    found = [what for held in everywhere for what in held.not_finite]
    found = [f"not finite: {', '.join(found[:_MAX_NAMED])}{_more(found)}"] if found else []
    drifted = []
    for (kind, name, tp_rank), digests in sorted(copies.items(), key=lambda item: str(item[0])):
        if len(set(digests.values())) == 1:
            continue
        # The first copy's value is the usual one where there is no majority.
        usual = Counter(digests[copy] for copy in sorted(digests, key=str)).most_common(1)[0][0]
        ranks: dict[bool, set[int]] = {True: set(), False: set()}
        for copy, digest in digests.items():
            ranks[digest == usual] |= set(holders[(kind, name, tp_rank), copy])
        drifted.append(
            f"{kind} of {name} on {rank_list(ranks[False])} is not that on {rank_list(ranks[True])}"
        )
    if drifted:
        found.append(f"copies differ: {'; '.join(drifted[:_MAX_NAMED])}{_more(drifted)}")
    return " and ".join(found) or None


def _more(found: list[str]) -> str:
    return f" (and {len(found) - _MAX_NAMED} more)" if len(found) > _MAX_NAMED else ""
