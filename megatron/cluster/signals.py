"""When a run ends before its last iteration: by interval, by minutes, by a signal, by a kill switch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron.cluster.exit_codes import RunStopped
from megatron.cluster.rank_reports import RankReport
from megatron.config import TrainingConfig

# Why to stop, as numbers that ranks can compare; of several reasons the largest is told.
_NONE, _INTERVAL, _DURATION, _REQUESTED, _SIGNAL, _KILL_SWITCH, _FOLDER_LOST = 0, 1, 2, 3, 100, 1000, 2000


@dataclass(frozen=True)
class ExitReason:
    """Why a run leaves early. should_requeue: it was cut short, and the same command goes on from there;
    at an interval or a kill switch it did all that was asked for."""

    sentence: str
    should_requeue: bool


@dataclass(frozen=True)
class ExitConditions:
    """The conditions under which every rank leaves the loop, after the same step.

    signals: names as "SIGTERM"; they count from `listen` on. report: knows when the program started, so that
    minutes include the start-up, and whether the job's script asks to leave. folder_loss: why rank 0 must not
    write to --save any more, None as long as it may; asked after every step, so it must not look at files.
    """

    interval: int | None
    duration_mins: float | None
    signals: tuple[str, ...]
    kill_switch_path: str | None
    report: RankReport
    folder_loss: Callable[[], str | None] = lambda: None
    _received: list[int] = field(default_factory=list, init=False)

    @classmethod
    def from_config(
        cls,
        training: TrainingConfig,
        report: RankReport,
        folder_loss: Callable[[], str | None] = lambda: None,
    ) -> ExitConditions:
        """The conditions of --exit-interval, --exit-duration-in-mins, --exit-signal, --kill-switch-path."""
        return cls(
            interval=training.exit_interval,
            duration_mins=training.exit_duration_in_mins,
            signals=training.exit_signal,
            kill_switch_path=training.kill_switch_path,
            report=report,
            folder_loss=folder_loss,
        )

    def install_handlers(self) -> None:
        """From now on the signals no longer end the process. To be called in the main thread."""
        for name in self.signals:
            signal.signal(signal.Signals[name], lambda number, _: self._received.append(number))

    def reason_before_training(self, device: torch.device | str = "cpu") -> ExitReason | None:
        """Why not to start at all, or None. Collective, as `reason` is, and raises what that raises."""
        return self._exit_reason(self._all_ranks_code(_NONE, device))

    def reason(self, iteration: int, device: torch.device | str = "cpu") -> ExitReason | None:
        """Why to stop after step `iteration`, or None to go on.

        Every rank calls it after every step and gets the same answer, by one all-reduce of one number through
        `device`: a signal may have reached one rank only, and rank 0 alone reads the clock and files.
        Raises RunStopped on every rank if the job has lost --save to another job: nothing can be saved.
        """
        at_interval = bool(self.interval) and iteration % int(self.interval or 1) == 0
        code = self._all_ranks_code(_INTERVAL if at_interval else _NONE, device)
        return self._exit_reason(code, iteration)

    def _all_ranks_code(self, code: int, device: torch.device | str) -> int:
        """The largest code of: the given one (equal on all ranks), and what each rank has found out."""
        if _rank() == 0:
            if self.folder_loss() is not None:
                code = _FOLDER_LOST
            elif self.kill_switch_path and os.path.exists(self.kill_switch_path):
                code = _KILL_SWITCH
            elif self.report.stop_requested():
                code = _REQUESTED
            elif self.duration_mins and self._minutes() >= self.duration_mins:
                code = _DURATION
        if self._received:
            code = max(code, _SIGNAL + self._received[0])
        return all_reduce_max(code, device)

    def _minutes(self) -> float:
        return (time.monotonic() - self.report.started_at) / 60

    def _exit_reason(self, code: int, iteration: int = 0) -> ExitReason | None:
        if code == _FOLDER_LOST:
            raise RunStopped(self.folder_loss() or "rank 0 has lost the --save folder to another job")
        if code == _KILL_SWITCH:
            return ExitReason(f"exiting program: kill switch {self.kill_switch_path} exists", False)
        if code >= _SIGNAL:
            name = signal.Signals(code - _SIGNAL).name
            return ExitReason(f"exiting program at iteration {iteration}: {name} (--exit-signal)", True)
        if code == _REQUESTED:
            return ExitReason(
                f"exiting program at iteration {iteration}: the job's script asked for it", True
            )
        if code == _DURATION:
            limit = f"--exit-duration-in-mins {self.duration_mins:g}"
            return ExitReason(f"exiting program after {self._minutes():.1f} minutes ({limit})", True)
        if code == _INTERVAL:
            sentence = f"exiting program at iteration {iteration} (--exit-interval {self.interval})"
            return ExitReason(sentence, False)
        return None


def all_reduce_max(code: int, device: torch.device | str = "cpu") -> int:
    """The largest `code` of all ranks, all of which call this at the same step; `code` if alone."""
    if not _distributed() or torch.distributed.get_world_size() == 1:
        return code
    largest = torch.tensor([code], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return int(largest.item())


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank() -> int:
    return torch.distributed.get_rank() if _distributed() else 0
