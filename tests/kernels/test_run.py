"""A whole run with every kernel, on a CPU in triton's interpreter, is the run without them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.end_to_end.command import ROOT, environment, pretrain

# Few operations: the interpreter needs seconds for each step.
FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 2 --lr 1e-2 --train-iters 2 --eval-iters 0 --log-interval 1 --log-level info "
    "--position-embedding-type alibi --reset-attention-mask --eod-mask-loss"
).split()


@pytest.mark.full  # half a minute
@pytest.mark.parametrize("context", [1, 2])
def test_a_run_with_kernels_prints_the_losses_of_the_run_without(
    context: int, data: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with context parallelism, where each rank has two chunks of queries, and sharded gradients."""
    without = pretrain([*FLAGS, *data])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("MEGATRON_KERNELS", "interpreter")
    sharded = ["--context-parallel-size", "2", "--zero-stage", "2"] if context == 2 else []
    run = pretrain([*FLAGS, *data, *sharded], processes=context)
    assert run.exit_code == without.exit_code == 0, run.stderr
    assert "attention: flash, dropout 0.1, ALiBi, document boundaries by the triton kernel" in run.stderr
    assert "kernels: triton" in run.stderr and "kernels: triton" not in without.stderr
    assert len(run.steps) == len(without.steps) == 2
    for step, expected in zip(run.steps, without.steps, strict=True):
        assert step["lm_loss"] == pytest.approx(expected["lm_loss"], rel=3e-7)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], abs=0.0011)


@pytest.mark.full
def test_the_benchmark_compares_every_kernel_with_its_reference() -> None:
    run = subprocess.run(
        [sys.executable, "benchmarks/kernel_speed.py", "--small"],
        cwd=ROOT,
        env={**environment(), "TRITON_INTERPRET": "1", "MEGATRON_KERNELS": "interpreter"},
        check=True,
        capture_output=True,
        text=True,
    )
    _, table = run.stdout.split("library\n")
    table, attention = re.split(r"attention without dropout .*fastest\n", table)
    differences, implementations = (
        {name: float(value) for name, value in (row.rsplit(maxsplit=1) for row in rows.splitlines())}
        for rows in (table, attention)
    )
    assert len(implementations) == 5 and max(implementations.values()) < 1e-6
    kinds = {re.split(r"[ ,']", name)[0] for name in differences}
    assert kinds == {"dropout", "attention", "weight", "cross", "embedding", "norms", "split", "gated"}
    assert max(differences.values()) < 1e-6 and any(differences.values())
