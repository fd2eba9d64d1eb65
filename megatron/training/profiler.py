"""--profile: profiles the iterations from --profile-step-start + 1 to --profile-step-end on --profile-ranks.

With --use-pytorch-profiler a rank writes a trace to the folder of --tensorboard-dir, for TensorBoard,
Perfetto or chrome://tracing. It prints the kernels that took the most time, and how long the device was idle.
Without the flag, the iterations are marked for Nsight Systems (`nsys profile
--capture-range=cudaProfilerApi`), with the ranges of `engine.profiler_ranges` and a range for each operator.

If a profile fails, the run prints a warning and continues.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.autograd import DeviceType

from megatron.cluster.exit_codes import SharedUserError
from megatron.errors import one_line
from megatron.files import sync_file
from megatron.run import Run
from megatron.text_table import format_table
from megatron.training.stability import range_to_skip

_LONGEST, _LONGEST_GAPS = 10, 3
_NAME_LENGTH = 120


class StepProfiler:
    """Starts and stops the profile of a rank. It is a context manager; the end of its block stops a running
    profile."""

    def __init__(self, run: Run, print_fn: Callable[[str], None]) -> None:
        """Selects the profiler of the flags. print_fn: function that prints on rank 0."""
        logging, self._rank, self._run = run.config.logging, run.mesh.rank, run
        self._first, self._last = logging.profile_step_start + 1, logging.profile_step_end
        self._folder = logging.tensorboard_dir if logging.use_pytorch_profiler else None
        self._print_on_rank_0 = print_fn
        self._capture: _Trace | _NsysCapture | None = None
        self._is_due = logging.profile and self._rank in logging.profile_ranks

    def __enter__(self) -> StepProfiler:
        self._stop_before(self._run.start.iteration + 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            first = max(self._first, self._run.start.iteration + 1)
            self._stop(f"the run ended before iteration {first}")

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Surrounds a training iteration, or a skipped range of iterations that begins with it. number:
        iteration, counted from 1."""
        if skipped := range_to_skip(self._run, number - 1):
            yield
            self._stop_before(skipped[1] + 1)
            return
        warms_up = self._folder is not None  # or the first would include the profiler's start
        if self._is_due and self._first - warms_up <= number:
            with self._as_warning():
                self._start(number)
        elif self._capture is not None:
            with self._as_warning():
                self._capture.begin_iteration()
        yield
        if self._capture is not None:
            with self._as_warning():
                self._capture.end_iteration(number)
        self._stop_before(number + 1)

    def _start(self, number: int) -> None:
        self._is_due = False
        capture: _Trace | _NsysCapture = _NsysCapture(self._print)
        if self._folder is not None:
            path = Path(self._folder, f"rank_{self._rank}_iterations_{{first}}_to_{{last}}.pt.trace.json")
            most = self._last - max(number, self._first) + 1
            capture = _Trace(path, most, number < self._first, self._print)
        capture.start()
        self._capture = capture

    def _stop_before(self, number: int) -> None:
        """Stops the profile if iteration `number`, the next one, is not profiled."""
        if number > self._last:
            self._stop(f"iteration {self._last} is over")

    def _stop(self, why: str) -> None:
        """Stops the profile. why: reason that is printed if no iteration was profiled."""
        capture, is_due = self._capture, self._is_due
        self._capture, self._is_due = None, False
        with self._as_warning():
            if is_due or (capture is not None and not capture.stop()):
                self._print(f"--profile: {why}: nothing was profiled")

    @contextmanager
    def _as_warning(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # PyTorch's profiler raises AssertionError, too
            self._capture = None
            self._print(f"WARNING: the profile failed ({one_line(error)}); the run continues")

    def _print(self, text: str) -> None:
        if self._rank == 0:
            self._print_on_rank_0(text)
            return
        with suppress(OSError, ValueError):  # the launcher may have closed the output
            print(f"rank {self._rank}: {text}", file=sys.stdout, flush=True)


def check_profile(run: Run) -> None:
    """Raises SharedUserError if --profile is set, and the run has no iteration to profile or this device
    cannot be profiled."""
    logging, end = run.config.logging, run.length.iterations
    if not logging.profile:
        return
    if logging.profile_step_start >= end:
        raise SharedUserError(
            f"--profile-step-start {logging.profile_step_start}: the run ends with iteration {end}, so "
            "nothing would be profiled: set a smaller iteration, or remove --profile"
        )
    if not logging.use_pytorch_profiler and get_accelerator().device_name() != "cuda":
        raise SharedUserError(
            "--profile without --use-pytorch-profiler marks iterations for Nsight Systems, which profiles "
            "NVIDIA GPUs: add --use-pytorch-profiler, or remove --profile"
        )


class _NsysCapture:
    """Starts and stops the collection of Nsight Systems."""

    def __init__(self, print_fn: Callable[[str], None]) -> None:
        self._print = print_fn
        self._ranges = torch.autograd.profiler.emit_nvtx(record_shapes=True)

    def start(self) -> None:
        torch.cuda.profiler.start()
        self._ranges.__enter__()

    def begin_iteration(self) -> None:
        """Does nothing."""

    def end_iteration(self, number: int) -> None:
        """Waits for the device, so that its work is part of the profile."""
        get_accelerator().synchronize()

    def stop(self) -> bool:
        """Stops the collection. Returns True, because the collection has started in an iteration that is
        profiled."""
        self._ranges.__exit__(None, None, None)
        torch.cuda.profiler.stop()
        self._print("--profile: the iterations were marked for Nsight Systems; only nsys writes a file")
        return True


class _Trace:
    """Records a trace with PyTorch's profiler, writes it, and prints a summary."""

    def __init__(self, path: Path, most: int, warms_up: bool, print_fn: Callable[[str], None]) -> None:
        """path: file name with {first} and {last} for the iterations. most: maximum number of profiled
        iterations. warms_up: whether the profiler runs for one iteration before the first profiled one."""
        self._path, self._warms_up, self._print = path, warms_up, print_fn
        self._profiled: list[int] = []
        activities = [torch.profiler.ProfilerActivity.CPU]
        self._on_gpu = get_accelerator().device_name() == "cuda"
        if self._on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=int(warms_up), active=most, repeat=1),
            on_trace_ready=self._finish,
            record_shapes=True,
        )

    def start(self) -> None:
        self._profile.start()

    def begin_iteration(self) -> None:
        """Begins an iteration after the first one."""
        self._profile.step()

    def end_iteration(self, number: int) -> None:
        """Waits for the device, so that its work is part of the iteration."""
        get_accelerator().synchronize()
        if not self._warms_up:
            self._profiled.append(number)
        self._warms_up = False

    def stop(self) -> bool:
        """Stops the profiler and writes the trace. Returns whether an iteration was profiled."""
        self._profile.stop()
        return bool(self._profiled)

    def _finish(self, profile: Any) -> None:
        if not self._profiled:
            raise RuntimeError("the device stopped recording before the first iteration")
        first, last = min(self._profiled), max(self._profiled)  # not in order after a rollback
        path = self._path.with_name(self._path.name.format(first=first, last=last))
        _write_trace(profile.export_chrome_trace, path)
        text = summary(profile.events(), len(self._profiled), self._on_gpu)
        self._print(f"profile of iterations {first} to {last}: {path}\n{text}")


