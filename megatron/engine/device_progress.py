"""Tracks which instructions of the schedule the device has completed, for the report of a hang.

On a GPU the host does not wait for collectives. In a hang, the hosts of all ranks wait at the same line of
code, at the end of the step. An event after every instruction shows what each device has completed. Torch's
flight recorder, which the process groups of NCCL and gloo fill, shows the calls that have not ended.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Maximum number of events. In a step with more instructions, only the last ones are known.
_MAX_EVENTS = 2048
_MAX_CALLS_SHOWN = 2
_MAX_RANKS_SHOWN = 8


class DeviceProgress:
    """The instructions that this rank has launched, each with a device event that marks its end."""

    def __init__(self, accelerator: Any) -> None:
        """accelerator: DeepSpeed's accelerator object."""
        self._launched: deque[tuple[str, Any]] = deque(maxlen=_MAX_EVENTS)
        self._in_step = 0
        # On a CPU an instruction ends when its code has run, so no events are recorded.
        self._records = accelerator.device_name() != "cpu"
        self._accelerator = accelerator

    def begin_step(self) -> None:
        """Forgets the instructions of the last step."""
        self._in_step = 0

    def record(self, instruction: str) -> None:
        """Marks the end of an instruction on the current stream."""
        if not self._records:
            return
        # If the queue is full, its oldest event is reused.
        full = len(self._launched) == _MAX_EVENTS
        event = self._launched.popleft()[1] if full else self._accelerator.Event()
        event.record()
        self._in_step += 1
        self._launched.append((f"{instruction} (instruction {self._in_step} of the step)", event))

    def status(self) -> dict[str, str]:
        """Returns the device's status for the rank's report. Any thread may call it.

        device: the last instruction that the device has completed, and the one after it; missing on a CPU and
        before the first instruction. waits_in: the calls in which this rank waits for other ranks.
        """
        status = waiting_status()
        if self._launched:
            status["device"] = _describe([(name, event.query()) for name, event in list(self._launched)])
        return status


def waiting_status() -> dict[str, str]:
    """Returns the part `waits_in` of `DeviceProgress.status`, which needs no instruction."""
    return {"waits_in": " and ".join(pending_calls(pickle.loads(flight_record())))}


def flight_record() -> bytes:
    """Returns the calls that torch's flight recorder holds, by default the last 2,000 (TORCH_FR_BUFFER_SIZE).
    They have the format that `python -m torch.distributed.flight_recorder.fr_trace` reads."""
    c10d = getattr(torch._C, "_distributed_c10d", None)
    # NCCL's process groups use a separate recorder.
    dumps = getattr(c10d, "_dump_fr_trace", None), getattr(c10d, "_dump_nccl_trace", None)
    merged: dict[str, Any] = {}
    for dump in filter(None, dumps):
        record = pickle.loads(dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))
        # A recorder without calls has no list of calls.
        entries = [*merged.get("entries", ()), *record.get("entries", ())]
        groups = {key: {**merged.get(key, {}), **record.get(key, {})} for key in ("pg_config", "pg_status")}
        merged = {**record, **groups, "entries": sorted(entries, key=lambda x: x.get("time_created_ns", 0))}
    return pickle.dumps(merged)


def _describe(launched: list[tuple[str, bool]]) -> str:
    """Returns a text about the device's progress. launched: the name of each instruction, and whether it is
    completed."""
    done = next((i for i in reversed(range(len(launched))) if launched[i][1]), -1)
    if done == len(launched) - 1:
        return "has completed all instructions of the schedule"
    last = f"has completed {launched[done][0]}" if done >= 0 else "has completed no instruction"
    return f"{last}, runs {launched[done + 1][0]}"


def pending_calls(recorded: Mapping[str, Any]) -> list[str]:
    """Returns the oldest running call of each process group, oldest first, such as 'all_reduce (call 17) of
    ranks 0, 2'. recorded: the recorder's content in torch's format 2.10.

    A host runs ahead of its device, so with NCCL it has recorded calls that have not started. These calls
    wait for this device instead of other ranks. gloo records neither the starts of calls nor point-to-point
    calls. For a batch of messages, NCCL records each message without a state, and then the batch
    ("coalesced").
    """
    oldest: dict[str, Mapping[str, Any]] = {}
    for entry in recorded.get("entries", ()):
        backend = entry["profiling_name"].partition(":")[0]
        runs = entry["state"] == "started" or (backend == "gloo" and entry["state"] == "scheduled")
        if runs and not entry["retired"]:
            oldest.setdefault(entry["process_group"][0], entry)
    return [_describe_call(group, entry) for group, entry in oldest.items()][:_MAX_CALLS_SHOWN]


def _describe_call(group: str, entry: Mapping[str, Any]) -> str:
    name = entry["profiling_name"].partition(":")[2]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return f"{name} (call {number}) of {_members(group)}"


def _members(group: str) -> str:
    try:
        found = distributed_c10d._resolve_process_group(distributed_c10d.GroupName(group))
        ranks = sorted(dist.get_process_group_ranks(found))
    except (AttributeError, LookupError, RuntimeError, ValueError):
        return f"group {group}"
    shown = ", ".join(map(str, ranks[:_MAX_RANKS_SHOWN]))
    return f"ranks {shown}{', ...' if len(ranks) > _MAX_RANKS_SHOWN else ''}"
