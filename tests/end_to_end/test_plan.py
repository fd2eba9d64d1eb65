"""Runs tools/plan.py as users type it: for a script, as a search, and with mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S

MODEL = (
    "--gpu a100-80gb --num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 "
    "--global-batch-size 32 --vocab-size 50257 --hidden-dropout 0 --attention-dropout 0"
)


def plan(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "plan.py"), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG_TIMEOUT_S,
    )


def test_a_script_as_text_data_and_plot(tmp_path: Path) -> None:
    """The model is small: test_readme.py plans a model with 176 B parameters."""
    script = ROOT / "examples" / "slurm" / "smoke.slurm"
    words = ["--script", str(script), "--gpu", "a100-80gb", "--bf16"]
    run = plan(*words, "--json", "plan.json", "--plot", "plan.png", "--html", "plan.html", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "2 processes = TP 1 x PP 2 x DP 1" in run.stdout
    assert "s predicted: " in run.stdout and "what if" in run.stdout
    data = json.loads((tmp_path / "plan.json").read_text())
    assert len(data["stages"]) == 2 and data["parameters"] == 116_480
    assert data["step"]["total"] > 0 and data["fits"] is True
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "--html plan.html" in (tmp_path / "plan.html").read_text()


@pytest.mark.full
def test_a_search_prints_layouts_and_flags(tmp_path: Path) -> None:
    run = plan("--search", "--gpus", "4", "--json", "found.json", *MODEL.split(), folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "planned in full" in run.stdout and "flags      pretrain_gpt.py --dry-run" in run.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    rates = [one["step"]["tokens_per_second"] for one in found["candidates"]]
    assert rates == sorted(rates, reverse=True) and found["candidates"][0]["what_if"]


@pytest.mark.full
def test_a_search_finds_context_parallelism_for_128_k_tokens_of_llama_3_8b(tmp_path: Path) -> None:
    flags = (
        "--gpu h100-80gb --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --normalization RMSNorm --glu-activation swiglu "
        "--disable-bias-linear --position-embedding-type rotary --seq-length 131072 --global-batch-size 16 "
        "--vocab-size 128256 --untie-embeddings-and-output-weights"
    )
    run = plan("--search", "--gpus", "16", "--json", "found.json", *flags.split(), folder=tmp_path)
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "found.json").read_text())["candidates"]
    assert found[0]["fits"] and found[0]["layout"]["context_parallel"] > 1
