"""The diagnosis of a job names the cause of its end from the reports of its ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.cluster.diagnosis import Diagnosis, SlurmJob, diagnose
from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.rank_reports import RankReport
from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S


def report(rank: int, end: ExitStatus | None = None, **facts: Any) -> dict[str, Any]:
    """Returns the report of a rank of a job with two nodes of two processes."""
    ended = {} if end is None else {"end": end.value, "text": "", "ended": 10.0}
    who = {"rank": rank, "host": f"n{1 + rank // 2}", "pid": 100 + rank, "stage": rank // 2, "stacks": ""}
    return {**who, "iteration": 7, **ended, **facts}


def last_line(*reports: dict[str, Any], **options: Any) -> str:
    diagnosis = diagnose(reports, 4, **options)
    assert diagnosis.code == 1
    return diagnosis.text.splitlines()[-1]


def all_but(*others: dict[str, Any], end: ExitStatus | None, **facts: Any) -> list[dict[str, Any]]:
    """Returns the given reports, and for every other rank a report with the status `end`."""
    ranks = {other["rank"] for other in others}
    return [*others, *(report(rank, end, **facts) for rank in range(4) if rank not in ranks)]


def test_run_that_ended_well_prints_nothing() -> None:
    assert diagnose(all_but(end=ExitStatus.FINISHED), 4) == Diagnosis(0)
    assert diagnose(all_but(end=ExitStatus.REQUEUE), 4) == Diagnosis(75)


def test_missing_report_of_a_finished_run_blames_the_folder() -> None:
    diagnosis = diagnose(all_but(end=ExitStatus.FINISHED), 5)
    assert diagnosis.code == 2 and "rank 4 wrote no report: the nodes do not share" in diagnosis.text


def test_run_without_a_step_is_not_requeued() -> None:
    reports = [{**report(rank, ExitStatus.REQUEUE)} for rank in range(4)]
    for one in reports:
        del one["iteration"]
    diagnosis = diagnose(reports, 4)
    assert diagnosis.code == 2 and "before its first step" in diagnosis.text
    assert diagnose(reports, 4, ended_by_slurm=True).code == 75  # Slurm requeues it


def test_first_failure_is_the_cause_with_its_traceback() -> None:
    error = "Traceback ...\nerror: rank 2 on n2: ValueError: x: y"
    first = report(2, ExitStatus.FAILED, text=error, ended=11.0, first=True)
    diagnosis = diagnose(
        all_but(first, end=ExitStatus.FAILED, text="error: rank 0 on n1: lost", ended=10.0), 4
    )
    assert diagnosis.text.splitlines() == [
        "Traceback ...",
        "error: rank 2 on n2, stage 1 (pid 102), after iteration 7: ValueError: x: y",
    ]
    # Without the store's order, the clocks decide which error was first.
    earliest = report(3, ExitStatus.FAILED, text="error: rank 3 on n2: KeyError: 1", ended=9.0)
    assert "rank 3 on n2" in last_line(*all_but(earliest, end=ExitStatus.FAILED, text="error: lost"))


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [/torch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:17893",
        # Over InfiniBand the last of NCCL's lines does not say what has happened.
        "DistBackendError: NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network "
        "error, NCCL version 2.27.5 ncclRemoteError: A call failed possibly due to a network error or a "
        "remote process exiting prematurely. Last error: NET/IB : Got completion from peer "
        "10.0.0.5<47221> with status=12 opcode=0 len=0 vendor err 129",
        "DistNetworkError: failed to recv, got 0 bytes",
        "AcceleratorError: CUDA error: unspecified launch failure",
    ],
)
def test_killed_rank_is_the_cause_of_other_errors(error: str) -> None:
    killed = report(1)
    expected = "error: rank 1 on n1, stage 0 (pid 101), after iteration 7: killed (SIGKILL)"
    text = f"Traceback ...\nerror: rank 0 on n1: {error}"
    assert last_line(*all_but(killed, end=ExitStatus.FAILED, first=True, text=text)).startswith(expected)
    # The launcher or srun has ended the other ranks with SIGTERM.
    assert last_line(*all_but(killed, end=None, signal="SIGTERM")).startswith(expected)


def test_rank_that_was_killed_because_another_failed_is_not_the_cause() -> None:
    """srun kills the ranks of the other nodes, including ranks that cannot write a report yet."""
    text = "Traceback: gloo/NCCL ...\nerror: rank 0 on n1: ValueError: broken"
    failed = report(0, ExitStatus.FAILED, text=text)
    assert last_line(failed, report(1), report(2), report(3, signal="SIGTERM")).endswith("ValueError: broken")
    # torch's NCCL watchdog aborts a rank that has lost its connection to another rank.
    aborted = report(1, stacks="Fatal Python error: Aborted\n\nCurrent thread\n  File x")
    assert last_line(failed, aborted, report(2)).endswith("ValueError: broken")
    crashed = report(1, stacks="Fatal Python error: Segmentation fault\n")
    assert last_line(failed, crashed).endswith("crashed: Segmentation fault")


def test_rank_that_was_aborted_because_it_lost_another_is_not_the_cause() -> None:
    aborted = {"stacks": "Fatal Python error: Aborted\n\nCurrent thread\n  File x"}
    lost = "Traceback ...\nerror: rank 0 on n1: RuntimeError: gloo: Connection closed by peer"
    assert "rank 2 on n2" in last_line(*all_but(report(2), end=None, **aborted))
    assert last_line(*all_but(report(3, **aborted), end=ExitStatus.FAILED, text=lost)) == (
        "error: rank 3 on n2, stage 1 (pid 103), after iteration 7: crashed: Aborted"
    )
    crashed = report(1, stacks="Fatal Python error: Bus error\n")
    assert last_line(*all_but(crashed, end=None, **aborted)).endswith("crashed: Bus error")


def test_native_crash_prints_its_stack() -> None:
    crashed = report(1, stacks="Fatal Python error: Segmentation fault\n\nCurrent thread\n  File x")
    diagnosis = diagnose(all_but(crashed, end=ExitStatus.FAILED), 4)
    assert "Current thread" in diagnosis.text
    assert (
        diagnosis.text.endswith("crashed: Segmentation fault") and "rank 1" in diagnosis.text.splitlines()[-1]
    )


def test_all_ranks_of_a_node_killed_blames_the_node() -> None:
    line = last_line(*all_but(report(2), report(3), end=ExitStatus.FAILED))
    assert "rank 2 on n2" in line and "1 more: rank 3" in line and "node is lost" in line


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([report(1)], "error: hang: rank 1 on n1, stage 0 (pid 101): does not answer"),
        ([report(1, signal="SIGTERM")], "error: hang: rank 1 on n1, stage 0 (pid 101): does not answer"),
        ([report(1, cp_rank=1)], "error: hang: rank 1 on n1, stage 0, CP rank 1 (pid 101): does not answer"),
        (
            [report(2, ExitStatus.HANG, place="loader.py:80 read")],
            "error: hang: rank 2 on n2, stage 1 (pid 102): at loader.py:80 read, where the others are not",
        ),
        ([], "error: hang: all ranks wait at the same place, for the network or for each other"),
    ],
)
def test_hang_names_the_rank_at_another_place(others: list[dict[str, Any]], expected: str) -> None:
    reports = all_but(*others, end=ExitStatus.HANG, place="x.py:1 all_reduce")
    assert last_line(*reports) == expected
    text = diagnose(reports, 4).text
    assert "at x.py:1 all_reduce" in text and "stacks" not in text
    reports = [{**report, "stacks": f"stack {report['rank']}"} for report in reports]
    assert "stacks of rank " in diagnose(reports, 4).text


def test_hang_names_a_stopped_rank() -> None:
    hung = {"end": ExitStatus.HANG, "place": "x.py:1 all_reduce", "stopped": [1]}
    assert last_line(*all_but(report(1), **hung)).endswith("stopped by a signal (SIGSTOP)")


@pytest.mark.parametrize("end", [ExitStatus.USER_ERROR, ExitStatus.STOPPED])
def test_error_that_would_repeat_has_exit_code_2(end: ExitStatus) -> None:
    first = report(2, end, text="error: --x is 3")
    who = "error: rank 2 on n2, stage 1 (pid 102), after iteration 7"
    assert diagnose(all_but(first, end=None, signal="SIGTERM"), 4) == Diagnosis(2, f"{who}: --x is 3", first)
    # If every rank reports one error, no rank is named.
    assert diagnose(all_but(first, end=end, text="error: --x is 3"), 4) == Diagnosis(
        2, "error: --x is 3", first
    )


def test_error_that_is_known_on_all_ranks_names_no_rank() -> None:
    first = report(2, ExitStatus.STOPPED, text="error: iteration 3: nan", on_all_ranks=True)
    assert diagnose(all_but(first, end=None, signal="SIGTERM"), 4).text == "error: iteration 3: nan"


def test_interrupted_run_names_the_iteration_to_resume_from() -> None:
    assert diagnose(all_but(end=ExitStatus.INTERRUPTED, signal="SIGINT", saved_iteration=7), 4) == Diagnosis(
        130, "interrupted by SIGINT, after iteration 7: the same command resumes from iteration 7"
    )
    without_load = {"signal": "SIGINT", "saved_iteration": 7, "load_to_resume": "runs/k5"}
    assert diagnose(all_but(end=ExitStatus.INTERRUPTED, **without_load), 4).text == (
        "interrupted by SIGINT, after iteration 7: saved iteration 7; to resume, add --load runs/k5"
    )
    assert diagnose(all_but(end=ExitStatus.INTERRUPTED), 4).text.endswith("nothing was saved")
    # The first SIGINT before the first step, or the second SIGINT.
    assert diagnose(all_but(end=ExitStatus.SIGNALLED, signal="SIGINT"), 4).code == 130


def test_run_that_stopped_after_a_signal_names_it() -> None:
    assert diagnose(all_but(end=ExitStatus.REQUEUE, signal="SIGTERM", saved_iteration=7), 4) == Diagnosis(
        75, "stopped by SIGTERM, after iteration 7: the same command resumes from iteration 7"
    )


def test_aborted_ranks_are_not_the_cause() -> None:
    failed = report(1, ExitStatus.FAILED, text="Traceback\nerror: rank 1 on n1: ValueError: x")
    assert last_line(*all_but(failed, end=ExitStatus.ABORTED)).startswith("error: rank 1 on n1")
    assert "rank 3 on n2" in last_line(*all_but(report(3), end=ExitStatus.ABORTED))


def test_ranks_that_never_started_are_named() -> None:
    line = last_line(report(0, None, signal="SIGTERM"), report(1, None, signal="SIGTERM"))
    assert line.startswith("error: ranks 2-3 of 4 never started")


def test_job_ended_by_slurm() -> None:
    ended = {"slurm": SlurmJob("CANCELLED"), "ended_by_slurm": True}
    line = last_line(*all_but(report(1), end=ExitStatus.FAILED), **ended)
    assert line == "error: Slurm ended the job (CANCELLED), after iteration 7"
    diagnosis = diagnose(all_but(end=ExitStatus.REQUEUE), 4, **ended)
    assert diagnosis == Diagnosis(
        75, "Slurm ended the job (CANCELLED), after iteration 7: checkpoint saved, resumes after requeue"
    )


def test_lost_node_is_named() -> None:
    line = last_line(*all_but(report(1), end=ExitStatus.FAILED), slurm=SlurmJob("RUNNING", ("n2",)))
    assert line == "error: node n2 is down or not responding to Slurm, after iteration 7"


def test_command_prints_to_stderr_and_sets_the_exit_code(tmp_path: Path) -> None:
    RankReport(str(tmp_path), "0", "n1").end(ExitStatus.USER_ERROR, "error: --lr is 0")
    command = [sys.executable, "-m", "megatron.cluster.diagnosis", str(tmp_path), "--processes", "1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_TIMEOUT_S)
    assert (run.returncode, run.stdout, run.stderr) == (2, "", "error: --lr is 0\n")


WAITS = "has completed SendActivation buffer_id=0 (instruction 5 of the step), runs RecvGrad buffer_id=0"
STUCK = "has completed LoadMicroBatch buffer_id=0 (instruction 1 of the step), runs ForwardPass buffer_id=0"


def hung_on_gpus(**stuck: Any) -> list[dict[str, Any]]:
    """Returns the reports of a hang with NCCL. Every host waits at the end of the step, and only the devices
    differ: rank 3's device does not wait."""
    return [
        report(rank, ExitStatus.HANG, place="x.py:1 tolist", device=WAITS, waits_in=f"recv 0<-1 of {rank}")
        for rank in range(3)
    ] + [report(3, ExitStatus.HANG, place="x.py:1 tolist", device=STUCK, waits_in="", **stuck)]


