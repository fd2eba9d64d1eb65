"""Reasons to stop a run before its last iteration: interval, duration, signal, Ctrl-C, kill switch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron.cluster.exit_codes import RunStopped
from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.rank_reports import RankReport
from megatron.config import CheckpointConfig, TrainingConfig
from megatron.mpu.world import max_over_ranks

# Numbers of the reasons, for an all-reduce. If several reasons apply, the largest number is reported.
_NONE, _INTERVAL, _DURATION, _REQUESTED, _SIGNAL, _KILL_SWITCH, _FOLDER_LOST = 0, 1, 2, 3, 100, 1000, 2000


@dataclass(frozen=True)
class ExitReason:
    """The reason why a run stops early. status: REQUEUE if the same command should resume it, INTERRUPTED
    after Ctrl-C, FINISHED if the user set this end (an interval, a kill switch)."""

    sentence: str
    status: ExitStatus

    def line(self, checkpoint: CheckpointConfig) -> str:
        """Returns the sentence for the log. It also says how to resume, if the same command would not
        resume."""
        if not checkpoint.save:
            return f"{self.sentence}; nothing is saved without --save"
        if not checkpoint.load and self.status is not ExitStatus.FINISHED:
            return f"{self.sentence}; to resume, add --load {checkpoint.save}"
        return self.sentence

    def final_status(self, checkpoint: CheckpointConfig) -> ExitStatus:
        """Returns the exit status of the run: FINISHED instead of REQUEUE if the same command would not
        resume."""
        is_resumable = checkpoint.save is not None and checkpoint.load is not None
        return ExitStatus.FINISHED if self.status is ExitStatus.REQUEUE and not is_resumable else self.status


def is_due(interval: int | None, previous: int, iteration: int) -> bool:
    """Returns whether an event with this interval is due at `iteration`: whether a multiple of the interval
    is above `previous` and at most `iteration`. An event inside a skipped range is therefore due at the end
    of the range. interval: None for an event that is never due."""
    return interval is not None and iteration // interval > previous // interval


@dataclass(frozen=True)
class ExitConditions:
    """The conditions for an early exit: --exit-interval, --exit-duration-in-mins, --kill-switch-path, and
    --exit-signal after `install_handlers`. All ranks exit after the same step.

    report: knows the start time of the program (the duration includes the startup), and whether the job's
    script has requested a stop. ownership_lost_reason: function that returns why rank 0 must no longer write
    to --save, or None. It is called after every step, so it must not access files.
    """

    training: TrainingConfig
    report: RankReport
    ownership_lost_reason: Callable[[], str | None] = lambda: None
    _received: list[int] = field(default_factory=list, init=False)

    def install_handlers(self) -> frozenset[int]:
        """Installs handlers in the main thread, so that SIGINT and the signals of --exit-signal do not end
        the process. Returns the signal numbers. A SIGHUP that is ignored (nohup) stays ignored."""
        numbers = {signal.SIGINT, *(signal.Signals[name] for name in self.training.exit_signal)}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            numbers.discard(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, lambda number, _: self._received.append(number))
        return frozenset(numbers)

    def request(self, iteration: int, device: torch.device | str = "cpu") -> ExitReason | None:
        """Returns the reason to stop before the first step or inside an evaluation, or None. Ignores
        --exit-interval. Collective. Raises the errors of `reason`."""
        return self._exit_reason(all_reduce_max(self.code_of_this_rank(), device), iteration)

    def reason(
        self,
        iteration: int,
        device: torch.device | str = "cpu",
        largest_code: int | None = None,
        previous: int | None = None,
    ) -> ExitReason | None:
        """Returns the reason to stop after `iteration`, or None. previous: the iteration before a skipped
        range; by default, the one before `iteration`.

        Every rank calls it after every step and gets an equal result, although a signal may have reached only
        one rank, and only rank 0 reads the clock and files. largest_code: the largest `code_of_this_rank` of
        all ranks, if the step has exchanged it; None to all-reduce it on `device`, which waits for `device`.
        Raises RunStopped on every rank if another job has taken over --save, because nothing can be saved
        then.
        """
        if largest_code is None:
            largest_code = all_reduce_max(self.code_of_this_rank(), device)
        previous = iteration - 1 if previous is None else previous
        at_interval = is_due(self.training.exit_interval, previous, iteration)
        return self._exit_reason(max(largest_code, _INTERVAL if at_interval else _NONE), iteration)

    def code_of_this_rank(self) -> int:
        """Returns the number of this rank's reason to stop. The largest number of all ranks determines the
        reason of the run."""
        code = _NONE
        kill_switch, duration_mins = self.training.kill_switch_path, self.training.exit_duration_in_mins
        if _rank() == 0:
            if self.ownership_lost_reason() is not None:
                code = _FOLDER_LOST
            elif kill_switch and os.path.exists(kill_switch):
                code = _KILL_SWITCH
            elif self.report.stop_requested():
                code = _REQUESTED
            elif duration_mins and self._minutes() >= duration_mins:
                code = _DURATION
        if self._received:
            code = max(code, _SIGNAL + self._received[0])
        return code

    def _minutes(self) -> float:
        return (time.monotonic() - self.report.started_at) / 60

    def _exit_reason(self, code: int, iteration: int) -> ExitReason | None:
        if code == _NONE:
            return None
        training, at = self.training, f"exiting program at iteration {iteration}"
        if code == _FOLDER_LOST:
            raise RunStopped(
                self.ownership_lost_reason() or "rank 0 has lost the --save folder to another job"
            )
        if code == _KILL_SWITCH:
            sentence = f"exiting program: kill switch {training.kill_switch_path} exists"
            return ExitReason(sentence, ExitStatus.FINISHED)
        if code >= _SIGNAL:
            name = signal.Signals(code - _SIGNAL).name
            if name in training.exit_signal:
                return ExitReason(f"{at}: {name} (--exit-signal)", ExitStatus.REQUEUE)
            return ExitReason(f"{at}: {name}", ExitStatus.INTERRUPTED)
        if code == _REQUESTED:
            return ExitReason(f"{at}: the job's script requested a stop", ExitStatus.REQUEUE)
        if code == _DURATION:
            limit = f"--exit-duration-in-mins {training.exit_duration_in_mins:g}"
            sentence = f"exiting program after {self._minutes():.1f} minutes ({limit})"
            return ExitReason(sentence, ExitStatus.REQUEUE)
        return ExitReason(f"{at} (--exit-interval {training.exit_interval})", ExitStatus.FINISHED)


def all_reduce_max(code: int, device: torch.device | str = "cpu") -> int:
    """Returns the largest `code` of all ranks; `code` itself for a single process. Collective."""
    return int(max_over_ranks(code, device, torch.int32).item())


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
