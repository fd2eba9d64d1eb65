"""tools/sweep.py run, as typed: two values, two repeats, two processes; killed half-way and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.command import ROOT, TIMEOUT_S
from tests.end_to_end.flags import ABSOLUTE, MODEL, NO_DROPOUT


def command(folder: Path, data: list[str], lr: str = "1e-3") -> list[str]:
    base = [*MODEL, *ABSOLUTE, *NO_DROPOUT, *data, "--pipeline-model-parallel-size", "2"]
    base += ["--global-batch-size", "4", "--train-iters", "100", "--lr", lr]
    words = ["run", str(folder), "--steps", "2", "--repeat", "2", "--vary", "--micro-batch-size", "1", "2"]
    return [sys.executable, "-u", str(ROOT / "tools" / "sweep.py"), *words, "--", *base]


def test_a_killed_sweep_continues_and_reports(data: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    keywords = {"env": env, "text": True, "cwd": tmp_path}
    with subprocess.Popen(command(folder, data), stdout=subprocess.PIPE, **keywords) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("run 2 of 4"):
                first.send_signal(signal.SIGKILL)
    done = folder / "runs" / "000-1.json"
    before = done.read_text()
    assert not (folder / "runs" / "001-1.json").exists()

    refused = subprocess.run(
        command(folder, data, "2e-3"), capture_output=True, **keywords, timeout=TIMEOUT_S
    )
    assert refused.returncode == 2 and "another base command" in refused.stderr
    second = subprocess.run(command(folder, data), capture_output=True, **keywords, timeout=TIMEOUT_S)
    assert second.returncode == 0, second.stderr
    assert "1 of 4 runs are done" in second.stdout and "run 3 of 3" in second.stdout
    assert done.read_text() == before
    assert len(list((folder / "runs").glob("*.json"))) == 4

    report = json.loads((folder / "report.json").read_text())
    assert [row["status"] for row in report["rows"]] == ["ok", "ok"]
    for row in report["rows"]:
        assert row["processes"] == 2 and row["measured"]["repeats"] == 2
        assert row["measured"]["step_s"] > 0
        # A process has more than its tensors; both are known for both stages.
        for measured, predicted in zip(
            row["measured"]["memory_bytes"], row["predicted"]["memory_bytes"], strict=True
        ):
            assert measured > predicted > 0
    (losses,) = report["losses"]
    assert losses["agrees"] and losses["runs"] == 4 and losses["rows"] == [0, 1]
    assert "agree: largest relative difference" in second.stdout
    result = json.loads((folder / "runs" / "001-2.json").read_text())
    assert [step["iteration"] for step in result["steps"]] == [1, 2]
    assert result["commit"] and result["host"]
