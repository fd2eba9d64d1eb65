"""Which rank was the first cause, from what the ranks left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.cluster.diagnosis import Diagnosis, Slurm, diagnose
from megatron.cluster.rank_reports import ExitStatus, RankReport
from tests.end_to_end.command import ROOT


def report(rank: int, end: ExitStatus | None = None, **facts: Any) -> dict[str, Any]:
    """Of a rank of two nodes of two processes."""
    ended = {} if end is None else {"end": end.value, "text": "", "ended": 10.0}
    who = {"rank": rank, "host": f"n{1 + rank // 2}", "pid": 100 + rank, "stage": rank // 2, "stacks": ""}
    return {**who, "iteration": 7, **ended, **facts}


def last_line(*reports: dict[str, Any], **options: Any) -> str:
    verdict = diagnose(reports, 4, **options)
    assert verdict.code == 1
    return verdict.text.splitlines()[-1]


def all_but(*others: dict[str, Any], end: ExitStatus | None, **facts: Any) -> list[dict[str, Any]]:
    """The others, and reports of all other ranks with this end."""
    ranks = {other["rank"] for other in others}
    return [*others, *(report(rank, end, **facts) for rank in range(4) if rank not in ranks)]


def test_a_run_that_ended_well_needs_no_words() -> None:
    assert diagnose(all_but(end=ExitStatus.FINISHED), 4) == Diagnosis(0)
    assert diagnose(all_but(end=ExitStatus.CONTINUED), 4) == Diagnosis(75)


def test_reports_that_are_not_seen_are_no_failure_of_the_run() -> None:
    verdict = diagnose(all_but(end=ExitStatus.FINISHED), 5)
    assert verdict.code == 2 and "rank 4 left no report: the nodes do not share" in verdict.text


def test_a_run_that_did_no_step_is_not_continued_for_ever() -> None:
    reports = [{**report(rank, ExitStatus.CONTINUED)} for rank in range(4)]
    for one in reports:
        del one["iteration"]
    verdict = diagnose(reports, 4)
    assert verdict.code == 2 and "before its first step" in verdict.text
    assert diagnose(reports, 4, ended_by_slurm=True).code == 75  # Slurm brings it back by itself


def test_the_first_failure_counts_with_its_trace() -> None:
    error = "Traceback ...\nerror: rank 2 on n2: ValueError: x: y"
    first = report(2, ExitStatus.FAILED, text=error, ended=11.0, first=True)
    verdict = diagnose(all_but(first, end=ExitStatus.FAILED, text="error: rank 0 on n1: lost", ended=10.0), 4)
    assert verdict.text.splitlines() == [
        "Traceback ...",
        "error: rank 2 on n2, stage 1 (pid 102), after iteration 7: ValueError: x: y",
    ]
    # The store that knows the order is gone: the clocks decide.
    earliest = report(3, ExitStatus.FAILED, text="error: rank 3 on n2: KeyError: 1", ended=9.0)
    assert "rank 3 on n2" in last_line(*all_but(earliest, end=ExitStatus.FAILED, text="error: lost"))


def test_a_rank_that_was_killed_is_the_cause_of_what_the_others_tell() -> None:
    killed = report(1)
    expected = "error: rank 1 on n1, stage 0 (pid 101), after iteration 7: killed (SIGKILL)"
    assert last_line(*all_but(killed, end=ExitStatus.FAILED, first=True)).startswith(expected)
    # Those that the launcher or srun ended then know of its SIGTERM.
    assert last_line(*all_but(killed, end=None, signal="SIGTERM")).startswith(expected)


def test_a_crash_in_native_code_is_told_with_its_stack() -> None:
    crashed = report(1, stacks="Fatal Python error: Segmentation fault\n\nCurrent thread\n  File x")
    verdict = diagnose(all_but(crashed, end=ExitStatus.FAILED), 4)
    assert "Current thread" in verdict.text
    assert verdict.text.endswith("crashed: Segmentation fault") and "rank 1" in verdict.text.splitlines()[-1]


def test_all_ranks_of_a_node_point_to_the_node() -> None:
    line = last_line(*all_but(report(2), report(3), end=ExitStatus.FAILED))
    assert "rank 2 on n2" in line and "1 more: rank 3" in line and "node is lost" in line


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([report(1)], "error: hang: rank 1 on n1, stage 0 (pid 101): does not answer"),
        ([report(1, signal="SIGTERM")], "error: hang: rank 1 on n1, stage 0 (pid 101): does not answer"),
        (
            [report(2, ExitStatus.HANG, place="loader.py:80 read")],
            "error: hang: rank 2 on n2, stage 1 (pid 102): at loader.py:80 read, where the others are not",
        ),
        ([], "error: hang: all ranks wait in the same place, for the network or each other"),
    ],
)
def test_of_a_hang_the_rank_that_differs_is_named(others: list[dict[str, Any]], expected: str) -> None:
    reports = all_but(*others, end=ExitStatus.HANG, place="x.py:1 all_reduce")
    assert last_line(*reports) == expected
    assert "at x.py:1 all_reduce" in diagnose(reports, 4).text


def test_of_a_hang_a_stopped_rank_is_named() -> None:
    hung = {"end": ExitStatus.HANG, "place": "x.py:1 all_reduce", "stopped": [1]}
    assert last_line(*all_but(report(1), **hung)).endswith("stopped by a signal (SIGSTOP)")


@pytest.mark.parametrize("end", [ExitStatus.MISTAKE, ExitStatus.STOPPED])
def test_what_would_happen_again_needs_a_person(end: ExitStatus) -> None:
    told = report(2, end, text="error: --x is 3")
    who = "error: rank 2 on n2, stage 1 (pid 102), after iteration 7"
    assert diagnose(all_but(told, end=None, signal="SIGTERM"), 4) == Diagnosis(2, f"{who}: --x is 3")
    # Where every node says the same, no rank is to blame.
    assert diagnose(all_but(told, end=end, text="error: --x is 3"), 4) == Diagnosis(2, "error: --x is 3")


def test_ranks_that_never_started_are_named() -> None:
    line = last_line(report(0, None, signal="SIGTERM"), report(1, None, signal="SIGTERM"))
    assert line.startswith("error: ranks 2-3 of 4 never started")


def test_slurm_ended_the_job() -> None:
    ended = {"slurm": Slurm("CANCELLED"), "ended_by_slurm": True}
    line = last_line(*all_but(report(1), end=ExitStatus.FAILED), **ended)
    assert line == "error: Slurm ended the job (CANCELLED), after iteration 7"
    verdict = diagnose(all_but(end=ExitStatus.CONTINUED), 4, **ended)
    assert verdict == Diagnosis(
        75, "Slurm ended the job (CANCELLED), after iteration 7: checkpoint saved, resumes after requeue"
    )


def test_a_lost_node_is_named() -> None:
    line = last_line(*all_but(report(1), end=ExitStatus.FAILED), slurm=Slurm("RUNNING", ("n2",)))
    assert line == "error: lost the node n2, which does not answer Slurm, after iteration 7"


def test_the_command_tells_on_stderr_and_by_its_code(tmp_path: Path) -> None:
    RankReport(str(tmp_path), "0", "n1").end(ExitStatus.MISTAKE, "error: --lr is 0")
    command = [sys.executable, "-m", "megatron.cluster.diagnosis", str(tmp_path), "--processes", "1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (2, "", "error: --lr is 0\n")
