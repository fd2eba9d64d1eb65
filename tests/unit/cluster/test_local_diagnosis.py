"""Real processes die, with and without a launcher, and leave temporary rank reports."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.cluster.diagnosis import print_diagnosis
from megatron.cluster.exit_codes import finish_rank_reports
from megatron.cluster.rank_reports import ExitStatus, RankReport
from megatron.errors import print_error
from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S

# A rank that prints "ready", waits for a line, and then ends as the line says.
RANK = """
import os, signal, sys
sys.stdin.reconfigure(line_buffering=True)
from megatron.cluster.exit_codes import RunStopped, exit_code, exit_on_error
from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.rank_reports import RankReport
from megatron.cluster.watchdog import Watchdog
from megatron.errors import UserError

report = RankReport.from_environment()
watchdog = Watchdog(report)
print("ready", report.folder, flush=True)
with exit_on_error(report):
    what = sys.stdin.readline().strip()
    report.set_iteration(7)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "mistake":
        raise UserError("--lr is 0")
    if what == "broken":
        raise ValueError("broken")
    if what == "lost":
        raise RuntimeError("Connection closed by peer")
sys.exit(exit_code(report, ExitStatus.FINISHED))
"""
LAUNCHER = """
import os, subprocess, sys, time
ranks = [
    subprocess.Popen([sys.executable, "-c", sys.argv[1]],
                     env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank),
                          "TORCHELASTIC_ERROR_FILE": f"{sys.argv[2]}-{rank}"},
                     stdin=subprocess.PIPE, text=True)
    for rank in range(int(os.environ["WORLD_SIZE"]))
]
for rank, what in zip(ranks, sys.argv[3:]):
    rank.stdin.write(what + "\\n"); rank.stdin.flush()
for rank in ranks:
    rank.wait()
time.sleep(0.2)
print("Traceback of the launcher", file=sys.stderr)
sys.exit(1)
"""


def environment(folder: Path, world_size: int = 2, **more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") and k != "RANK_REPORTS"}
    return {**env, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "WORLD_SIZE": str(world_size), **more}


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Returns a function that starts a rank without a launcher."""
    processes = []

    def start_rank(rank: int, *wrapper: str, before: str = "") -> subprocess.Popen[str]:
        pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
        env = environment(tmp_path, RANK=str(rank))
        command = [*wrapper, sys.executable, "-c", before + RANK]
        process = subprocess.Popen(command, env=env, text=True, **pipes)
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline().startswith("ready")
        return process

    yield start_rank
    for process in processes:
        process.kill()
        process.wait()


def test_without_a_launcher_one_rank_prints_the_first_cause_and_removes_the_reports(
    start: Start, tmp_path: Path
) -> None:
    first, second = start(0), start(1)
    second.communicate("kill\n", timeout=HANG_TIMEOUT_S)
    _, stderr = first.communicate("lost\n", timeout=HANG_TIMEOUT_S)
    assert first.returncode == 1
    (line,) = stderr.splitlines()
    assert line.startswith("error: rank 1 on ") and "after iteration 7: killed (SIGKILL)" in line
    assert not list(tmp_path.glob("megatron-*/*"))


def test_ranks_with_a_wrapper_each_have_a_common_diagnosis(start: Start) -> None:
    """Each rank has a different parent process, as in `RANK=0 timeout 100 python ...`. The ranks must still
    find each other's reports."""
    killed, other = start(0, "timeout", "100"), start(1, "timeout", "100")
    killed.communicate("kill\n", timeout=HANG_TIMEOUT_S)
    _, stderr = other.communicate("lost\n", timeout=HANG_TIMEOUT_S)
    (line,) = stderr.splitlines()
    assert line.startswith("error: rank 0 on ") and "killed (SIGKILL)" in line


def test_same_error_of_all_ranks_is_printed_once(start: Start) -> None:
    ranks = [start(0), start(1)]
    for rank in ranks:
        rank.stdin.write("mistake\n")
        rank.stdin.flush()
    texts = [rank.communicate(timeout=HANG_TIMEOUT_S)[1] for rank in ranks]
    assert sorted(texts) == ["", "error: --lr is 0\n"]
    assert [rank.returncode for rank in ranks] == [2, 2]


@pytest.mark.full  # the test waits 10 s
def test_rank_that_waits_for_another_one_ends_after_its_failure(start: Start, tmp_path: Path) -> None:
    """The second rank waits for stdin, as if it were inside a collective that never ends."""
    first, second = start(0), start(1)
    _, stderr = first.communicate("broken\n", timeout=HANG_TIMEOUT_S)
    assert stderr.splitlines()[-1].endswith("ValueError: broken")
    assert second.wait(HANG_TIMEOUT_S) == 1
    assert not list(tmp_path.glob("megatron-*/*"))


