"""A run that is interrupted in many ways prints the lines of an uninterrupted run."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron.training.log_lines import parse_log_line
from tests.end_to_end.command import ROOT, Run, environment, pretrain, pretrain_typed
from tests.end_to_end.flags import ABSOLUTE, MODEL, RAMPED, RAMPED_STEPS
from tests.support import HANG_TIMEOUT_S

FLAGS = [*MODEL, *ABSOLUTE, *RAMPED, "--pipeline-model-parallel-size", "2", "--zero-stage", "1"]


@pytest.fixture(scope="module")
def interrupted(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Run], Path]:
    """Returns five starts of one run, and its checkpoints. The starts: stopped at an interval, killed,
    stopped by the kill switch, stopped by a signal to one of its processes, and complete."""
    folder = tmp_path_factory.mktemp("interrupted")
    checkpoints, switch = folder / "checkpoints", folder / "stop"
    flags = [*FLAGS, *data, "--save", str(checkpoints), "--load", str(checkpoints)]

    def kill_after_step_8(line: str, pids: list[int]) -> None:
        if (parse_log_line(line) or {}).get("iteration") == 8:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    def flip_switch_after_step_10(line: str, pids: list[int]) -> None:
        if (parse_log_line(line) or {}).get("iteration") == 10:
            switch.touch()

    def signal_one_process_after_step_14(line: str, pids: list[int]) -> None:
        if (parse_log_line(line) or {}).get("iteration") == 14:
            os.kill(pids[-1], signal.SIGUSR2)

    stopped = pretrain([*flags, "--exit-interval", "3"], processes=2)
    killed = pretrain([*flags, "--save-interval", "2"], processes=2, on_line=kill_after_step_8)
    # A kill in the middle of a save leaves files without run.json, and an unchanged `latest`.
    newest = checkpoints / (checkpoints / "latest").read_text()
    shutil.copytree(newest, checkpoints / "global_step19", ignore=shutil.ignore_patterns("run.json"))
    in_background = ["--save-interval", "1", "--async-save"]
    switched = pretrain(
        [*flags, *in_background, "--kill-switch-path", str(switch)],
        processes=2,
        on_line=flip_switch_after_step_10,
    )
    signalled = pretrain(flags, processes=2, on_line=signal_one_process_after_step_14)
    finished = pretrain(flags, processes=2)
    return [stopped, killed, switched, signalled, finished], checkpoints


def test_an_interrupted_run_prints_the_lines_of_an_uninterrupted_one(
    interrupted: tuple[list[Run], Path], data: list[str]
) -> None:
    uninterrupted = pretrain([*FLAGS, *data], processes=2)
    assert len(uninterrupted.steps) == RAMPED_STEPS
    runs, _ = interrupted
    expected = {str(line) for line in uninterrupted.facts}
    for run in runs:
        assert [line for line in run.facts if str(line) not in expected] == []
    steps = {step["iteration"] for run in runs for step in run.steps}
    assert steps == set(range(1, RAMPED_STEPS + 1))
    assert runs[-1].evaluations[-2:] == uninterrupted.evaluations[-2:]


def test_saves_in_the_background_are_logged_when_they_are_complete(
    interrupted: tuple[list[Run], Path],
) -> None:
    """The kill switch stops the run after step 10. Its last checkpoint is complete when the run ends."""
    lines = interrupted[0][2].stdout.splitlines()
    events = [line for line in lines if line.startswith(("saving iteration", "saved "))]
    begun = [int(line.split()[2]) for line in events if "in the background: training waited" in line]
    complete = [int(re.search(r"global_step(\d+)", line)[1]) for line in events if line.startswith("saved ")]
    assert begun and complete[: len(begun)] == begun and complete[-1] == 10
    for step in begun:
        at = [f"saving iteration {step} in" in line or f"global_step{step} in" in line for line in events]
        assert events[at.index(True)].startswith("saving")


def test_each_start_resumes_and_names_the_newest_complete_checkpoint(
    interrupted: tuple[list[Run], Path],
) -> None:
    (stopped, killed, switched, signalled, finished), checkpoints = interrupted
    nothing_there = f"initializing from scratch (--load {checkpoints} holds no checkpoint)"
    assert nothing_there in stopped.stdout
    assert [step["iteration"] for step in stopped.steps] == [1, 2, 3]
    assert f"saved {checkpoints / 'global_step3'}" in stopped.stdout
    assert stopped.evaluations == []  # an incomplete run does not evaluate at its end
    assert stopped.exit_code == 0 and "exiting program at iteration 3" in stopped.stdout

    assert f"starting from {checkpoints / 'global_step3'}, iteration 3" in killed.stdout
    assert killed.exit_code == -signal.SIGKILL

    first = switched.steps[0]["iteration"]
    assert first >= 7 and f"starting from {checkpoints / f'global_step{first - 1}'}," in switched.stdout
    last = switched.steps[-1]["iteration"]
    assert switched.exit_code == 0 and "exiting program: kill switch" in switched.stdout
    assert f"starting from {checkpoints / f'global_step{last}'}," in signalled.stdout

    last = signalled.steps[-1]["iteration"]
    assert signalled.exit_code == 75
    assert f"exiting program at iteration {last}: SIGUSR2 (--exit-signal)" in signalled.stdout
    assert f"starting from {checkpoints / f'global_step{last}'}," in finished.stdout
    # The README's picture shows these lines for a larger model.
    table = (ROOT / "docs" / "figures" / "console.txt").read_text().partition("verification:\n")[2]
    assert re.sub(r"\d+(\.\d+)?", "N", table) in re.sub(r"\d+(\.\d+)?", "N", finished.stdout)
    assert finished.exit_code == 0 and (checkpoints / "latest").read_text() == f"global_step{RAMPED_STEPS}"


def test_a_run_that_must_stop_saves_and_exits_with_75(data: list[str], tmp_path: Path) -> None:
    def end_after_step_3(line: str, pids: list[int]) -> None:
        if (parse_log_line(line) or {}).get("iteration") == 3:
            os.kill(pids[0], signal.SIGTERM)

    folders = ["--save", str(tmp_path), "--load", str(tmp_path)]
    run = pretrain([*MODEL, *ABSOLUTE, *RAMPED, *data, *folders], on_line=end_after_step_3)
    last = run.steps[-1]["iteration"]
    assert run.exit_code == 75 and (tmp_path / "latest").read_text() == f"global_step{last}"
    assert run.stdout.splitlines()[-1] == f"exiting program at iteration {last}: SIGTERM (--exit-signal)"


@pytest.mark.full
def test_a_closed_terminal_ends_a_run_that_has_saved(data: list[str], tmp_path: Path) -> None:
    """The terminal that reads the run's output is gone before the signal arrives. The run must still save."""
    checkpoints, log = tmp_path / "checkpoints", tmp_path / "log"
    folders = ["--save", str(checkpoints), "--load", str(checkpoints), "--log-path", str(log)]
    endless = ["--train-samples", "1000000", "--lr-decay-samples", "1000000"]
    command = [sys.executable, "-u", "pretrain_gpt.py", *MODEL, *ABSOLUTE, *RAMPED, *data, *folders, *endless]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    for line in process.stdout:
        if (parse_log_line(line.rstrip("\n")) or {}).get("iteration") == 2:
            break
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(HANG_TIMEOUT_S) == 75
    lines = log.read_text().splitlines()
    assert any("WARNING: the console cannot be written ([Errno 32] Broken pipe)" in line for line in lines)
    assert lines[-1].endswith("SIGHUP (--exit-signal)")
    last = int(lines[-1].split("iteration ")[1].split(":")[0])
    assert (checkpoints / "latest").read_text() == f"global_step{last}"


