"""benchmarks/gpu.sh starts loss curves, measurements of speed, and the table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from benchmarks import device_curves, device_throughput, gpu_table
from benchmarks.device_throughput import MODELS, ROWS, TINY_ROWS, Row
from benchmarks.machine import add_row, read_rows
from megatron.arguments import read_command_line
from megatron.cluster import devices
from megatron.cluster.launch import temporary_environment
from megatron.pipeline.stages import plan_stages
from megatron.planner.fit import with_verdict
from megatron.planner.plan import make_plan
from megatron.training.log_lines import IntervalSummary, format_training_line
from tests.support import HANG_TIMEOUT_S

GPU_ROWS = [row for rows in ROWS.values() for row in rows]
ALL_ROWS = [*GPU_ROWS, *(row for rows in TINY_ROWS.values() for row in rows)]


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
    """All ranks are killed at the limit. A rank that fails ends the other ranks."""
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
    plan = with_verdict(make_plan(row.config("--gpu h100-80gb"), MODELS[model].vocab))
    assert plan.fits, plan.verdict


def test_the_measured_configurations_of_the_gpu_script_are_accepted() -> None:
    for row in ALL_ROWS:
        config, model = row.config(), row.model
        assert (config.model.num_layers, config.model.ffn_hidden_size) == (model.layers, model.mlp_width)
        assert config.micro_batches_per_step == device_throughput.MICRO_BATCHES
    assert len({tuple(row.key.values()) for row in GPU_ROWS}) == len(GPU_ROWS)


def test_flops_of_the_gpu_script_by_palms_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-3 XL has 24 layers of width 2,048. FLOPs per token are 6 N + 12 L h s, where N excludes the table
    of positions."""
    row = Row("gpt-1.3b", "ours", 8)
    plan = plan_stages(row.config(), row.model.vocab)
    weights = 24 * (12 * 2048**2 + 13 * 2048) + 50304 * 2048 + 2 * 2048
    assert plan.total_parameters == weights + 2048 * 2048
    attention = 12 * 24 * 2048 * 2048
    monkeypatch.setattr(device_throughput, "gpu_of_process", lambda: devices.H100_80GB)
    found = device_throughput.figures(row, seconds=2.0)
    tokens_per_s = row.samples * 2048 / 2.0
    assert found["tokens_per_s"] == tokens_per_s
    for name, per_token in (
        ("mfu_palm", 6 * weights + attention),
        ("mfu_causal", 6 * weights + attention / 2),
    ):
        assert found[name] == pytest.approx(tokens_per_s * per_token / 989.4e12)


def test_rows_of_the_gpu_script_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose process died is not repeated. A row for which no time was left is repeated. An error in a
    row does not stop the next row, unless the device is lost."""
    rows = TINY_ROWS["gpt"]
    measured = []

    def measure(row: Row, _folder: Path) -> dict[str, float]:
        measured.append(row.implementation)
        if row.implementation == "plain":
            broken()
        return {"tokens_per_s": 1.0}

    monkeypatch.setattr(device_throughput, "measure", measure)
    monkeypatch.setattr(device_throughput, "connect", lambda config: None)
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