@pytest.mark.full
def test_rank_that_waits_for_another_one_ends_after_its_signal(start: Start, tmp_path: Path) -> None:
    first, second = start(0), start(1)
    second.send_signal(signal.SIGHUP)
    assert (second.wait(HANG_TIMEOUT_S), first.wait(HANG_TIMEOUT_S)) == (129, 1)
    assert second.stderr is not None
    (line,) = second.stderr.read().splitlines()
    assert re.match(r"error: rank 1 on \S+ \(pid \d+\) was ended by SIGHUP, before the first step", line)
    assert not list(tmp_path.glob("megatron-*/*"))


def test_finished_run_prints_nothing_and_removes_the_reports(start: Start, tmp_path: Path) -> None:
    first, second = start(0), start(1)
    assert len(list(tmp_path.glob("megatron-*/*/rank-*.json"))) == 2
    for rank in (first, second):
        assert rank.communicate("\n", timeout=HANG_TIMEOUT_S)[1] == "" and rank.returncode == 0
    assert not list(tmp_path.glob("megatron-*/*"))


def test_second_process_with_the_same_rank_prints_its_own_error(start: Start) -> None:
    first, second = start(0), start(0)
    assert second.communicate("mistake\n", timeout=HANG_TIMEOUT_S)[1] == "error: --lr is 0\n"
    assert first.communicate("\n", timeout=HANG_TIMEOUT_S)[1] == ""


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        (
            ("lost", "kill", "lost"),
            r"error: rank 1 on \S+ \(pid \d+\), after iteration 7: killed \(SIGKILL\), .*",
        ),
        (
            ("lost", "lost", "broken"),
            r"error: rank 2 on \S+ \(pid \d+\), after iteration 7: ValueError: broken",
        ),
        (("mistake", "mistake", "mistake"), "error: --lr is 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_under_a_launcher_the_cause_is_printed_once_before_its_traceback(ends, cause, tmp_path: Path) -> None:
    """The error file of the rank that printed the cause contains it, too."""
    env = environment(tmp_path, 3, LOCAL_WORLD_SIZE="3", TORCHELASTIC_RUN_ID="none")
    run = subprocess.run(
        [sys.executable, "-c", LAUNCHER, RANK, str(tmp_path / "error"), *ends],
        env=env,
        text=True,
        capture_output=True,
        timeout=HANG_TIMEOUT_S,
    )
    *before, last = run.stderr.splitlines()
    assert last == "Traceback of the launcher"
    assert re.fullmatch(cause, before[-1]) and run.stderr.count("error: ") == 1
    assert not list(tmp_path.glob("megatron-*/*"))
    (file,) = tmp_path.glob("error-*")
    assert json.loads(file.read_text())["message"]["message"] == before[-1]


def test_the_summary_of_torchs_launcher_shows_the_cause_as_its_root(tmp_path: Path, monkeypatch) -> None:
    """The file has the format that torch reads. Its time is before the times of errors without a file, so
    torch shows it as the root cause."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    later = ProcessFailure(0, 11, 1, str(tmp_path / "none"))
    print_error("Traceback ...\nerror: rank 1 on n1: ValueError: broken")
    first = ProcessFailure(1, 12, 2, str(tmp_path / "error.json"))
    _, _, root = (
        ChildFailedError("pretrain_gpt.py", {0: later, 1: first}).format_msg().partition("Root Cause")
    )
    assert "rank      : 1" in root and "traceback : error: rank 1 on n1: ValueError: broken" in root


def test_a_rank_that_ended_well_leaves_the_reports_to_a_failed_rank_that_prints(
    tmp_path: Path, capsys
) -> None:
    """The failed rank has written its report. It claims the diagnosis only after the successful rank has
    ended."""
    failed, well = (RankReport(str(tmp_path / "r"), str(rank), "n1", is_temporary=True) for rank in (0, 1))
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    failed.end(ExitStatus.FAILED, "error: ValueError: broken")
    well.end(ExitStatus.FINISHED)
    finish_rank_reports(well, env)
    finish_rank_reports(failed, env)
    assert capsys.readouterr().err.endswith("ValueError: broken\n")
    assert not (tmp_path / "r").exists()


def test_a_rank_that_ends_while_the_reports_are_deleted_neither_prints_nor_leaves_files(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    first, late = (RankReport(str(tmp_path / "r"), str(rank), "n1", is_temporary=True) for rank in (0, 1))
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    for report in (first, late):
        report.end(ExitStatus.FAILED, "error: ValueError: broken")

    def delete(folder: Path, ignore_errors: bool) -> None:
        for path in folder.iterdir():
            path.unlink()
        finish_rank_reports(late, env)
        with suppress(OSError):
            folder.rmdir()

    monkeypatch.setattr(shutil, "rmtree", delete)
    finish_rank_reports(first, env)
    assert capsys.readouterr().err.count("error: ") == 1
    assert not [*tmp_path.iterdir()]


def test_single_process_has_no_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert not RankReport.from_environment({}).is_enabled
    assert not RankReport.from_environment({"RANK": "x", "WORLD_SIZE": "2"}).is_enabled
    assert not list(tmp_path.glob("megatron-*/*/*"))


def test_folder_that_others_can_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"megatron-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"megatron-{os.getuid()}").chmod(0o777)
    assert not RankReport.from_environment({"RANK": "0", "WORLD_SIZE": "2"}).is_enabled


LAUNCHED = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4"}
ONE_NODE = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
SECOND_NODE = {**LAUNCHED, "WORLD_SIZE": "8", "GROUP_RANK": "1"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({**LAUNCHED, "WORLD_SIZE": "4", "GROUP_RANK": "0"}, True),
        ({**LAUNCHED, "WORLD_SIZE": "8", "GROUP_RANK": "0"}, True),
        (SECOND_NODE, False),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_NODEID": "1"}, False),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_NODEID": "0"}, True),
        (BY_HAND, True),
    ],
    ids=str,
)
def test_error_of_all_ranks_is_printed_by_the_first_node(env, expected, tmp_path: Path, capsys) -> None:
    """The first node prints the error even if rank 0 has no report: a launcher may end rank 0 before it has
    opened its report."""
    RankReport(str(tmp_path / "r"), "1", "n1").end(
        ExitStatus.USER_ERROR, "error: --lr is 0", on_all_ranks=True
    )
    print_diagnosis(tmp_path / "r", env)
    assert capsys.readouterr().err == ("error: --lr is 0\n" if expected else "")


@pytest.mark.parametrize(
    ("facts", "printed"),
    [
        ({"on_all_ranks": True}, False),  # the first node prints it
        ({"on_all_ranks": False}, True),
        ({"first_rank": 0}, False),  # a consequence of the failure of rank 0
        ({"first_rank": 4}, True),
    ],
    ids=str,
)
def test_another_node_prints_only_its_own_causes(facts, printed, tmp_path: Path, capsys, monkeypatch) -> None:
    """The error file has the cause in each case, so the summary of each node's launcher shows it."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for rank in (4, 5):
        RankReport(str(tmp_path / "r"), str(rank), "n2").end(
            ExitStatus.FAILED, "error: x: KeyError: 1", **facts
        )
    print_diagnosis(tmp_path / "r", SECOND_NODE)
    assert bool(capsys.readouterr().err) is printed
    assert "KeyError: 1" in (tmp_path / "error.json").read_text()


@pytest.mark.parametrize(
    ("env", "expected"),
    [(BY_HAND, "may be on another node"), (ONE_NODE, "Traceback")],
    ids=["several nodes", "one node"],
)
def test_lost_connection_on_one_of_several_nodes_has_no_traceback(env, expected, tmp_path, capsys) -> None:
    for rank in (0, 1):
        text = f"Traceback\nerror: rank {rank} on n1: RuntimeError: Connection closed by peer [127.0.0.1]"
        RankReport(str(tmp_path / "r"), str(rank), "n1").end(ExitStatus.FAILED, text)
    print_diagnosis(tmp_path / "r", env)
    stderr = capsys.readouterr().err
    assert expected in stderr and ("Traceback" in stderr) is (env is ONE_NODE)


@pytest.mark.parametrize("answers", [False, True])
def test_a_rank_that_notes_no_signal_is_the_cause_of_a_hang(answers: bool, tmp_path: Path, capsys) -> None:
    """The rank runs, but a thread that holds the interpreter's lock keeps its watchdog from reporting
    anything."""
    for rank in (0, 2):
        RankReport(str(tmp_path / "r"), str(rank), "n1").end(ExitStatus.HANG, "", place="x.py:1 all_reduce")
    RankReport(str(tmp_path / "r"), "1", "n1").note(**({"signal": "SIGTERM"} if answers else {}))
    print_diagnosis(tmp_path / "r", {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"})
    assert bool(re.search("rank 1 .*does not answer", capsys.readouterr().err)) is not answers


def test_sigterm_makes_a_rank_print_without_waiting_for_others(start: Start, tmp_path: Path) -> None:
    """When a task on another node fails, Slurm ends the remaining ranks. Rank 1 is stopped; without the
    signal rank 0 would wait for it longer than this test takes."""
    module = "megatron.cluster.exit_codes"
    wait = f"import {module} as module; module._MAX_WAIT_FOR_RANKS_S = {2 * HANG_TIMEOUT_S}"
    first, second = start(0, before=wait), start(1)
    second.send_signal(signal.SIGSTOP)
    first.stdin.write("lost\n")
    first.stdin.flush()
    while not list(tmp_path.glob("megatron-*/*/failed")):
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    assert "Connection closed" in first.communicate(timeout=HANG_TIMEOUT_S)[1]
