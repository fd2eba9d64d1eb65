"""Runs `pretrain_gpt.py`, either as a user types it, or forked from a process that has done the imports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.training.log_lines import ParsedLine, parse_log_line
from tests.support import HANG_TIMEOUT_S
from tests.support.forked import ENVIRONMENT, run_script

ROOT = Path(__file__).resolve().parents[2]
STEP_BY_STEP = "tests/end_to_end/step_by_step.py"

# Speeds in a line differ from run to run. All other values must be equal.
SPEEDS = ("seconds_per_iteration", "samples_per_second", "tflops_per_device")


@dataclass(frozen=True)
class Run:
    """A finished run. rank_exit_codes: exit codes of the ranks that ended on their own. After a rank has
    failed, the other ranks get SIGTERM."""

    exit_code: int
    stdout: str
    stderr: str
    rank_exit_codes: set[int]

    def ok(self) -> Run:
        """Returns the run. Fails the test if the program failed."""
        assert self.exit_code == 0, self.stdout + self.stderr
        return self

    @property
    def facts(self) -> list[ParsedLine]:
        """Returns each training and validation line without speeds."""
        lines = [parse_log_line(line) for line in self.stdout.splitlines()]
        return [{k: v for k, v in line.items() if k not in SPEEDS} for line in lines if line is not None]

    @property
    def steps(self) -> list[ParsedLine]:
        return [line for line in self.facts if line["kind"] == "training"]

    @property
    def evaluations(self) -> list[ParsedLine]:
        return [line for line in self.facts if line["kind"] == "validation"]

    @property
    def errors(self) -> list[str]:
        """Returns the program's own error lines on stderr."""
        return [line for line in self.stderr.splitlines() if re.match(r"(rank \d+ on \S+: )?error: ", line)]


@dataclass(frozen=True)
class TypedRun(Run):
    """A run whose command was started. cpu_s, peak_bytes: resources of the started process, without its child
    processes."""

    cpu_s: float
    peak_bytes: int


def pretrain(
    flags: list[str],
    *,
    processes: int = 0,
    on_line: Callable[[str, list[int]], None] | None = None,
    script: str = "pretrain_gpt.py",
) -> Run:
    """Runs the program in forked processes, with the variables of a launcher unless `processes` is 0.

    on_line: called with each line of stdout and the process ids by rank. After a training line the run waits
    until `on_line` has returned.
    """

    def answer(line: str, pids: list[int]) -> bytes:
        assert on_line is not None
        on_line(line, pids)
        return b"\n" if (parse_log_line(line) or {}).get("kind") == "training" else b""

    script = script if on_line is None else STEP_BY_STEP
    follow = None if on_line is None else answer
    ended = run_script(ROOT / script, flags, environment(), processes, follow)
    own = [code for code in ended.exit_codes if code != -signal.SIGTERM]
    failures = [code for code in (*own, *ended.exit_codes) if code]
    return Run(failures[0] if failures else 0, ended.stdout, ended.stderr, set(own))


def pretrain_typed(
    flags: list[str],
    *,
    processes: int = 0,
    launcher: str = "run",
    on_line: Callable[[str, subprocess.Popen[str]], None] | None = None,
    script: str = "pretrain_gpt.py",
) -> TypedRun:
    """Runs the command. processes: 0 for plain python; otherwise torch.distributed.run or .launch starts this
    many.

    on_line: called with each line of stdout. After a training line the run waits until `on_line` has
    returned.
    """
    command = [sys.executable, "-u"]
    if processes:
        # The launcher itself finds a free port, and keeps it.
        command += ["-m", f"torch.distributed.{launcher}", "--standalone"]
        command += ["--nproc_per_node", str(processes)]
    script = script if on_line is None else STEP_BY_STEP
    return _run([*command, script, *flags], on_line)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns tag -> (step, value) of all points in the TensorBoard files of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def environment() -> dict[str, str]:
    """Returns the environment of a CPU process that no launcher has started."""
    launcher_variables = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in launcher_variables}
    return env | ENVIRONMENT


def _run(command: list[str], on_line: Callable[[str, subprocess.Popen[str]], None] | None) -> TypedRun:
    lines = []
    with tempfile.TemporaryFile("w+") as errors:
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, **streams)
        assert process.stdin is not None and process.stdout is not None
        deadline = threading.Timer(HANG_TIMEOUT_S, process.terminate)
        deadline.start()
        for line in process.stdout:
            lines.append(line)
            if on_line is not None:
                on_line(line, process)
                if (parse_log_line(line.rstrip("\n")) or {}).get("kind") == "training":
                    _go_on(process)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        deadline.cancel()
        errors.seek(0)
        stderr = errors.read()
    # The launcher's report contains the exit codes of the ranks.
    codes = {int(code) for code in re.findall(r"exitcode\s*:\s*(-?\d+)", stderr)} - {-signal.SIGTERM}
    cpu_s, peak_bytes = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
    return TypedRun(process.returncode, "".join(lines), stderr, codes, cpu_s, peak_bytes)


def _go_on(process: subprocess.Popen[str]) -> None:
    """Answers `step_by_step`, unless the run has been killed."""
    try:
        os.write(process.stdin.fileno(), b"\n")
    except BrokenPipeError:
        pass
