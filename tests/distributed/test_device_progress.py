"""The report of a hung rank says which work its device has completed, and in which calls it waits."""

from __future__ import annotations

import argparse
import gc
import time

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed.flight_recorder.components.loader import read_dir

from megatron.cluster.rank_reports import RankReport
from megatron.engine.device_progress import DeviceProgress, flight_record, pending_calls
from tests.support import HANG_TIMEOUT_S
from tests.support.layouts import Row, build_engine, config_of, train
from tests.support.pool import run_world


class Device:
    """An accelerator whose device has completed the first `done` events."""

    def __init__(self, done: int) -> None:
        self.done, self.recorded = done, 0

    def device_name(self) -> str:
        return "sim"

    def Event(self):
        device = self

        class Event:
            def record(self) -> None:
                device.recorded += 1
                self.number = device.recorded

            def query(self) -> bool:
                return self.number <= device.done

        return Event()


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        (0, "has completed no instruction, runs LoadMicroBatch buffer_id=0 (instruction 1 of the step)"),
        (
            2,
            "has completed ForwardPass buffer_id=0 (instruction 2 of the step), "
            "runs BackwardPass buffer_id=0 (instruction 3 of the step)",
        ),
        (99, "has completed all instructions of the schedule"),
    ],
)
def test_the_last_instruction_that_the_device_completed_is_named(done, expected):
    progress = DeviceProgress(Device(done))
    for name in ("LoadMicroBatch", "ForwardPass", "BackwardPass"):
        progress.record(f"{name} buffer_id=0")
    assert progress.status()["device"] == expected


def recorded_instructions(row):
    """Returns the recorded instructions of the second of two steps. The device has completed all of them."""
    engine = build_engine(config_of(row))
    engine.device_progress = DeviceProgress(Device(10**6))
    train(engine, range(2))
    return [name for name, _ in engine.device_progress._launched]


def test_every_instruction_of_the_schedule_is_recorded():
    first, last = run_world(2, recorded_instructions, Row(pp=2, micro_batch=4))
    second_step = [name for name in last if name.endswith("(instruction 1 of the step)")]
    assert len(second_step) == 2 and last[-1].startswith("OptimizerStep (instruction ")
    assert any(name.startswith("SendActivation buffer_id=") for name in first)
    assert any(name.startswith("RecvActivation buffer_id=") for name in last)


def calls_while_another_rank_is_late(folder):
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(2), group=group)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["seen"])
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    waits_in = facts_when(lambda waits_in: "(call 2)" in waits_in or dist.get_rank() == 1)
    if dist.get_rank() == 0:
        store.set("seen", "")
    work.wait()
    RankReport(str(folder), str(dist.get_rank())).write_flight_record(flight_record())
    return waits_in, facts_when(lambda waits_in: not waits_in)


def facts_when(condition):
    """Returns the calls in which this rank waits, as soon as they meet the condition: gloo's threads record
    the end of a call a little late."""
    progress, deadline = DeviceProgress(get_accelerator()), time.monotonic() + HANG_TIMEOUT_S
    while not condition(waits_in := progress.status()["waits_in"]):
        assert time.monotonic() < deadline, waits_in
        time.sleep(0.01)
    return waits_in


def test_the_call_in_which_a_rank_waits_is_named_with_its_ranks(tmp_path):
    """torch's flight recorder also records the calls of gloo. torch's own analyzer must be able to read the
    files."""
    (before, after), _ = run_world(2, calls_while_another_rank_is_late, tmp_path)
    assert (before, after) == ("all_reduce (call 2) of ranks 0, 1", "")
    arguments = argparse.Namespace(prefix="flight-", trace_dir=str(tmp_path))
    dumps, version = read_dir(arguments)
    gc.enable()  # read_dir disables the garbage collector
    assert version == "2.10" and {dump["rank"] for dump in dumps.values()} == {0, 1}
    assert all(len(dump["entries"]) >= 2 for dump in dumps.values())


def entry(name, group, state, *, retired=False, is_p2p=False, number=1):
    """Returns a call of NCCL as torch 2.13 records it (flight recorder 2.10), with only the fields that are
    read."""
    return {
        "profiling_name": name,
        "process_group": [group, "undefined"],
        "state": state,
        "retired": retired,
        "is_p2p": is_p2p,
        "collective_seq_id": 0 if is_p2p else number,
        "p2p_seq_id": number if is_p2p else 0,
    }


def test_the_oldest_unfinished_call_of_each_group_is_shown():
    entries = [
        entry("nccl:all_reduce", "5", "completed", number=7),
        entry("nccl:recv 0<-1", "3", "started", is_p2p=True, number=4),
        entry("nccl:all_reduce", "5", "started", number=8),
        entry("nccl:all_reduce", "5", "scheduled", number=9),
        entry("nccl:broadcast", "6", "started", retired=True),
        # In a batch of messages the state of single messages never changes, as in the first batch.
        entry("nccl:send 0->1", "8", "scheduled", is_p2p=True, number=1),
        entry("nccl:coalesced", "8", "completed", is_p2p=True, number=1),
        entry("nccl:send 0->1", "8", "scheduled", is_p2p=True, number=2),
        entry("nccl:coalesced", "8", "scheduled", is_p2p=True, number=2),
    ]
    assert pending_calls({"version": "2.10", "entries": entries}) == [
        "recv 0<-1 (call 4) of group 3",
        "all_reduce (call 8) of group 5",
    ]
    entries[-1]["state"] = "started"
    assert pending_calls({"version": "2.10", "entries": entries[5:]}) == ["coalesced (call 2) of group 8"]


def test_launched_calls_behind_a_stuck_kernel_do_not_wait():
    """If a device is stuck in its own kernel, its host has launched all calls of the step. None of these
    calls is reported as the one that waits."""
    calls = [entry("nccl:all_reduce", "5", "scheduled", number=number) for number in range(3)]
    assert pending_calls({"entries": calls}) == []
