"""The thread that finds what the main thread cannot tell, in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.cluster.rank_reports import ExitStatus, RankReport, read_reports
from tests.end_to_end.command import ROOT

# The lock is native code in which no Python handler runs, as a collective is.
PROGRAM = """
import sys, threading, time
from megatron.cluster.rank_reports import RankReport
from megatron.cluster.watchdog import Watchdog

watchdog = Watchdog(RankReport.from_environment())
{}
print("ready", flush=True)
if "beats" in sys.argv:
    for step in range(8):
        time.sleep(0.5)
        watchdog.heartbeat(step)
else:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
watchdog.stop()
"""
WATCH = "watchdog.start(3.0, signals_handled=True); watchdog.heartbeat(5)"


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


def test_a_step_that_never_ends_is_found_with_its_stack(tmp_path: Path) -> None:
    process = start(PROGRAM.format(WATCH), reports=tmp_path)
    assert process.wait(30) == 124
    (report,) = read_reports(tmp_path)
    assert (report["end"], report["iteration"]) == ("hang", 5)
    assert "<module>" in report["place"] and 'File "<string>", line 16 in <module>' in report["stacks"]


def test_without_reports_a_hang_is_told_on_stderr() -> None:
    process = start(PROGRAM.format(WATCH))
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 124
    assert stderr.splitlines()[-1].startswith("error: rank 3 on ")
    assert "no step ended for 3 s (--hang-timeout)" in stderr and "Thread" in stderr


def test_beats_keep_a_process_alive(tmp_path: Path) -> None:
    assert start(PROGRAM.format(WATCH), "beats", reports=tmp_path).wait(30) == 0


def test_standing_still_as_a_whole_is_no_hang(tmp_path: Path) -> None:
    process = start(PROGRAM.format(WATCH), "beats", reports=tmp_path)
    process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    process.send_signal(signal.SIGCONT)
    assert process.wait(30) == 0


@pytest.mark.parametrize(("watch", "code", "end"), [("", 143, "signalled"), (WATCH, 124, "hang")])
def test_sigterm_is_noted_though_the_main_thread_is_in_native_code(
    watch: str, code: int, end: str, tmp_path: Path
) -> None:
    process = start(PROGRAM.format(watch), reports=tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == code
    (report,) = read_reports(tmp_path)
    assert (report["signal"], report["end"]) == ("SIGTERM", end)


def test_sigterm_ends_a_process_that_is_stuck_for_the_failure_of_another(tmp_path: Path) -> None:
    process = start(
        PROGRAM.format("watchdog.start(600.0, signals_handled=True); watchdog.heartbeat(5)"), reports=tmp_path
    )
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    RankReport(str(tmp_path), "0").end(ExitStatus.FAILED, "error: broken")
    assert process.wait(30) == 143
