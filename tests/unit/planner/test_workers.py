"""Tests the errors and the end of the processes that record layers."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from megatron.errors import UserError
from megatron.planner.simulation.processes import SimulationError, Worker


def refuse(text: str) -> None:
    raise UserError(text)


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def leave() -> None:
    print("the last line", flush=True)
    sys.exit(3)


def test_a_worker_works_on_after_a_refusal() -> None:
    worker = Worker({})
    with pytest.raises(UserError, match="^too large$"):
        worker.run(refuse, "too large")
    assert worker.is_alive() and worker.run(max, 1, 2) == 2


def test_a_size_beyond_integers_is_a_tensor_larger_than_any_device() -> None:
    with pytest.raises(UserError, match="larger than any device can hold .*Reduce the sizes"):
        Worker({}).run(bytes, 2**70)


def test_a_worker_that_is_killed_is_one_sentence_also_while_it_is_idle() -> None:
    worker = Worker({})
    with pytest.raises(UserError, match="was killed, probably because memory ran out"):
        worker.run(die, signal.SIGKILL)
    assert not worker.is_alive()
    with pytest.raises(UserError, match="was killed"):
        worker.run(max, 1, 2)


def test_another_end_of_a_worker_shows_its_last_lines() -> None:
    with pytest.raises(SimulationError, match=r"exit code 3.*\n.*the last line"):
        Worker({}).run(leave)
