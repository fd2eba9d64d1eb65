"""If a run is killed, interrupted or out of memory, one line of the log names the cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from megatron.training.log_lines import parse_log_line
from tests.end_to_end.command import Run, pretrain, pretrain_typed, scalars
from tests.end_to_end.flags import ABSOLUTE, MODEL, SHORT

FLAGS = [*MODEL, *ABSOLUTE, *SHORT, "--pipeline-model-parallel-size", "2"]


def children(pid: int) -> list[int]:
    """Returns the processes that `pid` has started."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def last_line(run: Run) -> str:
    return run.stderr.splitlines()[-1]


def at_step(number: int, action):
    """Returns a callback that calls action(process) while the run waits after step `number`."""

    def on_line(line: str, process: subprocess.Popen[str]) -> None:
        if (parse_log_line(line) or {}).get("iteration") == number:
            action(process)

    return on_line


def kill_the_last_rank(process: subprocess.Popen[str]) -> None:
    os.kill(children(process.pid)[-1], signal.SIGKILL)


def interrupt(process: subprocess.Popen[str]) -> None:
    """Sends SIGINT to the launcher, which forwards the signal to its processes."""
    process.send_signal(signal.SIGINT)


@pytest.mark.full  # test_containers.py kills a rank under torch's launcher, too
def test_killed_rank_is_named_without_slurm(data: list[str]) -> None:
    run = pretrain_typed([*FLAGS, *data], processes=2, on_line=at_step(2, kill_the_last_rank))
    assert run.exit_code != 0
    (error,) = run.errors
    assert re.match(r"error: rank 1 on \S+, stage 1 \(pid \d+\), after iteration \d: killed", error)
    assert f"traceback : {error}\n" in run.stderr.partition("Root Cause")[2]  # torch's summary


@pytest.mark.full
def test_ctrl_c_saves_and_names_the_iteration_to_resume_from(data: list[str], tmp_path: Path) -> None:
    flags = [*FLAGS, *data, "--save", str(tmp_path), "--load", str(tmp_path)]
    run = pretrain_typed(flags, processes=2, on_line=at_step(2, interrupt))
    saved = (tmp_path / "latest").read_text().removeprefix("global_step")
    expected = (
        f"interrupted by SIGINT, after iteration {saved}: the same command resumes from iteration {saved}"
    )
    assert expected in run.stderr.splitlines() and 2 <= int(saved) < 5
    assert run.errors == []


@pytest.mark.full
def test_ctrl_c_on_one_process_exits_with_130(data: list[str], tmp_path: Path) -> None:
    flags = [*MODEL, *ABSOLUTE, *SHORT, *data, "--save", str(tmp_path), "--log-interval", "2"]
    run = pretrain_typed(flags, on_line=at_step(2, interrupt))
    last = run.steps[-1]["iteration"]
    assert run.exit_code == 130 and run.stderr == ""
    assert run.stdout.splitlines()[-1] == (
        f"exiting program at iteration {last}: SIGINT; to resume, add --load {tmp_path}"
    )
    assert (tmp_path / "latest").read_text() == f"global_step{last}"


@pytest.mark.full
def test_signal_stops_an_evaluation_and_the_resumed_run_repeats_it(data: list[str], tmp_path: Path) -> None:
    flags = [*MODEL, *ABSOLUTE, *SHORT, *data, "--eval-interval", "2", "--eval-iters", "20"]
    whole = pretrain([*flags, "--tensorboard-dir", str(tmp_path / "whole")])
    folders = ["--save", str(tmp_path), "--load", str(tmp_path), "--tensorboard-dir", str(tmp_path / "parts")]

    def terminate(line: str, pids: list[int]) -> None:
        if (parse_log_line(line) or {}).get("iteration") == 2:
            os.kill(pids[0], signal.SIGTERM)

    run = pretrain([*flags, *folders], on_line=terminate)
    assert run.exit_code == 75 and run.evaluations == []
    assert "the evaluation on validation data at iteration 2 was stopped" in run.stdout
    assert (tmp_path / "latest").read_text() == "global_step2"
    resumed = pretrain([*flags, *folders])
    assert [*run.facts, *resumed.facts] == whole.facts and len(whole.evaluations) == 4
    tag = "lm-loss-validation/lm loss validation"
    assert scalars(tmp_path / "parts")[tag] == scalars(tmp_path / "whole")[tag]


@pytest.mark.full
def test_out_of_memory_names_rank_memory_and_flags_and_has_exit_code_2(data: list[str]) -> None:
    run = pretrain([*FLAGS, *data], processes=2, script="tests/end_to_end/out_of_memory.py")
    (line,) = run.errors
    assert line == last_line(run)
    assert re.match(r"error: rank 1 on \S+, stage 1 \(pid \d+\), after iteration 1: out of memory: ", line)
    assert "Tried to allocate 20.00 MiB" in line and "measured on stage 1: resident" in line
    assert "try --" in line and "--dry-run with --gpu KIND" in line
    assert 2 in run.rank_exit_codes


@pytest.mark.full
def test_run_whose_every_step_was_skipped_fails(data: list[str]) -> None:
    run = pretrain([*MODEL, *ABSOLUTE, *SHORT, *data, "--fp16", "--initial-loss-scale", str(2**40)])
    assert run.exit_code == 1
    assert "none of the 5 steps since the launch updated the weights" in last_line(run)
