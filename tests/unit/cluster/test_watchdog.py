"""Runs the watchdog thread in separate processes, and its time limits on a simulated clock."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.rank_reports import RankReport, read_reports
from megatron.cluster.watchdog import HangDetector, Phase
from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S

# The lock is native code, like a collective. Python's signal handlers do not run in it.
PROGRAM = """
import signal, sys, threading, time
from megatron.cluster.rank_reports import RankReport
from megatron.cluster.watchdog import Watchdog

watchdog = Watchdog(RankReport.from_environment())
{}
print("ready", flush=True)
if "heartbeats" in sys.argv:
    for step in range(80):
        time.sleep(0.02)
        watchdog.heartbeat()
else:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
watchdog.stop()
"""
WATCH = """
from megatron.cluster.watchdog import Phase
signal.signal(signal.SIGINT, lambda *_: None)
watchdog.start(1.0); watchdog.set_handled_signals(frozenset({2, 15})); watchdog.report.set_iteration(5)
step = watchdog.phase(Phase.STEP); step.__enter__()
"""


def start(program: str, *argv: str, reports: Path | None = None) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3", "RANK_REPORTS": str(reports or "")}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *argv],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


DEVICE = """
import ctypes
from megatron.cluster import watchdog as module
module._DEVICE_ANSWER_S = 1.0
def entries():
    {}
    return {{"device": "has completed ForwardPass", "waits_in": "all_reduce"}}
watchdog.set_device_entries(entries, lambda: b"calls")
"""


def test_hang_is_reported_with_its_stack_and_what_the_device_does(tmp_path: Path) -> None:
    assert start(PROGRAM.format(DEVICE.format("") + WATCH), reports=tmp_path).wait(HANG_TIMEOUT_S) == 124
    (report,) = read_reports(tmp_path)
    assert (report["end"], report["iteration"]) == ("hang", 5)
    assert "<module>" in report["place"] and 'File "<string>", line 29 in <module>' in report["stacks"]
    assert (report["device"], report["waits_in"]) == ("has completed ForwardPass", "all_reduce")
    assert (tmp_path / "flight-3").read_bytes() == b"calls"


def test_hang_of_the_devices_library_is_reported_too(tmp_path: Path) -> None:
    """The call keeps Python's lock, as cudaEventQuery may do."""
    process = start(PROGRAM.format(DEVICE.format("ctypes.PyDLL(None).sleep(1000)") + WATCH), reports=tmp_path)
    assert process.wait(HANG_TIMEOUT_S) == 1
    (report,) = read_reports(tmp_path)
    assert report["end"] == "hang" and "<module>" in report["place"] and "device" not in report


@pytest.mark.full
def test_hang_without_reports_is_printed_to_stderr() -> None:
    process = start(PROGRAM.format(WATCH))
    _, stderr = process.communicate(timeout=HANG_TIMEOUT_S)
    assert process.returncode == 124
    assert stderr.splitlines()[-1].startswith("error: rank 3 on ")
    assert re.search(r"no progress for \d+ s in a step \(--hang-timeout\)", stderr) and "Thread" in stderr


def test_heartbeats_keep_a_process_alive(tmp_path: Path) -> None:
    assert start(PROGRAM.format(WATCH), "heartbeats", reports=tmp_path).wait(HANG_TIMEOUT_S) == 0


@pytest.mark.parametrize(
    ("name", "watch", "code", "end"),
    [
        ("SIGTERM", WATCH, 124, "hang"),
        *[
            (name, "", 128 + signal.Signals[name], "signalled")
            for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
        ],
    ],
)
def test_signal_is_recorded_while_the_main_thread_is_in_native_code(
    name: str, watch: str, code: int, end: str, tmp_path: Path
) -> None:
    """The signal arrives in a step or before the first step, and ends the process."""
    process = start(PROGRAM.format(watch), reports=tmp_path)
    process.send_signal(signal.Signals[name])
    assert process.wait(HANG_TIMEOUT_S) == code
    (report,) = read_reports(tmp_path)
    assert (report["signal"], report["end"]) == (name, end)


def test_sigterm_ends_a_process_that_waits_for_a_failed_rank(tmp_path: Path) -> None:
    process = start(PROGRAM.format(WATCH.replace("1.0", "600.0")), reports=tmp_path)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    RankReport(str(tmp_path), "0").end(ExitStatus.FAILED, "error: broken")
    assert process.wait(HANG_TIMEOUT_S) == 143


def test_second_ctrl_c_ends_the_process_at_once(tmp_path: Path) -> None:
    process = start(PROGRAM.format(WATCH.replace("1.0", "600.0")), reports=tmp_path)
    process.send_signal(signal.SIGINT)
    while read_reports(tmp_path)[0].get("signal") != "SIGINT":
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(HANG_TIMEOUT_S) == 130
    assert read_reports(tmp_path)[0]["end"] == "signalled"


def test_sigterm_without_reports_is_printed() -> None:
    process = start(PROGRAM.format(""))
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=HANG_TIMEOUT_S)
    assert (process.returncode, stderr) == (143, "error: ended by SIGTERM\n")


def test_signal_that_nohup_ignores_does_not_end_the_process(tmp_path: Path) -> None:
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)" + PROGRAM.format("")
    process = start(program, "heartbeats", reports=tmp_path)
    process.send_signal(signal.SIGHUP)
    assert process.wait(HANG_TIMEOUT_S) == 0
    assert "signal" not in read_reports(tmp_path)[0]


