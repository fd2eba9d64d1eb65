"""Tests the replay of a pass: kernels and concurrent collectives."""

from __future__ import annotations

import pytest

from megatron.planner.simulation.passes import Action, Busy, Collective, Kernel, PassTime, Wait, pass_time


def time_of(
    *actions: Action, launch: float = 0.0, contention: float = 0.0, one_queue: bool = False
) -> PassTime:
    """Replays actions: a kernel takes a second per FLOP or byte, a collective a second per byte."""
    return pass_time(
        actions,
        lambda kernel: kernel.flops or kernel.bytes,
        lambda call: call.bytes,
        launch,
        contention,
        one_queue,
    )


def product(seconds: float) -> Kernel:
    return Kernel("mm", seconds, 1.0)


def other(seconds: float) -> Kernel:
    return Kernel("add", 0.0, seconds)


def gather(seconds: float, group: str = "tensor") -> Collective:
    return Collective(group, "_allgather_base_", seconds)


def test_kernels_run_one_after_the_other() -> None:
    assert time_of(product(3), other(2), product(1)) == PassTime(4, 2, 0)


@pytest.mark.parametrize(("between", "wait"), [(0.0, 5.0), (3.0, 2.0), (5.0, 0.0), (9.0, 0.0)])
def test_kernels_hide_a_collective_until_it_is_waited_for(between: float, wait: float) -> None:
    found = time_of(product(1), gather(5), other(between), Wait(0), product(1))
    assert found == PassTime(2, between, wait)
    assert found.total == 2 + between + wait


def test_collectives_of_a_group_queue_and_those_of_two_groups_do_not() -> None:
    one = time_of(gather(4), gather(3), other(1), Wait(0))
    assert one.waits == 6
    two = time_of(gather(4, "data"), gather(3), other(1), Wait(0), Wait(1))
    assert two.waits == 2 + 1


def test_with_one_hardware_queue_a_collective_that_queues_delays_the_kernels_after_it() -> None:
    at_once = [*[gather(5)] * 8, *[step for age in reversed(range(8)) for step in (Wait(age), other(5))]]
    chained = [gather(5), *[step for _ in range(7) for step in (Wait(0), gather(5), other(5))], Wait(0)]
    assert time_of(*at_once).waits == time_of(*chained).waits == 5
    assert time_of(*at_once, one_queue=True).waits == 35
    assert time_of(*chained, one_queue=True).waits == 5
    # A collective of a different group starts at once, and the kernels after it also start at once.
    assert time_of(gather(4, "data"), gather(3), other(4), Wait(0), Wait(1), one_queue=True).waits == 0


def test_waits_name_collectives_by_their_age() -> None:
    assert time_of(gather(2), gather(3), Wait(1), other(1), Wait(0)) == PassTime(0, 1, 2 + 2)
    # A collective that started in an earlier pass is complete.
    assert time_of(Wait(0), gather(2), Wait(1), Wait(0)).waits == 2


def test_the_host_limits_a_pass_of_short_kernels() -> None:
    assert time_of(*[other(1)] * 10, launch=3).total == 30
    assert time_of(*[other(1)] * 10, product(25), launch=3).total == 35


def test_collectives_lengthen_the_kernels_beside_them() -> None:
    assert time_of(gather(4), other(10), Wait(0), contention=0.5).total == 10 + 0.5 * 4
    assert time_of(gather(4), other(1), Wait(0), contention=0.5).total == 4 + 0.5 * 1


def test_other_work_takes_its_time_and_is_not_counted() -> None:
    assert time_of(gather(4), Busy(3), Wait(0)) == PassTime(0, 0, 1)
