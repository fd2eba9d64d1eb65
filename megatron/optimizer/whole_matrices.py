"""Assembles whole matrices, from the parts that the ranks hold, for an optimizer that updates whole matrices.

A rank holds an arbitrary part of a matrix: some elements (ZeRO) of a shard (tensor parallelism). Parameters,
momentum and checkpoints are the same as for an elementwise optimizer. Additionally each matrix has an owner
among the ranks of its pipeline stage; all owners have about equal work. In a step

1. each rank sends its elements of each matrix to the owner (all-to-all);
2. the owner computes the update of the whole matrix;
3. the owner sends to each rank the update of the rank's elements (all-to-all).

With ZeRO a rank sends the elements of its partition and receives their updates, which are few bytes compared
with the gradient reduction. Without ZeRO the replicas hold equal elements: one replica sends them, and all
replicas receive the updates.

Invariant: an owner computes with the full matrix, whose shape and order of elements do not depend on the
layout, and all replicas receive the bits of one owner.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import merge_shards, shard_of, spec_of
from megatron.optimizer.flat_group import FlatGroup
from megatron.optimizer.matrix_optimizer import MatrixUpdate
from megatron.shares import share_out


def _cost(spec: ParameterSpec) -> int:
    """Returns a number proportional to the FLOPs of a product of each matrix with its transpose."""
    *stack, all_rows, columns = spec.global_shape
    heights = [rows * all_rows // sum(spec.matrix_rows) for rows in spec.matrix_rows]
    return math.prod(stack) * sum(height * columns * min(height, columns) for height in heights)


@dataclass(frozen=True)
class _Message:
    """The elements `start` to `stop` - 1 of a flattened shard of a matrix, sent from one rank to another.
    source, destination: ranks within the pipeline stage. matrix: index in the list of the stage's
    matrices."""

    source: int
    destination: int
    matrix: int
    shard: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class _Exchange:
    """An all-to-all of all messages that this rank sends or receives."""

    def __init__(self, messages: Iterable[_Message], stage: Axis):
        rank, size = stage.rank, stage.size
        own = [message for message in messages if rank in (message.source, message.destination)]
        # Sorting is stable, so both ranks have the messages between them in the same order.
        self.sent = sorted((m for m in own if m.source == rank), key=lambda m: m.destination)
        self.received = sorted((m for m in own if m.destination == rank), key=lambda m: m.source)
        self._sent_lengths, self._received_lengths = [0] * size, [0] * size
        for message in self.sent:
            self._sent_lengths[message.destination] += message.length
        for message in self.received:
            self._received_lengths[message.source] += message.length
        self._group = stage.group

    def buffer(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, dict[_Message, Tensor]]:
        """Returns a buffer for all messages that this rank sends, and each message's part of the buffer."""
        flat = torch.empty(sum(self._sent_lengths), dtype=dtype, device=device)
        return flat, dict(zip(self.sent, flat.split([m.length for m in self.sent]), strict=True))

    def run(self, sent: Tensor) -> dict[_Message, Tensor]:
        """Sends a buffer, and returns the received messages. It is a collective."""
        received = sent.new_empty(sum(self._received_lengths))
        lengths = self._received_lengths, self._sent_lengths
        dist.all_to_all_single(received, sent, *lengths, group=self._group)
        return dict(zip(self.received, received.split([m.length for m in self.received]), strict=True))


