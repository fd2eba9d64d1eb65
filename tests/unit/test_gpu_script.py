"""benchmarks/gpu.sh: its commands exist, its phases do not lose each other, and it runs on a CPU."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from benchmarks import device_throughput, gpu_table
from benchmarks.device_throughput import MODELS, ROWS, TINY_ROWS, Row, busy_and_gaps
from benchmarks.machine import add_row, describe_machine, read_rows
from megatron.cluster.launch import temporary_environment
from megatron.config import read_command_line
from megatron.pipeline.stages import plan_stages
from megatron.planner.memory import fit_summary, plan_memory
from megatron.training.log_lines import IntervalSummary, format_training_line
from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S, device_curves

GPU_ROWS = [row for rows in ROWS.values() for row in rows]
ALL_ROWS = [*GPU_ROWS, *(row for rows in TINY_ROWS.values() for row in rows)]
PHASES = "versions smoke kernels curves gpt llama ranks resume sanitizer tiles rest times loss host".split()


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
    """A program in the place of Python. $1 is the benchmark; the table is made by the real Python."""
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
    if device == "cuda":  # versions and smoke should need 55 s, each other phase 10 s less than its limit
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
    """Each phase that ran is in the table with its verdict, also if a process was killed. Nothing that it
    started outlives it."""
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
    """124 is the exit code of `timeout`, and of curves that ended at their limit."""
    stub = stub_python(tmp_path, 'case "$*" in *environment*|*" smoke"*) exit 124 ;; esac')
    done = gpu_script("--phases", "versions smoke loss", "--out", tmp_path / "out", PYTHON=stub)
    assert done.returncode == 1
    assert list(verdicts(tmp_path / "out")) == ["versions", "smoke", "smoke-pytorch", "loss"]


@pytest.mark.full  # 16 s of waiting
def test_the_end_of_the_budget_is_no_failure(tmp_path: Path) -> None:
    """The running phase is ended, and later ones do not start."""
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
    stub = stub_python(tmp_path, 'case "$*" in *"curves smoke --out"*) exit 1 ;; esac')
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
    """pip gets the wheels that this Python lacks: not torch's."""
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
    """The ranks that share a device have the losses of one process, through host memory."""
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


# --- Loss curves ---


def test_the_tokens_of_the_gpu_scripts_curves_are_those_of_the_golden_file(tmp_path: Path) -> None:
    golden = json.loads(device_curves.GOLDEN_FILE.read_text())
    assert device_curves.write_tokens(tmp_path) == golden["tokens"]
    for size, (_, iterations) in device_curves.SIZES.items():
        assert {len(golden[size][model]) for model in device_curves.MODELS} == {iterations}


def test_the_flags_of_the_gpu_scripts_curves_are_accepted() -> None:
    for phase in device_curves.PHASES.values():
        for case in phase.values():
            words = (
                device_curves.SIZES["full"][0],
                device_curves.MODELS[case.model],
                device_curves.BATCH,
                case.flags,
            )
            flags = [*" ".join(words).split(), "--train-iters", "2", "--dry-run", "--vocab-size", "100"]
            ranks = {"WORLD_SIZE": str(case.ranks)}
            assert read_command_line(flags, ranks).config.parallel.world_size == case.ranks


