"""When a run ends before its last iteration: by interval, by minutes, by a kill switch."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from enum import IntEnum

import torch

from megatron.config import TrainingConfig


class ExitCode(IntEnum):
    """Why to stop; of several reasons the largest is told."""

    NONE = 0
    INTERVAL = 1
    DURATION = 2
    KILL_SWITCH = 3


@dataclass(frozen=True)
class ExitConditions:
    """The conditions under which every rank leaves the loop, after the same step.

    started_at: `time.monotonic()` at the start of the program, so that minutes include the start-up.
    """

    interval: int | None
    duration_mins: float | None
    kill_switch_path: str | None
    started_at: float

    @classmethod
    def from_config(cls, training: TrainingConfig, started_at: float) -> ExitConditions:
        """The conditions of --exit-interval, --exit-duration-in-mins and --kill-switch-path."""
        return cls(
            interval=training.exit_interval,
            duration_mins=training.exit_duration_in_mins,
            kill_switch_path=training.kill_switch_path,
            started_at=started_at,
        )

    def reason_before_training(self, device: torch.device | str = "cpu") -> str | None:
        """Why not to start at all, or None. Collective, as `reason` is."""
        return self._message(self._agreed(ExitCode.NONE, device))

    def reason(self, iteration: int, device: torch.device | str = "cpu") -> str | None:
        """Why to stop after step `iteration`, as a sentence, or None to go on.

        Every rank calls it after every step and gets the same answer. The clock and the file are read by rank
        0 alone, and told to the others through `device` by one all-reduce of one number; without minutes and
        without a kill switch there is no communication.
        """
        at_interval = bool(self.interval) and iteration % int(self.interval or 1) == 0
        code = self._agreed(ExitCode.INTERVAL if at_interval else ExitCode.NONE, device)
        return self._message(code, iteration)

    def _agreed(self, code: ExitCode, device: torch.device | str) -> ExitCode:
        """The largest code of: the given one (equal on all ranks), and what rank 0 finds out."""
        if not self.duration_mins and not self.kill_switch_path:
            return code
        if _rank() == 0:
            if self.kill_switch_path and os.path.exists(self.kill_switch_path):
                code = ExitCode.KILL_SWITCH
            elif self.duration_mins and self._minutes() >= self.duration_mins:
                code = ExitCode.DURATION
        return ExitCode(agree(code, device))

    def _minutes(self) -> float:
        return (time.monotonic() - self.started_at) / 60

    def _message(self, code: ExitCode, iteration: int = 0) -> str | None:
        if code == ExitCode.KILL_SWITCH:
            return f"exiting program: kill switch {self.kill_switch_path} exists"
        if code == ExitCode.DURATION:
            limit = f"--exit-duration-in-mins {self.duration_mins:g}"
            return f"exiting program after {self._minutes():.1f} minutes ({limit})"
        if code == ExitCode.INTERVAL:
            return f"exiting program at iteration {iteration} (--exit-interval {self.interval})"
        return None


def agree(code: int, device: torch.device | str = "cpu") -> int:
    """The largest `code` of all ranks, all of which call this at the same step; `code` if alone."""
    if not _distributed():
        return int(code)
    largest = torch.tensor([int(code)], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return int(largest.item())


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank() -> int:
    return torch.distributed.get_rank() if _distributed() else 0
