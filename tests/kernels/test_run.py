"""A whole run with every kernel, on a CPU in Triton's interpreter, equals the run without kernels."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from benchmarks.kernel_speed import Target, largest_error, try_row
from benchmarks.machine import read_rows
from tests.end_to_end.command import ROOT, environment, pretrain

# The model has few operations, since the interpreter needs seconds for each step.
FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 2 --lr 1e-2 --train-iters 2 --eval-iters 0 --log-interval 1 --log-level info "
    "--position-embedding-type alibi --reset-attention-mask --eod-mask-loss"
).split()


# Name -> (processes, flags).
LAYOUTS = {
    "one process": (1, ""),
    "CP 2": (2, "--context-parallel-size 2 --zero-stage 2"),
    "TP 2": (2, "--tensor-model-parallel-size 2"),
    "TP 2, sequence parallel": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
}


@pytest.mark.full  # half a minute
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_with_kernels_prints_the_losses_of_the_run_without(
    layout: str, data: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With context parallelism each rank has two chunks of queries, and sharded gradients. With tensor
    parallelism the norms, activations and dropouts compute a rank's part of the sequence and of the
    columns."""
    without = pretrain([*FLAGS, *data])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("MEGATRON_KERNELS", "interpreter")
    processes, flags = LAYOUTS[layout]
    run = pretrain([*FLAGS, *data, *flags.split()], processes=processes)
    assert run.exit_code == without.exit_code == 0, run.stderr
    assert "attention: flash, dropout 0.1, ALiBi, document boundaries by the triton kernel" in run.stderr
    assert "kernels: triton" in run.stderr and "kernels: triton" not in without.stderr
    assert len(run.steps) == len(without.steps) == 2
    for step, expected in zip(run.steps, without.steps, strict=True):
        assert step["lm_loss"] == pytest.approx(expected["lm_loss"], rel=3e-7)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], abs=0.0011)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize(
    ("mode", "table"), [("check", "kernels"), ("time", "attention times"), ("tiles", "tiles")]
)
def test_the_benchmark_compares_every_kernel_with_its_reference(
    mode: str, table: str, tmp_path: Path
) -> None:
    subprocess.run(
        [sys.executable, "benchmarks/kernel_speed.py", mode, "--small", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**environment(), "TRITON_INTERPRET": "1", "MEGATRON_KERNELS": "interpreter"},
        check=True,
    )
    rows = read_rows(tmp_path, table)
    if mode == "check":
        kinds = {re.split(r"[ ,']", row["kernel"])[0] for row in rows}
        assert kinds == {
            "dropout",
            "add",
            "activation",
            "attention",
            "weight",
            "cross",
            "embedding",
            "norms",
            "split",
            "gated",
            "grouped",
            "optimizer",
        }
        assert {row["verdict"] for row in rows} == {"ok"}
        of_fp32 = [row["error"] for row in rows if row["dtype"] == "float32"]
        assert 2 * len(of_fp32) == len(rows) and max(of_fp32) < 1e-6
        # The tables of rotary positions are fp32, but the reference computes with them in fp64.
        assert all(row["error"] > 0 for row in rows if row["kernel"].startswith(("split", "attention")))
    else:
        assert len(rows) == {"time": 5, "tiles": 6}[mode]
        assert max(row["difference"] for row in rows) < 1e-6


def test_a_kernel_with_wrong_results_is_found() -> None:
    """The largest error of an output counts, and an output of NaN is wrong."""
    exact = [torch.tensor([3.0, 4.0]), torch.zeros(2)]
    assert largest_error([torch.tensor([3.0, 4.5]), torch.zeros(2)], exact) == pytest.approx(0.1)
    assert largest_error([torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.2])], exact) == pytest.approx(0.2)
    assert math.isnan(largest_error([torch.tensor([torch.nan, 4.0]), torch.ones(2)], exact))


def test_the_benchmark_continues_after_a_lost_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a lost device Triton raises a plain RuntimeError, and later operations fail, too. The next
    process measures the row."""
    target, calls = Target(tmp_path, torch.device("cpu"), small=True), []

    def fail() -> dict[str, object]:
        calls.append(None)
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    assert not try_row(target, "kernels", {"kernel": "a"}, fail)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(get_accelerator(), "synchronize", fail)
        try_row(target, "kernels", {"kernel": "b"}, fail)
    assert end.value.code == 3
    calls.clear()
    assert not try_row(target, "kernels", {"kernel": "b"}, fail) and not calls
    assert try_row(target, "kernels", {"kernel": "c"}, lambda: {"verdict": "ok"})
    assert [row["verdict"][:6] for row in read_rows(tmp_path, "kernels")] == ["FAILED", "FAILED", "ok"]
