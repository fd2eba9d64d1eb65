"""benchmarks/gpu.sh: its commands exist, and with a small part it writes its table."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import throughput
from megatron.config.cli import parse_args
from megatron.training.log_lines import IntervalSummary, format_training_line
from tests.end_to_end.command import ROOT


def gpu_script(**settings: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": sys.executable, "DS_ACCELERATOR": "cpu", **settings}
    return subprocess.run(["benchmarks/gpu.sh"], cwd=ROOT, env=env, capture_output=True, text=True)


def test_every_part_is_a_command_that_parses(tmp_path: Path) -> None:
    for name in (
        "tokenizer/vocab.json",
        "tokenizer/merges.txt",
        "tokens_text_document.bin",
        "tokens_text_document.idx",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    done = gpu_script(DRY_RUN="1", OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    parts = dict(re.findall(r"^(\S+): timeout \d+ (.*)$", done.stdout, re.MULTILINE))
    limits = sum(map(int, re.findall(r": timeout (\d+)", done.stdout)))
    assert limits <= 3900
    runs = [shlex.split(command) for command in parts.values() if "pretrain_gpt.py" in command]
    assert len(runs) == 5
    for words in runs:
        flags = words[words.index("pretrain_gpt.py") + 1 :]
        assert parse_args(flags, {}).model.num_layers == 8
    for command in parts.values():
        for script in re.findall(r"benchmarks/\w+\.py", command):
            assert (ROOT / script).is_file()


def test_a_part_that_fails_is_in_the_table(tmp_path: Path) -> None:
    """There is no GPU here, which kernel_speed says."""
    done = gpu_script(PARTS="kernels", OUT=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    table = (tmp_path / "table.md").read_text()
    assert re.search(r"^\| kernels \| \d+ \| 2 \|$", table, re.MULTILINE)
    assert "no GPU was found" in table


def test_an_unknown_part_is_refused_before_the_first_one(tmp_path: Path) -> None:
    done = gpu_script(PARTS="kernels 7B", OUT=str(tmp_path))
    assert done.returncode == 2 and "PARTS has 7B, expected some of: data " in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("card, too_large", [("h100-80gb", {"6.7B"}), ("h200-141gb", set())])
def test_the_presets_fit_an_h100_and_the_largest_an_h200(
    card: str, too_large: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    throughput.print_fits(card)
    lines = capsys.readouterr().out.splitlines()
    verdicts = dict(line.split(" ", 1) for line in lines if " fit" in line)
    assert len(verdicts) == 6
    assert {name for name, verdict in verdicts.items() if not verdict.startswith("fits")} == too_large


def test_the_figures_of_the_parts_are_in_one_table(tmp_path: Path) -> None:
    facts = {field.name: 1 for field in fields(IntervalSummary) if field.name != "recorded"}
    facts |= {"loss_scale": None, "seq_length": None}
    runs = {"nccl": range(1, 11), "resumed": range(11, 21), "cpu": range(1, 21), "bf16": range(1, 21)}
    for name, steps in runs.items():
        scale = 1.01 if name == "bf16" else 1.0
        lines = [
            format_training_line(
                IntervalSummary(**facts | {"iteration": step, "lm_loss": scale * (9 - 0.1 * step)})
            )
            for step in steps
        ]
        (tmp_path / f"{name}.log").write_text("\n".join(lines))
    (tmp_path / "kernels.log").write_text("the machine\nkernel   difference\ndropout  1.0e-03\n")
    for name in ("1.3B", "13B-slice"):
        (tmp_path / f"{name}.log").write_text(f"the machine\n   tokens/s  TFLOP/s\n{name}  1234  500\n")
    (tmp_path / "loss.log").write_text("Traceback\n")
    command = [sys.executable, "benchmarks/gpu_table.py", str(tmp_path)]
    table = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert table.count("tokens/s") == 1 and "13B-slice  1234  500" in table and "dropout  1.0e-03" in table
    differences = dict(re.findall(r"^(\S+) .* difference (\S+)$", table, re.MULTILINE))
    assert differences == {"nccl": "0.0e+00", "resumed": "0.0e+00", "cpu": "0.0e+00", "bf16": "1.0e-02"}
