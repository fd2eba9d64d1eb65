"""The commands in benchmarks/gpu.sh exist, a failing phase does not lose other phases, and the script runs on
a CPU."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks.device_throughput import TINY_ROWS
from benchmarks.machine import describe_machine, read_rows
from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S

PHASES = (
    "versions smoke kernels curves gpt llama ranks resume sanitizer tiles rest times experts loss host"
).split()


def gpu_script(*flags: object, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["benchmarks/gpu.sh", *map(str, flags)],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, **settings},
        capture_output=True,
        text=True,
        timeout=3 * HANG_TIMEOUT_S,
    )


def stub_python(folder: Path, body: str) -> str:
    """Returns a program that replaces Python. $1 is the benchmark. The real Python makes the table."""
    stub = folder / "python-stub"
    stub.write_text(f'#!/bin/bash\ncase "$*" in *gpu_table*) exec {sys.executable} "$@" ;; esac\n{body}\n')
    stub.chmod(0o755)
    return str(stub)


def log_of(folder: Path, phase: str) -> str:
    with tarfile.open(folder / "logs.tar.gz") as archive:
        file = archive.extractfile(f"./{phase}/{phase}.log")
        assert file is not None
        return file.read().decode()


def is_sleeping(pid_file: Path) -> bool:
    process = Path("/proc", pid_file.read_text().strip(), "cmdline")
    return process.exists() and b"sleep" in process.read_bytes()


def verdicts(folder: Path) -> dict[str, str]:
    return {row["phase"]: row["verdict"] for row in read_rows(folder, "phases")}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_phase_is_a_command_that_parses(device: str) -> None:
    done = gpu_script("--dry-run", "--device", device, COMPUTE_SANITIZER="compute-sanitizer")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(\S+): timeout (\d+) (.*)$", done.stdout, re.MULTILINE)
    commands = [(name, command) for name, _, command in found]
    limits = {name: int(limit) for name, limit, _ in found}
    if device == "cuda":  # expected: 55 s for versions and smoke, the limit less 10 s for others
        phases = ("kernels", "curves", "gpt", "llama", "ranks", "resume")
        assert 55 + sum(limits[name] - 10 for name in phases) < 480
    names = [name.partition("-")[0] for name, _ in commands]
    helpers = {"plan", "prewarm"} if device == "cuda" else {"plan"}
    assert list(dict.fromkeys(name for name in names if name not in helpers)) == PHASES
    assert helpers < set(names)
    parsers: dict[str, str] = {}
    for _, command in commands:
        words = shlex.split(command)
        start = words.index(sys.executable) + 1
        program, flags = words[start], words[start + 1 :]
        if program == "-m":
            program, flags = f"{flags[0].replace('.', '/')}.py", flags[1:]
        source = parsers.setdefault(program, (ROOT / program).read_text())
        assert all(f'"{flag}"' in source for flag in flags if flag.startswith("--"))
        assert not flags or flags[0].startswith("--") or f'"{flags[0]}"' in source


def test_phases_that_fail_lose_no_other_phase(tmp_path: Path) -> None:
    """Each phase that ran is in the table with its verdict, even if a process was killed. No process that a
    phase started outlives it."""
    stub = stub_python(
        tmp_path,
        f'case "$*" in *memory*) sleep 300 & echo $! >{tmp_path}/pid; echo broken; exit 7 ;; '
        "*host_time*) kill -SEGV $$ ;; esac",
    )
    out = tmp_path / "out"
    done = gpu_script("--phases", "versions loss host", "--out", out, PYTHON=stub)
    assert done.returncode == 1
    assert verdicts(out) == {
        "versions": "ok",
        "loss": "FAILED: exit code 7, see loss.log",
        "host": "FAILED: exit code 139, see host.log",
    }
    assert not is_sleeping(tmp_path / "pid")
    assert sorted(file.name for file in out.iterdir()) == ["logs.tar.gz", "rows.jsonl", "table.md"]
    assert log_of(out, "loss") == "broken\n"
    assert re.search(
        r"\| loss \| \d+ \| FAILED: exit code 7, see loss.log \|", (out / "table.md").read_text()
    )


def test_a_later_run_replaces_only_the_results_of_its_phases(tmp_path: Path) -> None:
    out = tmp_path / "out"
    body = 'case "$*" in *memory*) echo broken; exit 7 ;; *host_time*) echo first ;; esac'
    gpu_script("--phases", "loss host", "--out", out, PYTHON=stub_python(tmp_path, body))
    done = gpu_script("--phases", "loss", "--out", out, PYTHON=stub_python(tmp_path, ""))
    assert done.returncode == 0
    assert verdicts(out) == {"loss": "ok", "host": "ok"} and len(read_rows(out, "phases")) == 2
    assert (log_of(out, "loss"), log_of(out, "host")) == ("", "first\n")


def test_a_trace_is_a_result_unless_it_is_large(tmp_path: Path) -> None:
    for size, kept in ((1 << 20, True), (16 << 20, False)):
        stub = stub_python(
            tmp_path, f'case "$*" in *" gpt "*) head -c {size} /dev/zero >"$4/trace.json.gz" ;; esac'
        )
        out = tmp_path / str(size)
        gpu_script("--phases", "gpt", "--out", out, PYTHON=stub)
        assert (out / "trace.json.gz").exists() == kept
        assert (out / "logs.tar.gz").stat().st_size < 10_000


def test_a_plan_that_fails_is_a_failure(tmp_path: Path) -> None:
    stub = stub_python(tmp_path, 'case "$*" in *" plan "*) exit 1 ;; esac')
    done = gpu_script("--phases", "gpt", "--out", tmp_path / "out", PYTHON=stub)
    assert done.returncode == 1
    assert verdicts(tmp_path / "out") == {"gpt": "ok", "plan": "FAILED: see plan.log"}


def test_a_slow_start_does_not_stop_the_script(tmp_path: Path) -> None:
    """A start that reaches its limit ends with 124, the exit code of `timeout`. This code must not end the
    script."""
    stub = stub_python(tmp_path, 'case "$*" in *environment*|*" smoke"*) exit 124 ;; esac')
    done = gpu_script("--phases", "versions smoke loss", "--out", tmp_path / "out", PYTHON=stub)
    assert done.returncode == 1
    assert list(verdicts(tmp_path / "out")) == ["versions", "smoke", "smoke-pytorch", "loss"]


@pytest.mark.full  # 16 s of waiting
def test_the_end_of_the_budget_is_no_failure(tmp_path: Path) -> None:
    """The running phase is ended, and later phases do not start."""
    stub = stub_python(tmp_path, 'case "$*" in *memory*) sleep 300 ;; esac')
    done = gpu_script("--budget", 16, "--phases", "loss host", "--out", tmp_path / "out", PYTHON=stub)
    assert done.returncode == 0
    loss = "not complete when the budget ended, see loss.log"
    assert verdicts(tmp_path / "out") == {"loss": loss, "host": "no time was left"}


@pytest.mark.parametrize("broken", ["gpu_environment", "smoke"])
def test_it_stops_if_the_program_does_not_start(broken: str, tmp_path: Path) -> None:
    stub = stub_python(tmp_path, f'case "$*" in *{broken}*) echo "no {broken}"; exit 1 ;; esac')
    out = tmp_path / "out"
    done = gpu_script("--out", out, PYTHON=stub)
    assert done.returncode == 1
    failed = "versions" if broken == "gpu_environment" else "smoke-pytorch"
    assert f"no {broken}\nstopped: {failed} failed" in done.stdout
    assert set(verdicts(out)) == (
        {"versions"} if broken == "gpu_environment" else {"versions", "smoke", failed}
    )


def test_it_continues_with_pytorchs_operations(tmp_path: Path) -> None:
    stub = stub_python(tmp_path, 'case "$*" in *"curves.py smoke --out"*) exit 1 ;; esac')
    done = gpu_script("--phases", "smoke loss", "--out", tmp_path / "out", PYTHON=stub)
    assert done.returncode == 1
    assert list(verdicts(tmp_path / "out")) == ["smoke", "smoke-pytorch", "loss"]


def test_measurements_continue_after_a_crash_of_their_process(tmp_path: Path) -> None:
    stub = stub_python(
        tmp_path,
        f'case "$*" in *" gpt "*) [ -e {tmp_path}/once ] || {{ touch {tmp_path}/once; exit 3; }} ;; esac',
    )
    gpu_script("--phases", "gpt", "--out", tmp_path / "out", PYTHON=stub)
    assert verdicts(tmp_path / "out") == {"gpt": "FAILED: exit code 3, see gpt.log", "gpt-again": "ok"}


def test_a_script_that_is_killed_ends_what_it_started_and_leaves_its_table(tmp_path: Path) -> None:
    stub = stub_python(
        tmp_path, f'case "$*" in *host_time*) sleep 300 & echo $! >{tmp_path}/pid; wait ;; esac'
    )
    command = ["benchmarks/gpu.sh", "--phases", "loss host", "--out", str(tmp_path / "out")]
    script = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHON": stub}, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + HANG_TIMEOUT_S
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert script.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    script.send_signal(signal.SIGTERM)
    assert script.wait(HANG_TIMEOUT_S) == 143
    while is_sleeping(tmp_path / "pid"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert re.search(r"\| loss \| \d+ \| ok \|", (tmp_path / "out" / "table.md").read_text())


def test_wheels_of_absent_packages_are_installed(tmp_path: Path) -> None:
    """pip gets the wheels that this Python lacks, but not torch's wheels."""
    (tmp_path / "wheels").mkdir()
    for name in ("torch-9.0-py3-none-any.whl", "absent_package-1.0-py3-none-any.whl"):
        (tmp_path / "wheels" / name).touch()
    stub = stub_python(
        tmp_path,
        f'case "$*" in *"pip install"*) echo "$@" >{tmp_path}/installed ;; '
        f'"- "*) exec {sys.executable} "$@" ;; esac',
    )
    done = gpu_script(
        "--wheelhouse", tmp_path / "wheels", "--phases", "loss", "--out", tmp_path / "out", PYTHON=stub
    )
    assert done.returncode == 0, done.stdout
    wheels = [word for word in (tmp_path / "installed").read_text().split() if word.endswith(".whl")]
    assert wheels == [str(tmp_path / "wheels" / "absent_package-1.0-py3-none-any.whl")]
    stub = stub_python(tmp_path, 'case "$*" in "- "*) exit 1 ;; esac')
    done = gpu_script("--wheelhouse", tmp_path / "wheels", "--out", tmp_path / "out", PYTHON=stub)
    assert done.returncode == 1 and "stopped: install failed" in done.stdout


