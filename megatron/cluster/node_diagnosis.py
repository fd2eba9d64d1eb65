"""Diagnosis of a run with temporary rank reports: one process per node prints it when the ranks have ended.

The first rank of a node that does not finish is responsible. Under torch's launcher it starts this module as
a detached process, which waits until the launcher has exited. So the cause is the last line of the log, after
the launcher's traceback. Without a launcher, and in a Slurm step (where Slurm kills detached processes), the
diagnosis is printed as soon as the ranks of the node have ended. Needs no torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.child_processes import python_path, signals_blocked
from megatron.cluster.diagnosis import Diagnosis, diagnose
from megatron.cluster.exit_status import ExitStatus, is_lost_connection
from megatron.cluster.launch import has_torch_launcher, local_world_size_of, node_rank_of, world_size_of
from megatron.cluster.node_processes import is_running
from megatron.cluster.rank_reports import RankReport, read_reports
from megatron.errors import printable
from megatron.files import open_own

# torch's launcher sends SIGKILL 30 s after SIGTERM.
_MAX_WAIT_FOR_LAUNCHER_S = 90.0
# A rank without a launcher waits this long for the other ranks of its node.
_MAX_WAIT_FOR_RANKS_S = 20.0
# If a rank does not know how many ranks its node has, it waits this long for the reports of all ranks.
_MAX_WAIT_FOR_REPORTS_S = 5.0
_POLL_INTERVAL_S = 0.01
_ELSEWHERE = "the cause may be on another node, or a rank that was started from another shell: see its error"
_CLAIM_FILE = "diagnosis"
# Signals that must not end the detached process.
_IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def end_rank(report: RankReport, end: ExitStatus, text: str, **facts: Any) -> None:
    """Writes how this rank ends to its report; the diagnosis of the reports selects what is printed. Prints
    the text if there is no report."""
    if report.end(end, text, **facts):
        finish_rank_reports(report)
    else:
        print(printable(text), file=sys.stderr, flush=True)


def finish_rank_reports(report: RankReport, env: Mapping[str, str] = os.environ) -> None:
    """Starts or prints the diagnosis, or deletes the reports of a run that ended well. Does nothing with
    RANK_REPORTS. Every rank calls it after `report.end`."""
    if not (report.is_temporary and report.is_enabled):
        return
    with suppress(OSError), report.diagnosis_lock:
        if not _is_responsible(report):
            return
        assert report.folder is not None
        if has_torch_launcher(env):
            _start_detached(report.folder, env)
        else:
            _wait_for_ranks(report, env)
            print_diagnosis(report.folder, _num_processes(env), _prints_errors_of_all(env))


def _is_responsible(report: RankReport) -> bool:
    """Returns whether this rank, which has ended, is the first rank of the node that did not finish. The last
    rank of a run that ended well deletes the folder."""
    assert report.folder is not None
    with report.folder_lock():
        claim = report.folder / _CLAIM_FILE
        if claim.exists():
            return False
        if not report.ended_well:
            os.close(open_own(claim))
            return True
        if not _running(report.folder):
            report.remove_folder()
        return False


def _running(folder: Path) -> list[int]:
    """Returns the process ids of ranks that have not ended."""
    return [
        report["pid"] for report in read_reports(folder) if "end" not in report and is_running(report["pid"])
    ]


def _wait_for_ranks(report: RankReport, env: Mapping[str, str]) -> None:
    assert report.folder is not None
    folder, expected = report.folder, local_world_size_of(env)

    def all_reported() -> bool:
        return report.stop_waiting.is_set() or len(read_reports(folder)) >= (expected or world_size_of(env))

    def all_ended() -> bool:
        return report.stop_waiting.is_set() or not _running(folder)

    _wait(all_reported, _MAX_WAIT_FOR_RANKS_S if expected else _MAX_WAIT_FOR_REPORTS_S)
    _wait(all_ended, _MAX_WAIT_FOR_RANKS_S)


def _wait(condition: Callable[[], bool], max_s: float) -> None:
    deadline = time.monotonic() + max_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)


def _num_processes(env: Mapping[str, str]) -> int:
    """Returns the number of processes of the run; 0 if some are on other nodes, with other folders."""
    world_size = world_size_of(env)
    return world_size if local_world_size_of(env) == world_size else 0


def _prints_errors_of_all(env: Mapping[str, str]) -> bool:
    """Returns whether this node prints an error that all ranks report: the first node, or every node if nodes
    have no numbers. Rank 0's report does not decide: rank 0 may have ended before it opened the report."""
    return _num_processes(env) > 0 or node_rank_of(env) in (0, None)


