"""tools/sweep.py run measures two values on two processes, and continues a sweep with repeats that
was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.commands import sweep
from tests.end_to_end.command import ROOT
from tests.end_to_end.flags import ABSOLUTE, MODEL, NO_DROPOUT

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def words(folder: Path, data: list[str], repeats: int, lr: str = "1e-3") -> list[str]:
    """Returns the command line after tools/sweep.py."""
    base = [*MODEL, *ABSOLUTE, *NO_DROPOUT, *data, "--pipeline-model-parallel-size", "2"]
    base += ["--global-batch-size", "4", "--train-iters", "100", "--lr", lr]
    axis = ["--vary", "--micro-batch-size", "1", "2"]
    return ["run", str(folder), "--steps", "2", "--repeat", str(repeats), *axis, "--", *base]


def check_report(folder: Path, repeats: int) -> None:
    """Asserts that all runs are measured and have equal losses."""
    report = json.loads((folder / "report.json").read_text())
    assert [row["status"] for row in report["rows"]] == ["ok", "ok"]
    for row in report["rows"]:
        measured, predicted = row["measured"], row["predicted"]
        assert row["processes"] == 2 and measured["repeats"] == repeats and measured["step_s"] > 0
        assert 0 < measured["bubble"] < 1 and 0 < predicted["bubble"] < 1
        # A process uses more memory than its tensors. Both sizes are known for both stages.
        assert all(
            of_process > planned > 0
            for of_process, planned in zip(measured["memory_bytes"], predicted["memory_bytes"], strict=True)
        )
    (losses,) = report["losses"]
    assert losses["agrees"] and losses["runs"] == 2 * repeats and losses["rows"] == [0, 1]
    result = json.loads((folder / "runs" / f"001-{repeats}.json").read_text())
    assert [step["iteration"] for step in result["steps"]] == [1, 2]
    assert result["commit"] and result["host"]


@pytest.mark.full
def test_a_sweep_runs_and_reports(
    data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    sweep.main(words(folder, data, repeats=1))
    printed = capsys.readouterr().out
    order = [line.partition(":")[0] for line in printed.splitlines() if line.startswith("run ")]
    assert order == ["run 1 of 2", "run 2 of 2"]
    assert "agree: largest relative difference" in printed
    check_report(folder, repeats=1)
    sweep.main(words(folder, data, repeats=1))
    assert "2 of 2 runs are done" in capsys.readouterr().out
    with pytest.raises(SystemExit) as refused:
        sweep.main(words(folder, data, repeats=1, lr="2e-3"))
    assert refused.value.code == 2 and "a different base command" in capsys.readouterr().err


@pytest.mark.full
def test_a_killed_sweep_continues(
    data: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    command = [sys.executable, "-u", str(ROOT / "tools" / "sweep.py"), *words(folder, data, repeats=2)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("run 2 of 4"):
                first.send_signal(signal.SIGKILL)
    done = folder / "runs" / "000-1.json"
    before = done.read_text()
    assert not (folder / "runs" / "001-1.json").exists()
    sweep.main(words(folder, data, repeats=2))
    printed = capsys.readouterr().out
    assert "1 of 4 runs are done" in printed and "run 3 of 3" in printed
    assert done.read_text() == before
    check_report(folder, repeats=2)
