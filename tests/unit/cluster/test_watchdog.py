"""The watchdog thread, in separate processes."""

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
from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S

# Like a collective, the lock is native code in which no Python handler runs.
PROGRAM = """
import signal, sys, threading, time
from megatron.cluster.rank_reports import RankReport
from megatron.cluster.watchdog import Watchdog

watchdog = Watchdog(RankReport.from_environment())
{}
print("ready", flush=True)
if "heartbeats" in sys.argv:
    for step in range(8):
        time.sleep(0.3)
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


def test_hang_is_reported_with_its_stack(tmp_path: Path) -> None:
    process = start(PROGRAM.format(WATCH), reports=tmp_path)
    assert process.wait(HANG_TIMEOUT_S) == 124
    (report,) = read_reports(tmp_path)
    assert (report["end"], report["iteration"]) == ("hang", 5)
    assert "<module>" in report["place"] and 'File "<string>", line 21 in <module>' in report["stacks"]


DEVICE = """
import ctypes
from megatron.cluster import watchdog as module
module._DEVICE_ANSWER_S = 1.0
def facts():
    {}
    return {{"device": "has completed ForwardPass", "waits_in": "all_reduce"}}
watchdog.set_device_facts(facts, lambda: b"calls")
"""


def test_hang_reports_what_the_device_does(tmp_path: Path) -> None:
    assert start(PROGRAM.format(DEVICE.format("") + WATCH), reports=tmp_path).wait(HANG_TIMEOUT_S) == 124
    (report,) = read_reports(tmp_path)
    assert (report["device"], report["waits_in"]) == ("has completed ForwardPass", "all_reduce")
    assert (tmp_path / "flight-3").read_bytes() == b"calls"


def test_hang_of_the_devices_library_is_reported_too(tmp_path: Path) -> None:
    """As cudaEventQuery may, the call holds Python's lock."""
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
    ("watch", "code", "end"), [("", 143, "signalled"), (WATCH, 124, "hang")], ids=["start", "step"]
)
def test_sigterm_is_recorded_while_the_main_thread_is_in_native_code(
    watch: str, code: int, end: str, tmp_path: Path
) -> None:
    process = start(PROGRAM.format(watch), reports=tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_TIMEOUT_S) == code
    (report,) = read_reports(tmp_path)
    assert (report["signal"], report["end"]) == ("SIGTERM", end)


def test_sigterm_ends_a_process_that_waits_for_a_failed_rank(tmp_path: Path) -> None:
    process = start(PROGRAM.format(WATCH.replace("1.0", "600.0")), reports=tmp_path)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
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


@pytest.mark.parametrize("name", ["SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_other_signals_before_the_first_step_are_recorded(name: str, tmp_path: Path) -> None:
    process = start(PROGRAM.format(""), reports=tmp_path)
    process.send_signal(signal.Signals[name])
    assert process.wait(HANG_TIMEOUT_S) == 128 + signal.Signals[name]
    (report,) = read_reports(tmp_path)
    assert (report["signal"], report["end"]) == (name, "signalled")


def test_signal_that_nohup_ignores_does_not_end_the_process(tmp_path: Path) -> None:
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)" + PROGRAM.format("")
    process = start(program, "heartbeats", reports=tmp_path)
    process.send_signal(signal.SIGHUP)
    assert process.wait(HANG_TIMEOUT_S) == 0
    assert "signal" not in read_reports(tmp_path)[0]
