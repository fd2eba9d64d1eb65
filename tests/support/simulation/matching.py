"""Checks whether the collective calls of all ranks match, or whether they would deadlock.

The check assumes that every call blocks its rank until it is complete. A collective is complete when all
ranks of its group have called it, a send or receive when the other rank has called its counterpart. Real
backends block less, so calls that pass this check cannot deadlock because of their order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.mpu.mesh import DENSE, EXPERT, Mesh
from megatron.planner.simulation.device import POINT_TO_POINT, CollectiveCall
from tests.support.simulation.record import StepRecord
from tests.support.simulation.trace import COMMIT

# Calls that a rank issues together: several for a batch of messages, otherwise one.
Batch = tuple[CollectiveCall, ...]
_MOST_NAMED = 4


def rank_calls(record: StepRecord) -> list[Batch]:
    """Returns the calls of the record's rank."""
    batches: list[Batch] = []
    for instruction, count in record.works:
        if instruction.kind.startswith(COMMIT):
            batches += [tuple(count.calls)] if count.calls else []
        else:
            batches += [(call,) for call in count.calls]
    return batches + [(call,) for call in record.outside.calls]


def calls_of_other(calls: Sequence[Batch], simulated: Mesh, other: Mesh) -> list[Batch]:
    """Translates the calls of a simulated rank to a different rank of its stage, which makes equal calls in
    its own process groups."""
    translated: dict[CollectiveCall, CollectiveCall] = {}

    def translate(call: CollectiveCall) -> CollectiveCall:
        if call not in translated:
            ranks = translate_ranks(call.ranks, simulated, other)
            translated[call] = CollectiveCall(call.operation, ranks, call.dtype, call.elements, call.bytes)
        return translated[call]

    return [tuple(map(translate, batch)) for batch in calls]


def translate_ranks(ranks: Sequence[int], simulated: Mesh, other: Mesh) -> tuple[int, ...]:
    """Translates a process group of the rank of `simulated` to the corresponding group of the rank of
    `other`. A coordinate that all members share with the first rank becomes the second rank's coordinate."""
    expert = [simulated.ranks_along((name,), simulated.rank) for name in ("ep", "edp")]
    view = EXPERT if tuple(sorted(ranks)) in expert else DENSE
    own, wanted = simulated.coordinates_of(simulated.rank, view), other.coordinates_of(other.rank, view)
    members = [simulated.coordinates_of(rank, view) for rank in ranks]
    shared = {name: wanted[name] for name in own if all(member[name] == own[name] for member in members)}
    return tuple(sorted(rank_at(simulated, member | shared, view) for member in members))


def rank_at(mesh: Mesh, coordinates: Mapping[str, int], view: Sequence[str] = DENSE) -> int:
    """Inverts `Mesh.coordinates_of`."""
    rank = 0
    for name in view:
        rank = rank * mesh.sizes[name] + coordinates[name]
    return rank


def find_deadlock(calls: Mapping[int, Sequence[Batch]]) -> str | None:
    """Runs the calls of all ranks against each other. calls: rank -> its calls in order. Returns None if all
    calls complete. Otherwise returns a sentence on two calls that do not match, or on the ranks that wait
    forever."""
    world = _World({rank: deque(batches) for rank, batches in calls.items()})
    return world.run()


@dataclass
class _World:
    batches: dict[int, deque[Batch]]
    pending: dict[int, list[CollectiveCall]] = field(default_factory=dict)
    """Rank -> the calls of its current batch that are not complete."""
    collectives: dict[tuple[int, ...], dict[int, CollectiveCall]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    channels: dict[tuple[int, int], tuple[deque, deque]] = field(
        default_factory=lambda: defaultdict(lambda: (deque(), deque()))
    )
    """(source, destination) -> sends and receives without their counterpart."""

    def run(self) -> str | None:
        ready = deque(sorted(self.batches))
        while ready:
            rank = ready.popleft()
            if self.pending.get(rank) or not self.batches[rank]:
                continue
            batch = self.batches[rank].popleft()
            self.pending[rank] = list(batch)
            for call in batch:
                problem, free = self._post(rank, call)
                if problem is not None:
                    return problem
                ready.extend(free)
        return self._waiting()

    def _post(self, rank: int, call: CollectiveCall) -> tuple[str | None, list[int]]:
        """Issues a call of a rank. Returns (a sentence if the call does not match, ranks that can
        continue)."""
        if call.operation in POINT_TO_POINT:
            return self._post_message(rank, call)
        waiting = self.collectives[call.ranks]
        waiting[rank] = call
        if len(waiting) < len(call.ranks):
            return None, []
        del self.collectives[call.ranks]
        first = waiting[call.ranks[0]]
        for other, its_call in waiting.items():
            if its_call != first:
                return _contradiction(call.ranks[0], first, other, its_call), []
            self.pending[other].remove(its_call)
        return None, list(waiting)

    def _post_message(self, rank: int, call: CollectiveCall) -> tuple[str | None, list[int]]:
        (other,) = call.ranks
        sends = call.operation == "send"
        channel = self.channels[(rank, other) if sends else (other, rank)]
        mine, theirs = channel if sends else channel[::-1]
        if not theirs:
            mine.append(call)
            return None, []
        its_call = theirs.popleft()
        if (its_call.dtype, its_call.elements) != (call.dtype, call.elements):
            return _contradiction(rank, call, other, its_call), []
        self.pending[rank].remove(call)
        self.pending[other].remove(its_call)
        return None, [x for x in (rank, other) if not self.pending[x]]

    def _waiting(self) -> str | None:
        stuck = [f"rank {rank} in {_text(calls[0])}" for rank, calls in sorted(self.pending.items()) if calls]
        if not stuck:
            return None
        more = f" and {len(stuck) - _MOST_NAMED} more" if len(stuck) > _MOST_NAMED else ""
        return f"deadlock: {'; '.join(stuck[:_MOST_NAMED])}{more}"


def _contradiction(rank: int, call: CollectiveCall, other: int, its_call: CollectiveCall) -> str:
    return f"calls that do not match: rank {rank} in {_text(call)}, rank {other} in {_text(its_call)}"


def _text(call: CollectiveCall) -> str:
    ranks = ", ".join(map(str, call.ranks[:_MOST_NAMED])) + (", ..." if len(call.ranks) > _MOST_NAMED else "")
    return f"{call.operation} with {ranks} of {call.elements:,} {call.dtype}"
