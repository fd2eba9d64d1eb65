"""The examples of CONTRIBUTING.md, applied to a copy of the package and trained with."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from math import sqrt
from pathlib import Path

import pytest

from megatron.training.logging.log_lines import parse_log_line
from tests.end_to_end.command import ROOT, TIMEOUT_S
from tests.end_to_end.flags import ABSOLUTE, MODEL, NO_DROPOUT

# "In `path`, `NAME` ...:" and the block that follows.
EXAMPLE = re.compile(
    r"[Ii]n `(megatron/[^`]+)`(?:, `(\w+)`)?[^`\n]*?(?:\([^)\n]*\))?:\n\n```(\w+)\n(.*?)```", re.DOTALL
)
USED = (
    "--activation squared_relu --normalization RMSNorm --lr-decay-style sqrt --partition-method activations "
    "--optimizer sgd --sgd-nesterov"
).split()


def apply(folder: Path, path: str, name: str, language: str, block: str) -> None:
    """A diff replaces its line; a block with a name goes into that registry or class, others to the end."""
    file = folder / path
    text = file.read_text() if file.exists() else ""
    if language == "diff":
        lines = block.splitlines()
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in ("-", "+"))
        assert text.count(old) == 1
        text = text.replace(old, new)
    elif name:
        # A registry's first entry, or the first field of a class.
        head = rf"{name} = Registry\([^{{]*{{" if block[0] == '"' else rf"class {name}\(.*?\n\n"
        text, count = re.subn(head, lambda found: found[0] + block, text, count=1, flags=re.DOTALL)
        assert count == 1
    else:
        text += "\n\n" * bool(text) + block
    file.write_text(text)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "megatron", folder / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pretrain_gpt.py", folder)
    for example in EXAMPLE.findall((ROOT / "CONTRIBUTING.md").read_text()):
        apply(folder, *example)
    return folder


def test_every_example_changes_at_most_three_files() -> None:
    sections = (ROOT / "CONTRIBUTING.md").read_text().split("\n### ")[1:]
    counts = [len(EXAMPLE.findall(section.split("\n## ")[0])) for section in sections]
    assert counts == [2, 2, 2, 2, 3]


def test_a_run_trains_with_what_the_examples_add(copy: Path, data: list[str]) -> None:
    schedule = "--lr 0.1 --min-lr 0.02 --micro-batch-size 2 --global-batch-size 2 --train-iters 4".split()
    flags = [
        *MODEL,
        *ABSOLUTE,
        *NO_DROPOUT,
        *schedule,
        *data,
        *USED,
        "--eval-iters",
        "0",
        "--log-interval",
        "1",
    ]
    run = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *flags, "--save", str(copy / "checkpoints")],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stderr
    lines = [
        line for line in map(parse_log_line, run.stdout.splitlines()) if line and line["kind"] == "training"
    ]
    rates = [line["learning_rate"] for line in lines]
    assert rates == pytest.approx([0.02 + (1 - sqrt(step / 4)) * 0.08 for step in (1, 2, 3, 4)], rel=1e-3)
    assert "has no effect" not in run.stdout
    assert "squared_relu" in run.stdout