def test_hang_on_gpus_names_the_rank_whose_device_waits_for_none() -> None:
    text = diagnose(hung_on_gpus(), 4).text
    assert text.splitlines()[-1] == (
        "error: hang: rank 3 on n2, stage 1 (pid 103): at x.py:1 tolist; device "
        f"{STUCK}, waits for no other rank"
    )
    assert f": at x.py:1 tolist; device {WAITS}; rank 0 waits in recv 0<-1 of 0\n" in text


def test_hang_names_the_rank_whose_device_does_not_answer() -> None:
    """The stuck rank's report has no data of the device, since the driver blocked the process until its
    end."""
    *others, stuck = hung_on_gpus()
    del stuck["device"], stuck["waits_in"]
    assert last_line(*others, stuck) == (
        "error: hang: rank 3 on n2, stage 1 (pid 103): its device does not answer"
    )


def test_hang_in_the_first_step_accuses_no_rank_that_may_make_a_communicator() -> None:
    assert last_line(*hung_on_gpus(iteration=0)).endswith("for the network or for each other")


def test_hang_of_many_ranks_has_few_lines() -> None:
    hung = [
        report(rank, ExitStatus.HANG, place="x.py:1", device=f"runs {rank % 40}", waits_in=f"call {rank}")
        for rank in range(384)
    ]
    lines = diagnose(hung, 384).text.splitlines()
    assert len(lines) == 23 and lines[-2] == "  ranks at 20 more positions"


def test_hang_on_cpus_is_judged_by_the_hosts() -> None:
    """gloo records no point-to-point call, so a rank without a recorded call may still wait."""
    reports = [
        report(
            rank, ExitStatus.HANG, place="x.py:1 wait", waits_in="all_reduce (call 2) of ranks 0, 1" * wait
        )
        for rank, wait in enumerate((True, True, False, False))
    ]
    assert last_line(*reports).endswith("for the network or for each other")
