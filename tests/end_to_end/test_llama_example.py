"""Runs examples/llama.sh as a user types it, with a smaller model."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.command import ROOT
from tests.support import HANG_TIMEOUT_S

SMALL = {
    "TRAIN_ITERS": "4",
    "MAX_FILES": "20",
    "VOCAB_SIZE": "512",
    "NUM_LAYERS": "2",
    "HIDDEN_SIZE": "32",
    "FFN_HIDDEN_SIZE": "48",
    "NUM_HEADS": "4",
    "NUM_QUERY_GROUPS": "1",
    "SEQ_LENGTH": "32",
    "NEW_TOKENS": "8",
}


@pytest.mark.full
def test_the_example_trains_exports_and_samples_with_transformers(tmp_path: Path) -> None:
    run = subprocess.run(
        ["bash", str(ROOT / "examples" / "llama.sh")],
        env={**os.environ, **SMALL, "RUN_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_TIMEOUT_S,
    )
    assert run.returncode == 0, run.stderr
    assert "LlamaForCausalLM in fp32, iteration 4" in run.stdout
    # Parameters of embedding and head; per layer of query, key, value, output, gate, up, down and two norms;
    # of the final norm.
    layer = 32 * (32 + 2 * 8) + 32 * 32 + 3 * 32 * 48 + 2 * 32
    assert f"LlamaForCausalLM, {2 * 512 * 32 + 2 * layer + 32:,} parameters" in run.stdout
    assert "def read(self, size=-1):" in run.stdout.split("parameters\n")[1]