TIMEOUT_S = 540.0


class Process:
    """A main thread and a watchdog that ticks every second of a simulated clock."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.detector, self.now, self.io_bytes = HangDetector(timeout_s), 0.0, 0

    def hangs_within(self, seconds: float, *, heartbeat_every: float = 0.0, bytes_per_s: int = 0) -> bool:
        """Returns whether the watchdog finds a hang within the next `seconds`."""
        end, next_heartbeat = self.now + seconds, self.now + heartbeat_every
        while self.now < end:
            self.now += 1.0
            self.io_bytes += bytes_per_s
            if heartbeat_every and self.now >= next_heartbeat:
                self.detector.heartbeat()
                next_heartbeat += heartbeat_every
            if self.detector.tick(self.now, self.io_bytes):
                return True
        return False

    def hangs_in(self, phase: Phase, seconds: float, **progress: float) -> bool:
        self.detector.enter(phase, self.now)
        hangs = self.hangs_within(seconds, **progress)
        self.detector.leave(self.now)
        return hangs


@pytest.mark.parametrize(
    ("before", "phase", "seconds", "bytes_per_s", "expected"),
    [
        ([], Phase.STEP, TIMEOUT_S - 5, 0, False),
        ([], Phase.STEP, TIMEOUT_S + 5, 0, True),
        # The median of earlier steps raises the limit for steps and for the first evaluation. One long step
        # does not raise the limit.
        ([(Phase.STEP, 700)] * 3, Phase.STEP, 2000, 0, False),
        ([(Phase.STEP, 700)] * 3, Phase.STEP, 2200, 0, True),
        ([(Phase.STEP, 700)] * 3, Phase.EVALUATION, 2000, 0, False),
        ([(Phase.STEP, seconds) for seconds in (20, 20, 500, 20, 20)], Phase.STEP, TIMEOUT_S + 5, 0, True),
        # Slow saves raise only the limit of saves.
        ([(Phase.SAVE, 1800)] * 3, Phase.SAVE, 5000, 0, False),
        ([(Phase.SAVE, 1800)] * 3, Phase.STEP, TIMEOUT_S + 5, 0, True),
        # Transferred bytes are progress during a save, but not in a step. The watchdog itself reads 100 bytes
        # per second.
        ([], Phase.SAVE, 20_000, 10_000, False),
        ([], Phase.SAVE, 20_000, 100, True),
        ([], Phase.STEP, 20_000, 10_000_000, True),
        # BigScience measured 586 to 706 s per step for 104B parameters on 32 nodes.
        ([(Phase.STEP, seconds) for seconds in (706, 586, 650) * 3], Phase.STEP, TIMEOUT_S - 5, 0, False),
    ],
)
def test_time_without_progress_is_compared_with_the_limit(
    before: list[tuple[Phase, float]], phase: Phase, seconds: float, bytes_per_s: int, expected: bool
) -> None:
    """Before the phase there are the phases `before`, with their durations in seconds, in which
    finished micro-batches are progress. expected: whether the watchdog reports a hang after `seconds`
    without a micro-batch."""
    process = Process()
    assert not any([process.hangs_in(earlier, duration, heartbeat_every=8) for earlier, duration in before])
    assert process.hangs_in(phase, seconds, bytes_per_s=bytes_per_s) is expected


@pytest.mark.parametrize("phase", [Phase.STEP, Phase.EVALUATION])
def test_a_cold_compilation_is_not_a_hang(phase: Phase) -> None:
    process = Process()
    process.detector = HangDetector(TIMEOUT_S, compiles=True)
    assert not process.hangs_in(phase, 10 * TIMEOUT_S - 5)
    process.detector = HangDetector(TIMEOUT_S, compiles=True)
    assert process.hangs_in(phase, 10 * TIMEOUT_S + 5)
    process.detector = HangDetector(TIMEOUT_S, compiles=True)
    assert not process.hangs_in(phase, 1) and process.hangs_in(phase, TIMEOUT_S + 5)


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [
        (Phase.START, 5400.0),
        (Phase.PREFLIGHT, 540.0),
        (Phase.LOAD, 2160.0),
        (Phase.STEP, 540.0),
        (Phase.EVALUATION, 540.0),
        (Phase.SAVE, 2160.0),
    ],
)
def test_each_phase_has_its_limit(phase: Phase, limit_s: float) -> None:
    process = Process()
    process.detector.enter(phase, 0.0)
    assert process.detector.limit_s() == limit_s and process.detector.phase is phase
    process.detector.leave(0.0)
    assert process.detector.phase is Phase.START


def test_save_inside_a_step_has_its_own_limit_and_the_step_continues_afterwards() -> None:
    process = Process()
    process.detector.enter(Phase.STEP, process.now)
    assert not process.hangs_in(Phase.SAVE, 2000)
    assert not process.hangs_within(TIMEOUT_S - 5)
    assert process.hangs_within(10)


def test_time_in_which_the_process_is_stopped_does_not_count() -> None:
    process = Process()
    process.detector.enter(Phase.STEP, process.now)
    assert not process.hangs_within(500)
    process.now += 100_000.0
    assert not process.hangs_within(30)
    assert process.hangs_within(20)


def test_without_a_timeout_nothing_hangs() -> None:
    assert not Process(0.0).hangs_in(Phase.STEP, 100_000)