def _write_trace(export: Callable[[str], Any], path: Path) -> None:
    """Writes a trace atomically. PyTorch's writer reports no errors, so the end of the file is checked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        export(str(temporary))
        with open(temporary, "rb") as file:
            file.seek(max(temporary.stat().st_size - 16, 0))
            if not file.read().rstrip().endswith(b"}"):
                raise OSError(f"{path} is incomplete: is the disk full?")
        sync_file(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def device_work(events: Iterable[Any], on_gpu: bool) -> list[Any]:
    """Returns the events of a PyTorch profile that are kernels, or operators on a CPU."""
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return [event for event in events if event.device_type == device and not event.is_user_annotation]


def summary(events: Iterable[Any], iterations: int, on_gpu: bool, most: int = _LONGEST) -> str:
    """Returns a table of the `most` kernels with the most time, and a line about the gaps between kernels. On
    CPUs the table has operators; the time of an operator does not include the operators that it calls.

    events: events of a PyTorch profile. iterations: number of profiled iterations; all times are divided by
    it.
    """
    work, what = device_work(events, on_gpu), "kernel" if on_gpu else "operator"
    if not work:
        return f"no {what} ran"
    seconds, calls = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in work:
        spent = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        seconds[event.name] += spent / 1e6
        calls[event.name] += 1
    total = sum(seconds.values()) or 1e-9  # if all times are 0
    rows = [[what, "calls", "ms", "%"]]
    for name in sorted(seconds, key=lambda name: -seconds[name])[:most]:
        row = [f"{calls[name] / iterations:g}", f"{1e3 * seconds[name] / iterations:.3f}"]
        rows.append([one_line(name, _NAME_LENGTH), *row, f"{100 * seconds[name] / total:.1f}"])
    gaps, window = gaps_between(work)
    share = sum(gaps) / window if window else 0.0
    longest = ", ".join(f"{gap / 1e3:.3f}" for gap in sorted(gaps, reverse=True)[:_LONGEST_GAPS])
    return (
        f"{format_table(rows)}\n"
        f"per iteration, {1e3 * total / iterations:.1f} ms of {what}s; no {what} ran during "
        f"{100 * share:.1f} % of {window / 1e3 / iterations:.1f} ms; longest gaps: {longest} ms"
    )


def gaps_between(work: Iterable[Any]) -> tuple[list[float], float]:
    """Returns the lengths of the gaps between events, which may overlap, and the time from the first to the
    last event, all in us."""
    ordered = sorted((event.time_range.start, event.time_range.end) for event in work)
    first, end = ordered[0]
    gaps = []
    for start, stop in ordered:
        if start > end:
            gaps.append(start - end)
        end = max(end, stop)
    return gaps, end - first
