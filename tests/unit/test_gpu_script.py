"""benchmarks/gpu.sh: its commands exist, and with a small part it writes its table."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from megatron.config.cli import parse_args
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
    assert limits <= 3600
    runs = [shlex.split(command) for command in parts.values() if "pretrain_gpt.py" in command]
    assert len(runs) == 4
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
