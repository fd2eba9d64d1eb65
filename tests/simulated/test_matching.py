"""The comparison of several ranks' collective calls accepts calls that match, and names calls that do
not match."""

from __future__ import annotations

import pytest

from megatron.mpu.mesh import Mesh
from megatron.planner.simulation.device import CollectiveCall
from tests.support.simulation.matching import find_deadlock, translate_ranks


def collective(ranks, elements=4, operation="allreduce_", dtype="float32"):
    return (CollectiveCall(operation, tuple(ranks), dtype, elements, 4 * elements),)


def send(to, elements=4):
    return collective([to], elements, "send")


def receive(source, elements=4):
    return collective([source], elements, "recv_")


A, B, C = collective([0, 1]), collective([0, 2]), collective([1, 2])
# Calls of the ranks -> part of the sentence, or None if the calls match.
CASES = {
    "nothing": ([[], []], None),
    "one group": ([[A] * 3, [A] * 3], None),
    "two groups": ([[A, B], [A], [B]], None),
    "a message after a collective": ([[A, send(1)], [A, receive(0)]], None),
    "an exchange as a batch": ([[send(1) + receive(1)], [send(0) + receive(0)]], None),
    "other order of groups": ([[A, B], [C, A], [B, C]], "deadlock: rank 0"),
    "both send first": ([[send(1), receive(1)], [send(0), receive(0)]], "deadlock: rank 0 in send"),
    "one call less": ([[A] * 2, [A]], "deadlock: rank 0"),
    "other sizes": ([[A], [collective([0, 1], 5)]], "do not match: rank 0"),
    "other dtypes": ([[A], [collective([0, 1], dtype="bfloat16")]], "float32, rank 1"),
    "other operations": ([[A], [collective([0, 1], operation="broadcast_")]], "broadcast_"),
    "a longer message": ([[send(1, 8)], [receive(0, 4)]], "do not match"),
    "nobody sends": ([[], [receive(0)]], "deadlock: rank 1 in recv_ with 0"),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_that_do_not_match_are_named(name):
    calls, part = CASES[name]
    found = find_deadlock(dict(enumerate(calls)))
    assert found is None if part is None else part in found


@pytest.mark.parametrize("rank", [0, 1, 5, 12, 23])
def test_groups_are_those_of_the_layout(rank):
    """The groups of every rank, translated from rank 0, are the rows of the grid that contain the rank."""
    simulated, other = Mesh(2, 3, 4, 0), Mesh(2, 3, 4, rank)
    tensor, rest = rank % 2, rank // 2
    data, stage = rest % 4, rest // 4
    for ranks, expected in (
        ((0, 1), (rank - tensor, rank - tensor + 1)),
        ((0, 2, 4, 6), tuple(stage * 8 + d * 2 + tensor for d in range(4))),
        ((0, 8, 16), tuple(p * 8 + data * 2 + tensor for p in range(3))),
        (range(24), tuple(range(24))),
        ((0, 16), (data * 2 + tensor, 16 + data * 2 + tensor)),
    ):
        assert translate_ranks(ranks, simulated, other) == expected
