"""Merges the shards of all TP ranks into the global parameter, one block of bytes at a time."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

import numpy as np

from megatron.checkpoint.convert.rules import MergePlan, Rule
from megatron.checkpoint.formats.torch_archive import StoredTensor
from megatron.config.errors import ConfigError
from megatron.files import open_regular

# Block size of a merged parameter. A worker holds one block, and as many bytes of its shards.
BLOCK_BYTES = 1 << 20
_ITEM_BYTES = 4


class Shard:
    """One TP rank's flat shard of a parameter or moment, in pieces from one or more files.

    Used as a context manager, which keeps the files open.
    """

    def __init__(self, name: str, pieces: Sequence[StoredTensor]) -> None:
        """ConfigError for a dtype other than fp32."""
        self.name = name
        self._pieces = [piece for piece in pieces if piece.numel]
        for piece in self._pieces:
            if piece.dtype != "float32" or not piece.is_contiguous:
                raise ConfigError(
                    f"checkpoint file {piece.file.path} holds {name} in {piece.dtype}, expected float32"
                )
        self._ends = list(accumulate(piece.numel for piece in self._pieces))
        self._descriptors: list[int] = []

    @property
    def numel(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __enter__(self) -> Shard:
        for piece in self._pieces:
            with open_regular(piece.file.path) as file:
                self._descriptors.append(os.dup(file.fileno()))
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def read(self, start: int, target: np.ndarray) -> None:
        """Fills `target`, contiguous fp32, with the elements from `start` on."""
        flat, done = memoryview(target.reshape(-1)).cast("B"), 0
        while done < len(flat):
            element = start + done // _ITEM_BYTES
            index = bisect_right(self._ends, element)
            piece = self._pieces[index]
            offset = element - (self._ends[index] - piece.numel)
            length = min(len(flat) - done, (piece.numel - offset) * _ITEM_BYTES)
            part = flat[done : done + length]
            if not _read_fully(self._descriptors[index], part, piece.begin + offset * _ITEM_BYTES):
                raise ConfigError(
                    f"checkpoint file {piece.file.path} ends before {self.name} does: it is truncated"
                )
            done += length


class ReplicaMismatch:
    """The largest difference between replicas on TP ranks so far."""

    def __init__(self) -> None:
        self.largest = 0.0

    def update(self, one: np.ndarray, other: np.ndarray) -> bool:
        """Compares two replicas; returns whether they differ."""
        if memoryview(one).cast("B") == memoryview(other).cast("B"):
            return False
        difference = float(np.abs(one - other).max())
        # Non-finite values are only equal if their bits are.
        self.largest = max(self.largest, difference if difference == difference else float("inf"))
        return self.largest > 0.0


def merged_blocks(
    plan: MergePlan, shards: Sequence[Shard], mismatch: ReplicaMismatch
) -> Iterator[np.ndarray]:
    """Yields the elements of the global tensor in order, without padding. Each block is valid until the next.

    shards: those of all TP ranks, in order. If replicas differ, their mean is yielded and `mismatch`
    updated. Raises ConfigError if a shard does not have the size that the plan requires.
    """
    saved = prod((plan.saved_rows, *plan.shape[1:]))
    expected = saved // len(shards) if plan.is_sharded else saved
    for rank, shard in enumerate(shards):
        if shard.numel != expected:
            raise ConfigError(
                f"{plan.name}: TP rank {rank} holds {shard.numel:,} elements, expected {expected:,} of "
                f"a tensor of shape {plan.shape}: the files are from different checkpoints"
            )
    if not plan.is_sharded:
        return _mean_of_replicas(shards, mismatch)
    if plan.rule is Rule.ROWS and len(shards) > 1:
        return _interleave_columns(plan, shards)
    return _concat_rows(plan, shards)


def _concat_rows(plan: MergePlan, shards: Sequence[Shard]) -> Iterator[np.ndarray]:
    """Sharded along dimension 0: elements that are consecutive in a shard are consecutive in the result."""
    left = prod(plan.shape)
    buffer = np.empty(min(BLOCK_BYTES // _ITEM_BYTES, left), np.float32)
    for block in range(plan.num_fused_parts):
        for shard in shards:
            length = shard.numel // plan.num_fused_parts
            for start in range(0, min(length, left), len(buffer)):
                part = buffer[: min(len(buffer), length - start, left - start)]
                shard.read(block * length + start, part)
                yield part
            left -= min(length, left)


def _interleave_columns(plan: MergePlan, shards: Sequence[Shard]) -> Iterator[np.ndarray]:
    """Sharded along dimension 1: each row of the result is a concatenation of one row of every shard."""
    rows, columns = plan.shape
    width = columns // len(shards)
    step = min(max(BLOCK_BYTES // (columns * _ITEM_BYTES), 1), rows)
    block, part = np.empty((step, columns), np.float32), np.empty((step, width), np.float32)
    for first in range(0, rows, step):
        height = min(step, rows - first)
        for rank, shard in enumerate(shards):
            shard.read(first * width, part[:height])
            block[:height, rank * width : (rank + 1) * width] = part[:height]
        yield block[:height]


def _mean_of_replicas(shards: Sequence[Shard], mismatch: ReplicaMismatch) -> Iterator[np.ndarray]:
    """Replicated: every rank has the global tensor."""
    numel = shards[0].numel
    step = min(max(BLOCK_BYTES // _ITEM_BYTES // len(shards), 1), numel)
    buffers = [np.empty(step, np.float32) for _ in shards]
    for start in range(0, numel, step):
        parts = [buffer[: numel - start] for buffer in buffers]
        for shard, part in zip(shards, parts, strict=True):
            shard.read(start, part)
        differ = [mismatch.update(parts[0], part) for part in parts[1:]]
        yield np.mean(parts, axis=0, dtype=np.float32) if any(differ) else parts[0]


def _read_fully(descriptor: int, target: memoryview, offset: int) -> bool:
    """Fills `target`; False if the file ends before. A single call of preadv reads at most 2 GB."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            return False
        done += count
    return True