def print_diagnosis(folder: Path, processes: int, prints_errors_of_all: bool = True) -> None:
    """Prints the diagnosis of the reports in a temporary folder and deletes it. processes: see
    `_num_processes`. prints_errors_of_all: see `_prints_errors_of_all`."""
    reports = read_reports(folder)
    for report in reports:
        if "end" not in report and is_running(report["pid"]):
            report["end"] = ExitStatus.ABORTED  # the wait for this rank has timed out
    diagnosis = diagnose(reports, processes or len(reports))
    if not processes:
        diagnosis = _without_lost_connections(diagnosis)
    shutil.rmtree(folder, ignore_errors=True)
    elsewhere = not processes and _is_printed_elsewhere(
        diagnosis, {report["rank"] for report in reports}, prints_errors_of_all
    )
    if diagnosis.text and not elsewhere:
        print(printable(diagnosis.text), file=sys.stderr, flush=True)


def _without_lost_connections(diagnosis: Diagnosis) -> Diagnosis:
    """Returns a diagnosis without the traceback of a lost connection, which another node has caused."""
    *_, error = diagnosis.text.splitlines() or [""]
    is_failure = diagnosis.cause is not None and diagnosis.cause["end"] == ExitStatus.FAILED
    if not (is_failure and is_lost_connection(error)):
        return diagnosis
    return replace(diagnosis, text=f"{error} ({_ELSEWHERE})")


def _is_printed_elsewhere(diagnosis: Diagnosis, local_ranks: set[int], prints_errors_of_all: bool) -> bool:
    """Returns whether another node prints the cause. The first node prints an error of all ranks; otherwise
    the node of the rank that failed first prints its error."""
    cause = diagnosis.cause or {}
    if cause.get("on_all_ranks"):
        return not prints_errors_of_all
    return "first_rank" in cause and cause["first_rank"] not in local_ranks


def _start_detached(folder: Path, env: Mapping[str, str]) -> None:
    launcher = os.getppid()
    # The diagnosis must not wait for a launcher that starts the processes again, that is the init process of
    # a container (all processes end with it), or that runs in a Slurm step, which ends with it.
    restarts = int(env.get("TORCHELASTIC_RESTART_COUNT", "0")) < int(
        env.get("TORCHELASTIC_MAX_RESTARTS", "0")
    )
    waits = not (restarts or launcher == 1 or "SLURM_STEP_ID" in env)
    sys.stdout.flush()
    # The launcher sends SIGTERM to the rank's process group, and the new process leaves the group a moment
    # after its start. It inherits the mask, so that no signal ends it before `main` ignores them.
    with signals_blocked(_IGNORED_SIGNALS):
        _popen_diagnosis(folder, env, launcher if waits else 0)


def _popen_diagnosis(folder: Path, env: Mapping[str, str], launcher: int) -> None:
    subprocess.Popen(
        [sys.executable, "-m", "megatron.cluster.node_diagnosis", str(folder)]
        + ["--processes", str(_num_processes(env)), "--launcher", str(launcher)]
        + ["--errors-of-all-elsewhere"] * (not _prints_errors_of_all(env)),
        env={**env, "PYTHONPATH": python_path(env)},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def main() -> None:
    """Runs the detached process."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(
        description="prints the diagnosis when all ranks of this node have ended"
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument(
        "--launcher", type=int, required=True, help="process to wait for; 0: wait only for the ranks"
    )
    parser.add_argument(
        "--errors-of-all-elsewhere",
        action="store_true",
        help="another node prints an error that all ranks have",
    )
    arguments = parser.parse_args()
    if arguments.launcher:
        _wait(lambda: not is_running(arguments.launcher), _MAX_WAIT_FOR_LAUNCHER_S)
    _wait(lambda: not _running(arguments.folder), _MAX_WAIT_FOR_LAUNCHER_S)
    print_diagnosis(arguments.folder, arguments.processes, not arguments.errors_of_all_elsewhere)


if __name__ == "__main__":
    main()