@pytest.mark.full
def test_the_golden_curves_of_the_gpu_script_are_those_of_this_commit(tmp_path: Path) -> None:
    with temporary_environment({"DS_ACCELERATOR": "cpu"}):
        cases = {"gpt-fp32": device_curves.Case("gpt"), "llama-fp32": device_curves.Case("llama")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(device_curves.PHASES, "curves", cases)
            assert device_curves.run_phase("curves", "full", tmp_path, tmp_path, seconds=HANG_TIMEOUT_S) == 0
    assert [row["steps"] for row in read_rows(tmp_path, "losses")] == [20, 20]


def write_log(folder: Path, name: str, losses: dict[int, float]) -> None:
    facts = {field.name: 1 for field in fields(IntervalSummary) if field.name != "recorded"}
    facts |= {"loss_scale": None, "seq_length": None}
    lines = [
        format_training_line(IntervalSummary(**facts | {"iteration": step, "lm_loss": loss}))
        for step, loss in losses.items()
    ]
    (folder / "curves").mkdir(exist_ok=True)
    device_curves.log_of(folder, name).write_text("\n".join([*lines, "RuntimeError: CUDA error"]))


@pytest.mark.parametrize(
    ("case", "losses", "verdict"),
    [
        ({}, {1: 8.0, 2: 7.0, 3: 6.0, 4: 5.0}, "ok"),
        ({}, {1: 8.0, 2: 7.002, 3: 6.0, 4: 5.0}, "BAD from step 2"),
        ({"bound": 1e-3}, {1: 8.0, 2: 7.002, 3: 6.0, 4: 5.0}, "ok"),
        ({}, {1: 8.0, 2: 7.0, 3: float("nan"), 4: 5.0}, "BAD from step 3"),
        ({}, {1: 8.0, 2: 7.0, 3: 6.0}, "only 3 of 4 steps: RuntimeError: CUDA error"),
        ({}, {}, "only 0 of 4 steps: RuntimeError: CUDA error"),
        ({"saves": True}, {1: 8.0, 2: 7.0}, "ok"),
        ({"loads": True, "equal_to": "other"}, {3: 6.5, 4: 5.5}, "ok"),
        ({"loads": True, "equal_to": "other"}, {3: 6.5, 4: 5.500001}, "BAD from step 4"),
        (
            {"equal_to": "absent"},
            {1: 8.0, 2: 7.0, 3: 6.0, 4: 5.0},
            "only 0 of 4 steps: RuntimeError: CUDA error",
        ),
    ],
)
def test_verdicts_of_the_gpu_scripts_curves(
    case: dict[str, object], losses: dict[int, float], verdict: str, tmp_path: Path
) -> None:
    write_log(tmp_path, "run", losses)
    write_log(tmp_path, "other", {1: 8.5, 2: 7.5, 3: 6.5, 4: 5.5})
    golden = [[8.0, 1.0], [7.0, 1.0], [6.0, 1.0], [5.0, 1.0]]
    row = device_curves.compare("run", device_curves.Case("gpt", **case), golden, tmp_path, iterations=4)
    assert row["verdict"] == verdict


def test_curves_end_at_the_limit_of_the_gpu_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks are killed, and a rank that fails ends the others."""
    sleep, fail = [[sys.executable, "-c", code] for code in ("import time; time.sleep(300)", "exit(1)")]
    started = []

    def start(name: str, *_: object) -> device_curves.Running:
        commands = [fail, sleep] if name == "fails" else [sleep]
        started.append(
            device_curves.Running(name, cases[name], [subprocess.Popen(words) for words in commands])
        )
        return started[-1]

    cases = {
        name: device_curves.Case("gpt", after=after)
        for name, after in {"fails": "", "hangs": "fails"}.items()
    }
    monkeypatch.setattr(device_curves, "start", start)
    deadline = time.monotonic() + 2
    device_curves.run_cases(cases, "tiny", tmp_path, tmp_path, deadline, at_once=1)
    assert [one.name for one in started] == ["fails", "hangs"]
    codes = [[process.poll() for process in one.processes] for one in started]
    assert codes == [[1, -signal.SIGKILL], [-signal.SIGKILL]]


def test_curves_that_are_terminated_end_their_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Running(device_curves.Running):
        @property
        def has_ended(self) -> bool:
            os.kill(os.getpid(), signal.SIGTERM)
            return False

    process = subprocess.Popen(["sleep", "300"])
    monkeypatch.setattr(device_curves, "start", lambda name, case, *_: Running(name, case, [process]))
    monkeypatch.setattr(sys, "argv", ["device_curves", "smoke", "--out", str(tmp_path)])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            device_curves.main()
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert end.value.code == 143 and process.poll() == -signal.SIGKILL


# --- Speed ---


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("model", sorted(name for name in MODELS if "tiny" not in name))
def test_every_model_of_the_gpu_script_fits_an_h100(model: str) -> None:
    (row, *_) = (row for row in GPU_ROWS if row.key["model"] == model and row.implementation == "ours")
    config, vocab = row.config("--gpu h100-80gb"), MODELS[model].vocab
    fits, sentence = fit_summary(config, vocab, plan_memory(config, vocab, plan_stages(config, vocab)))
    assert fits, sentence


def test_the_measured_configurations_of_the_gpu_script_are_accepted() -> None:
    for row in ALL_ROWS:
        config, model = row.config(), row.model
        assert (config.model.num_layers, config.model.ffn_hidden_size) == (model.layers, model.mlp_width)
        assert config.micro_batches_per_step == device_throughput.MICRO_BATCHES
    assert len({tuple(row.key.values()) for row in GPU_ROWS}) == len(GPU_ROWS)


def test_flops_of_the_gpu_script_by_palms_formula() -> None:
    """GPT-3 XL's 24 layers of 2,048: 6 N + 12 L h s, N without the table of positions."""
    model = MODELS["gpt-1.3b"]
    plan = plan_stages(Row("gpt-1.3b", "ours", 8).config(), model.vocab)
    weights = 24 * (12 * 2048**2 + 13 * 2048) + 50304 * 2048 + 2 * 2048
    assert plan.total_parameters == weights + 2048 * 2048
    attention = 12 * 24 * 2048 * 2048
    assert model.palm_flops(plan.total_parameters, causal=False) == 6 * weights + attention
    assert model.palm_flops(plan.total_parameters, causal=True) == 6 * weights + attention / 2
    untied = MODELS["llama-8b-8-layers"]
    assert untied.palm_flops(10**9, causal=True) == 6 * (10**9 - 128256 * 4096) + 6 * 8 * 4096 * 4096


def test_gaps_between_kernels_of_the_gpu_script() -> None:
    busy, gaps = busy_and_gaps([(0, 10), (30, 40), (5, 12), (31, 33), (40, 45)])
    assert (busy, gaps) == (12 + 15, [18])


def test_rows_of_the_gpu_script_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose process died is not repeated, a row without time is. An error in a row does not stop
    the next one, unless the device is lost."""
    rows = TINY_ROWS["gpt"]
    measured = []

    def measure(row: Row, _folder: Path) -> dict[str, float]:
        measured.append(row.implementation)
        if row.implementation == "plain":
            broken()
        return {"tokens_per_s": 1.0}

    monkeypatch.setattr(device_throughput, "measure", measure)
    monkeypatch.setattr("tests.support.measured_worlds.connect", lambda config: None)
    add_row(tmp_path, "throughput", **rows[0].key, error="the process ended during this row")
    arguments = device_throughput.argparse.Namespace(out=tmp_path, seconds=10.0)
    assert device_throughput.run_rows(rows, arguments) == 0 and not measured
    assert [row["error"] for row in read_rows(tmp_path, "throughput")[1:]] == ["no time was left"] * 2
    arguments.seconds = 1000.0
    assert device_throughput.run_rows(rows, arguments) == 1
    assert measured == ["plain-compile", "plain"]
    last = {row["implementation"]: row for row in read_rows(tmp_path, "throughput")}
    assert last["ours"]["error"].startswith("the process ended")
    assert last["plain"]["error"] == "RuntimeError: broken" and last["plain-compile"]["tokens_per_s"] == 1.0
    arguments.out = tmp_path / "lost"
    monkeypatch.setattr(get_accelerator(), "synchronize", broken)
    assert device_throughput.run_rows(rows[::-1], arguments) == 3
    assert [row["error"] for row in read_rows(arguments.out, "throughput")][1:] == ["RuntimeError: broken"]


def broken() -> None:
    raise RuntimeError("broken")


def test_a_profile_without_kernels_of_a_gpu_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> float:
        return float(torch.ones(2).sum())

    assert device_throughput.profile(step, tmp_path / "profile")["kernels"] > 0
    assert (tmp_path / "trace.json.gz").stat().st_size > 0
    monkeypatch.setattr(get_accelerator(), "device_name", lambda: "cuda")
    with pytest.raises(RuntimeError, match="the profile has no kernels"):
        device_throughput.profile(step, tmp_path / "profile")


def test_the_table_of_the_gpu_script_judges_targets() -> None:
    speed = {"tflops": 400.0, "mfu_palm": 0.5, "mfu_causal": 0.4, "micro_batch": 8}
    ours = {
        **speed,
        "model": "a",
        "implementation": "ours",
        "tokens_per_s": 46000.0,
        "mfu": 0.45,
        "peak_gib": 40.0,
    }
    ours |= {"min_tokens_per_s": 45500, "min_mfu": 0.5}
    plain = {
        **ours,
        "implementation": "plain-compile",
        "tokens_per_s": 50000.0,
        "min_tokens_per_s": 0,
        "min_mfu": 0,
    }
    plans = [
        {
            "model": "a",
            "implementation": "ours",
            "micro_batch": 8,
            "tokens_per_s": 5e4,
            "mfu": 0.4,
            "peak_gib": 41.0,
        }
    ]
    crashed = {"model": "b", "implementation": "ours", "micro_batch": 8, "error": "the process ended"}
    first, second, third = gpu_table.throughput([{**ours, "error": "first try"}, ours, plain, crashed], plans)
    assert first["verdict"] == (
        "tokens/s >= 45,500; MISSED: Megatron-LM's MFU >= 50%; MISSED: not slower than the compiled loop; "
        "memory within 3% of the plan"
    )
    assert (first["/ compiled"], first["planned GiB"], first["Megatron-LM's MFU, %"]) == (0.92, 41.0, 45.0)
    assert second["verdict"] == "" and second["/ compiled"] is None
    assert third["verdict"] == "no result: the process ended"
    assert gpu_table.throughput([ours], [plans[0] | {"peak_gib": 42.0}])[0]["verdict"].endswith(
        "MISSED: memory within 3% of the plan"
    )
    assert gpu_table.throughput([{**ours, "mfu": None}], plans)[0]["verdict"] is None
    other = gpu_table.throughput([{**ours, "micro_batch": 4, "profile_error": "no kernels"}, plain], plans)[0]
    assert other["/ compiled"] is None and "MISSED: profile (no kernels)" in other["verdict"]
    markdown = gpu_table.markdown([{"run": "x", "verdict": "ok", "difference": 1.23456e-5}, {"run": "a|b"}])
    assert markdown.splitlines()[2:] == ["| x | 1.235e-05 | ok |", "| a/b | - | - |"]
