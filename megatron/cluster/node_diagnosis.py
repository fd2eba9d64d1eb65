"""Diagnosis of a run with temporary rank reports: one rank per node prints it before it exits.

The first rank of a node that does not finish is responsible. It prints its own error at once. If the end of
another rank may have caused its error, it first waits until the other ranks have ended. So the cause is in
the log before torch's launcher ends, whose summary shows it, too. Needs no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.cluster.diagnosis import Diagnosis, diagnose, is_own_failure
from megatron.cluster.exit_status import ExitStatus, is_lost_connection
from megatron.cluster.launch import has_torch_launcher, local_world_size_of, node_rank_of, world_size_of
from megatron.cluster.node_processes import is_running
from megatron.cluster.rank_reports import RankReport, ended_well, read_reports
from megatron.errors import print_error, write_error_file
from megatron.files import open_own

# A rank waits this long for the other ranks of its node. torch's launcher sends SIGKILL 30 s after SIGTERM,
# and a rank without an error ends 10 s after another one has ended.
_MAX_WAIT_FOR_RANKS_S = 15.0
# A rank that is not stuck notes a signal within this time.
_MAX_WAIT_FOR_SIGNALS_S = 3.0
# If a rank does not know how many ranks its node has, it waits this long for the reports of all ranks.
_MAX_WAIT_FOR_REPORTS_S = 5.0
_POLL_INTERVAL_S = 0.01
_ELSEWHERE = "the cause may be on another node, or a rank that was started from another shell: see its error"
# Exists once a rank is responsible, and has content once it has printed.
_CLAIM_FILE = "diagnosis"


def end_rank(report: RankReport, end: ExitStatus, text: str, **facts: Any) -> None:
    """Writes how this rank ends to its report; the diagnosis of the reports selects what is printed. Prints
    the text if there is no report."""
    if report.end(end, text, **facts):
        finish_rank_reports(report)
    else:
        print_error(text)


def finish_rank_reports(report: RankReport, env: Mapping[str, str] = os.environ) -> None:
    """Prints the diagnosis if this rank is responsible. The last rank of the node deletes the reports. Does
    nothing with RANK_REPORTS. Every rank calls it after `report.end`."""
    if not (report.is_temporary and report.is_enabled):
        return
    with suppress(OSError), report.diagnosis_lock:
        assert report.folder is not None
        if _is_responsible(report):
            if not is_own_failure(report.facts):
                _wait_for_ranks(report, env)
            print_diagnosis(report.folder, _num_processes(env), _prints_errors_of_all(env))
            if has_torch_launcher(env):
                (report.folder / _CLAIM_FILE).write_text("printed")
            else:  # the next run of the same shell would use the same folder
                _wait_for_ranks(report, env)
                report.remove_folder()
                return
        with report.folder_lock():
            _remove_if_last(report, env)


def _is_responsible(report: RankReport) -> bool:
    """Returns whether this rank, which has ended, is the first rank of the node that did not finish."""
    assert report.folder is not None
    with report.folder_lock():
        claim = report.folder / _CLAIM_FILE
        if claim.exists() or ended_well(report.facts):
            return False
        os.close(open_own(claim))
        return True


def _remove_if_last(report: RankReport, env: Mapping[str, str]) -> None:
    """Deletes the reports if no rank needs them: the others have ended and the diagnosis is printed, or none
    is needed."""
    assert report.folder is not None
    claim = report.folder / _CLAIM_FILE
    reports = read_reports(report.folder)
    if claim.exists():
        # A rank that starts late must find the claim.
        is_done = claim.stat().st_size > 0 and len(reports) >= (local_world_size_of(env) or 0)
    else:
        # A rank that has not ended well is about to claim.
        is_done = all(ended_well(other) for other in reports if "end" in other)
    if is_done and not _running(reports):
        report.remove_folder()


def _running(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the reports of ranks that have not ended."""
    return [report for report in reports if "end" not in report and is_running(report["pid"])]


def _wait_for_ranks(report: RankReport, env: Mapping[str, str]) -> None:
    """Waits until the other ranks of this node have ended, unless this rank is asked to end. After a signal
    some ranks may never report."""
    assert report.folder is not None
    folder, expected = report.folder, local_world_size_of(env)

    def all_reported() -> bool:
        return report.stop_waiting.is_set() or len(read_reports(folder)) >= (expected or world_size_of(env))

    def all_ended() -> bool:
        return report.stop_waiting.is_set() or not _running(read_reports(folder))

    def all_signalled() -> bool:
        return all("signal" in other for other in _running(read_reports(folder)))

    if "signal" not in report.facts:
        _wait(all_reported, _MAX_WAIT_FOR_RANKS_S if expected else _MAX_WAIT_FOR_REPORTS_S)
    _wait(all_ended, _MAX_WAIT_FOR_RANKS_S)
    if report.facts["end"] == ExitStatus.HANG:
        _wait(all_signalled, _MAX_WAIT_FOR_SIGNALS_S)


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
    """Prints the diagnosis of the reports in a temporary folder. processes: see `_num_processes`.
    prints_errors_of_all: see `_prints_errors_of_all`."""
    reports = read_reports(folder)
    is_hang = any(report.get("end") == ExitStatus.HANG for report in reports)
    for report in _running(reports):
        # A rank that runs is not the cause, unless it is stuck in a hang and does not even note a signal.
        if not is_hang or "signal" in report:
            report["end"] = ExitStatus.ABORTED
    diagnosis = diagnose(reports, processes or len(reports))
    if not processes:
        diagnosis = _without_lost_connections(diagnosis)
    elsewhere = not processes and _is_printed_elsewhere(
        diagnosis, {report["rank"] for report in reports}, prints_errors_of_all
    )
    if diagnosis.text:
        (write_error_file if elsewhere else print_error)(diagnosis.text)


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