@pytest.mark.full
def test_a_checkpoint_opens_on_another_layout(interrupted: tuple[list[Run], Path], data: list[str]) -> None:
    """The checkpoint was saved by PP 2 with ZeRO-1. Two TP ranks without ZeRO must continue with equal
    losses."""
    runs, checkpoints = interrupted
    flags = [*MODEL, *ABSOLUTE, *RAMPED, *data, "--load", str(checkpoints), "--no-train"]
    run = pretrain([*flags, "--tensor-model-parallel-size", "2"], processes=2)
    assert run.exit_code == 0, run.stderr
    expected = runs[-1].evaluations[-2:]
    assert len(run.evaluations) == len(expected) == 2
    for line, wanted in zip(run.evaluations, expected, strict=True):
        assert line["lm_loss"] == pytest.approx(wanted["lm_loss"], rel=1e-6)


def test_a_resumed_run_needs_no_layout_for_the_batches_that_are_past(
    interrupted: tuple[list[Run], Path], data: list[str], tmp_path: Path
) -> None:
    """The ramp-up began with batches of 2, 4 and 6 samples. Micro-batches of 8 fit only the last size."""
    runs, checkpoints = interrupted
    step = runs[3].steps[-1]["iteration"]
    shutil.copytree(checkpoints / f"global_step{step}", tmp_path / f"global_step{step}")
    (tmp_path / "latest").write_text(f"global_step{step}")
    flags = [*MODEL, *ABSOLUTE, *RAMPED, *data, "--load", str(tmp_path), "--micro-batch-size", "8"]
    run = pretrain(flags)
    assert run.exit_code == 0, run.stderr
    assert [line["iteration"] for line in run.steps] == list(range(step + 1, RAMPED_STEPS + 1))
    losses, expected = ([line["lm_loss"] for line in lines] for lines in (run.steps, runs[-1].steps))
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_a_truncated_file_is_named_and_the_checkpoint_before_taken(
    interrupted: tuple[list[Run], Path], data: list[str], tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(interrupted[1], checkpoints)
    damaged = checkpoints / f"global_step{RAMPED_STEPS}" / "mp_rank_01_model_states.pt"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    run = pretrain([*FLAGS, *data, "--load", str(checkpoints)], processes=2)
    assert run.exit_code == 0, run.stderr
    start = next(line for line in run.stdout.splitlines() if line.startswith("starting from "))
    assert f"global_step{RAMPED_STEPS}: {damaged.name} has 1,000 bytes" in start
    assert run.steps[-1] == interrupted[0][-1].steps[-1]


@pytest.mark.full
def test_kills_at_random_instants_of_saving_lose_nothing_that_was_complete(
    data: list[str], tmp_path: Path
) -> None:
    """Each start saves after every step, and is killed in a save or beside it. The last start runs to the
    end."""
    flags = [*MODEL, *ABSOLUTE, *RAMPED, *data]
    uninterrupted = pretrain(flags)
    checkpoints = tmp_path / "checkpoints"
    flags += ["--save", str(checkpoints), "--load", str(checkpoints), "--save-interval", "1"]
    flags += ["--keep-last", "2"]
    instants = random.Random(7)
    complete = 0
    for last_step in (3, 6, 9, 12, 15):
        delay = instants.uniform(0, 0.06)

        def kill(
            line: str, process: subprocess.Popen[str], step: int = last_step, after: float = delay
        ) -> None:
            iteration = (parse_log_line(line) or {}).get("iteration", 0)
            if iteration == step:
                threading.Timer(after, process.kill).start()
            elif iteration > step:
                # Even if the timer is slow, the run is killed before it ends. Its status is read later.
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        run = pretrain_typed(flags, on_line=kill)
        assert run.exit_code == -signal.SIGKILL
        saved = [int(step) for step in re.findall(r"saved \S+/global_step(\d+) ", run.stdout)]
        started = re.search(r"starting from \S+/global_step(\d+)", run.stdout)
        assert (int(started[1]) if started else 0) >= complete
        complete = max(saved)
        assert [step for step in run.steps if step not in uninterrupted.steps] == []
    finished = pretrain(flags)
    assert finished.exit_code == 0, finished.stderr
    assert finished.steps[0]["iteration"] > complete
    assert finished.steps == uninterrupted.steps[-len(finished.steps) :]
    left = {path.name for path in checkpoints.iterdir() if path.is_dir()}
    assert left == {f"global_step{RAMPED_STEPS - 1}", f"global_step{RAMPED_STEPS}"}