def test_a_machine_without_git_has_the_commit_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("COMMIT", "abc")
    assert describe_machine().endswith(", commit abc")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--phases", "smoke 7B"], "--phases has 7B, expected some of: versions "),
        (["--device", "tpu"], "--device tpu: expected cuda or cpu"),
        (["--budget", "8m"], "--budget 8m: expected seconds"),
        (["--out"], "--out has no value"),
        (["--wheelhouse", "nowhere"], "--wheelhouse nowhere: there is no such folder"),
        (["--fast"], "--fast is unknown"),
    ],
)
def test_wrong_flags_of_the_gpu_script(flags: list[str], message: str) -> None:
    done = gpu_script(*flags)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {message}")
    assert done.stdout == ""


def test_the_gpu_scripts_smoke_test_runs_on_a_cpu(tmp_path: Path) -> None:
    done = gpu_script("--device", "cpu", "--phases", "smoke", "--out", tmp_path)
    assert done.returncode == 0, done.stdout
    assert verdicts(tmp_path) == {"smoke": "ok"}
    (smoke,) = read_rows(tmp_path, "losses")
    assert smoke["steps"] == 6 and 0 < smoke["difference"] < 1e-3
    assert "### Losses" in done.stdout


@pytest.mark.full  # three minutes
def test_the_gpu_script_runs_on_a_cpu(tmp_path: Path) -> None:
    """The ranks that share a device communicate through host memory, and have the losses of one process."""
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text('#!/bin/bash\n[ "$1 $3" = "--tool --error-exitcode" ] || exit 2\nexec "${@:5}"\n')
    sanitizer.chmod(0o755)
    out = tmp_path / "out"
    done = gpu_script("--device", "cpu", "--budget", 3000, "--out", out, COMPUTE_SANITIZER=str(sanitizer))
    assert done.returncode == 0, done.stdout
    found = verdicts(out)
    assert {name.partition("-")[0] for name in found} == set(PHASES) and set(found.values()) == {"ok"}
    environment = {row["name"]: row["value"] for row in read_rows(out, "environment")}
    assert environment["accelerator"] == "cpu, gloo" and environment["machine"] in done.stdout
    losses = {row["run"]: row for row in read_rows(out, "losses")}
    assert losses["resumed"]["steps"] == 3 and losses["resumed"]["difference"] == 0
    assert losses["tp2-pp2"]["difference"] < 1e-6 and losses["zero3-cp2"]["difference"] < 1e-6
    speeds = [row for row in read_rows(out, "throughput") if "error" not in row]
    assert [row["model"] for row in speeds] == [row.name for rows in TINY_ROWS.values() for row in rows]
    assert 0 < speeds[0]["busy"] <= 1 and speeds[0]["last_loss"] < speeds[0]["first_loss"]
    assert len(read_rows(out, "plans")) == sum(row.is_ours for rows in TINY_ROWS.values() for row in rows)
    for title in ("Throughput", "Kernels", "Kernel times", "Attention times", "Tiles"):
        assert f"### {title}\n" in done.stdout
