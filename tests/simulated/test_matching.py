"""Collective calls of several ranks that match, and calls that do not match."""

from __future__ import annotations

import pytest

from megatron.mpu.layout import ParallelLayout
from megatron.planner.simulation.device import CollectiveCall
from tests.support.simulation.matching import find_deadlock, translate_ranks


def collective(ranks, elements=4, operation="allreduce_", dtype="float32"):
    return (CollectiveCall(operation, tuple(ranks), dtype, elements, 4 * elements),)


def send(to, elements=4):
    return (CollectiveCall("send", (to,), "float32", elements, 4 * elements),)


def receive(source, elements=4):
    return (CollectiveCall("recv_", (source,), "float32", elements, 4 * elements),)


FITTING = {
    "nothing": {0: [], 1: []},
    "one group": {0: [collective([0, 1])] * 3, 1: [collective([0, 1])] * 3},
    "two groups": {
        0: [collective([0, 1]), collective([0, 2])],
        1: [collective([0, 1])],
        2: [collective([0, 2])],
    },
    "a message after a collective": {
        0: [collective([0, 1]), send(1)],
        1: [collective([0, 1]), receive(0)],
    },
    "an exchange as a batch": {
        0: [send(1) + receive(1)],
        1: [send(0) + receive(0)],
    },
}


@pytest.mark.parametrize("name", FITTING)
def test_calls_that_fit_complete(name):
    assert find_deadlock(FITTING[name]) is None


UNFIT = {
    "other order of groups": (
        {
            0: [collective([0, 1]), collective([0, 2])],
            1: [collective([1, 2]), collective([0, 1])],
            2: [collective([0, 2]), collective([1, 2])],
        },
        "deadlock: rank 0",
    ),
    "both send first": ({0: [send(1), receive(1)], 1: [send(0), receive(0)]}, "deadlock: rank 0 in send"),
    "one call less": ({0: [collective([0, 1])] * 2, 1: [collective([0, 1])]}, "deadlock: rank 0"),
    "other sizes": ({0: [collective([0, 1], 4)], 1: [collective([0, 1], 5)]}, "do not match: rank 0"),
    "other dtypes": (
        {0: [collective([0, 1])], 1: [collective([0, 1], dtype="bfloat16")]},
        "float32, rank 1",
    ),
    "other operations": (
        {0: [collective([0, 1])], 1: [collective([0, 1], operation="broadcast_")]},
        "broadcast_",
    ),
    "a longer message": ({0: [send(1, 8)], 1: [receive(0, 4)]}, "do not match"),
    "nobody sends": ({0: [], 1: [receive(0)]}, "deadlock: rank 1 in recv_ with 0"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_calls_that_do_not_fit_are_named(name):
    calls, part = UNFIT[name]
    assert part in find_deadlock(calls)


@pytest.mark.parametrize("rank", [0, 1, 5, 12, 23])
def test_groups_are_those_of_the_layout(rank):
    """The groups of every rank, translated from rank 0, are the rows of the grid that contain the rank."""
    simulated, other = ParallelLayout(2, 3, 4, 0), ParallelLayout(2, 3, 4, rank)
    tensor, rest = rank % 2, rank // 2
    data, stage = rest % 4, rest // 4
    assert translate_ranks((0, 1), simulated, other) == (rank - tensor, rank - tensor + 1)
    assert translate_ranks((0, 2, 4, 6), simulated, other) == tuple(
        stage * 8 + d * 2 + tensor for d in range(4)
    )
    assert translate_ranks((0, 8, 16), simulated, other) == tuple(p * 8 + data * 2 + tensor for p in range(3))
    assert translate_ranks(range(24), simulated, other) == tuple(range(24))
    assert translate_ranks((0, 16), simulated, other) == (data * 2 + tensor, 16 + data * 2 + tensor)