class WholeMatrices:
    """Replaces the momentum, which a rank's gradients hold, by the update of whole matrices: see the module's
    docstring."""

    def __init__(self, flats: Sequence[FlatGroup], mesh: Mesh, matrix_update: MatrixUpdate) -> None:
        self._matrix_update, self._mesh = matrix_update, mesh
        self._held = [(flat, parameter) for flat in flats if flat.matrices for parameter in flat.parameters]
        stage = mesh.stage
        self._exchanges: tuple[_Exchange, _Exchange] | None = None
        if stage.size == 1 or not self._held:
            return
        ranks = [replace(mesh, rank=rank) for rank in mesh.ranks_along(("dp", "cp", "tp"), mesh.rank)]
        gathered, returned = [], []
        places: dict[Any, list[tuple[tuple[int, ...], int, int]]] = {}
        for index, owner in enumerate(_owners([spec_of(p) for _, p in self._held], stage.size)):
            flat, parameter = self._held[index]
            spec, is_partitioned = spec_of(parameter), flat.partitions > 1
            if (key := (spec.axis_names, is_partitioned)) not in places:
                shards = spec.all_shards(mesh.axes)
                places[key] = [
                    (
                        at.replica_of(spec, is_partitioned),
                        shards.index(at.axes_of(spec)),
                        at.reduced_over(spec).rank,
                    )
                    for at in ranks
                ]
            spans, replica_of_owner = flat.spans(parameter), places[key][owner][0]
            for rank, (replica, shard, partition) in enumerate(places[key]):
                span = (0, parameter.numel()) if not is_partitioned else spans.get(partition)
                if span is None:
                    continue
                returned.append(_Message(owner, rank, index, shard, *span))
                # Among the ranks with equal elements, the rank with the owner's coordinates sends them.
                if replica == replica_of_owner:
                    gathered.append(_Message(rank, owner, index, shard, *span))
        both = (_Exchange(messages, stage) for messages in (gathered, returned))
        self._exchanges = next(both), next(both)

    @torch.no_grad()
    def run(self) -> None:
        """Replaces the gradients of the master weights by the updates. It is a collective in the pipeline
        stage."""
        if self._exchanges is None:
            for flat, parameter in self._held:
                gradient = flat.owned_grad(parameter).view(parameter.shape)
                gradient.copy_(self._matrix_update.apply(gradient, spec_of(parameter).matrix_rows))
            return
        gather, give_back = self._exchanges
        device = self._held[0][0].local_gradients.device
        buffer, places = gather.buffer(self._matrix_update.dtype, device)
        for message, place in places.items():
            flat, parameter = self._held[message.matrix]
            place.copy_(_within(flat, parameter, message))
        whole = self._assemble(gather.run(buffer))
        del buffer, places
        buffer, places = give_back.buffer(torch.float32, device)
        self._update_owned(whole, places)
        del places
        for message, update in give_back.run(buffer).items():
            flat, parameter = self._held[message.matrix]
            _within(flat, parameter, message).copy_(update)

    def _assemble(self, received: dict[_Message, Tensor]) -> dict[int, Tensor]:
        """Returns the matrices that this rank owns, by index, assembled from the received elements."""
        shards: dict[int, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        for message, elements in received.items():
            shards[message.matrix][message.shard].append(elements)
        whole = {}
        for index, by_shard in shards.items():
            spec, axes = spec_of(self._held[index][1]), self._mesh.axes
            parts = [torch.cat(by_shard[shard]) for shard in sorted(by_shard)]
            whole[index] = merge_shards(spec, [part.view(spec.local_shape(axes)) for part in parts], axes)
        return whole

    def _update_owned(self, whole: dict[int, Tensor], parts: dict[_Message, Tensor]) -> None:
        """Updates the matrices `whole`, one after the other. parts: the tensors for the parts of the
        updates."""
        messages: dict[int, dict[int, list[_Message]]] = defaultdict(lambda: defaultdict(list))
        for message in parts:
            messages[message.matrix][message.shard].append(message)
        for index, by_shard in messages.items():
            spec, weight = spec_of(self._held[index][1]), whole.pop(index)
            update = self._matrix_update.apply(weight, spec.matrix_rows)
            del weight
            places = spec.all_shards(self._mesh.axes)
            for shard, of_shard in by_shard.items():
                elements = shard_of(update, spec, places[shard]).view(-1)
                for message in of_shard:
                    parts[message].copy_(elements[message.start : message.stop])


def _within(flat: FlatGroup, parameter: nn.Parameter, message: _Message) -> Tensor:
    """Returns the gradient of a message's elements in this rank's partition."""
    first = message.start - flat.first_element(parameter)
    return flat.owned_grad(parameter)[first : first + message.length]


def _owners(specs: Sequence[ParameterSpec], size: int) -> list[int]:
    """Returns the rank that owns each matrix. Rank 0 has the most work, because the planner predicts its
    step."""
    costs = {index: _cost(spec) for index, spec in enumerate(specs)}
    shares = share_out(costs, size)
    work = [0] * size
    for index, share in shares.items():
        work[share] += costs[index]
    rank_of = {share: rank for rank, share in enumerate(sorted(range(size), key=lambda s: (-work[s], s)))}
    return [rank_of[shares[index]] for index in range(len(specs))]
