"""Applies the examples of CONTRIBUTING.md to a copy of the package and trains with them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from math import sqrt
from pathlib import Path

import pytest

from megatron.training.log_lines import parse_log_line
from tests.end_to_end.command import ROOT, environment
from tests.end_to_end.flags import ABSOLUTE, MODEL, NO_DROPOUT
from tests.support import HANG_TIMEOUT_S

# "In `path`, `NAME` ...:" and the following block.
EXAMPLE = re.compile(
    r"[Ii]n `(megatron/[^`]+)`(?:, `(\w+)`)?[^`\n]*?(?:\([^)\n]*\))?:\n\n```(\w+)\n(.*?)```", re.DOTALL
)
USED = (
    "--activation squared_relu --normalization ScaleNorm --lr-decay-style sqrt --partition-method matrices"
).split()
SGD = ("--optimizer", "sgd", "--sgd-nesterov")


def apply(folder: Path, path: str, name: str, language: str, block: str) -> None:
    """Applies a block to a file. A diff replaces its removed lines with its added lines. A block with a name
    is inserted into that registry or class, a block without a name at the end of the file."""
    file = folder / path
    text = file.read_text() if file.exists() else ""
    if language == "diff":
        lines = block.splitlines()
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in ("-", "+"))
        assert text.count(old) == 1
        text = text.replace(old, new)
    elif name:
        # The block becomes a registry's first entry, or the first field of a class.
        head = rf"{name} = Registry\([^{{]*{{" if block[0] == '"' else rf'class {name}\(.*?"""\n\n'
        text, count = re.subn(head, lambda found: found[0] + block, text, count=1, flags=re.DOTALL)
        assert count == 1
    else:
        text += "\n\n" * bool(text) + block
    file.write_text(text)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the package with all examples."""
    folder = tmp_path_factory.mktemp("package")
    for name in ("megatron", "tests", "tools", "docs", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    for example in EXAMPLE.findall((ROOT / "CONTRIBUTING.md").read_text()):
        apply(folder, *example)
    return folder


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the copy of the package. Fails the test if the process fails."""
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment(), "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=HANG_TIMEOUT_S,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished


def test_every_example_changes_at_most_three_files(copy: Path) -> None:
    sections = (ROOT / "CONTRIBUTING.md").read_text().split("\n### ")[1:]
    counts = [len(EXAMPLE.findall(section.split("\n## ")[0])) for section in sections]
    assert counts == [2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 2, 2, 3]


def run_copy(copy: Path, data: list[str], *others: str, sgd: bool = True) -> str:
    """Returns what a training of 4 iterations prints. sgd: whether it uses the optimizer of `SGD`."""
    schedule = "--lr 0.1 --min-lr 0.02 --micro-batch-size 2 --global-batch-size 2 --train-iters 4".split()
    logging = "--eval-iters 0 --log-interval 1".split()
    flags = [
        *MODEL,
        *ABSOLUTE,
        *NO_DROPOUT,
        *schedule,
        *data,
        *USED,
        *(SGD if sgd else ()),
        *logging,
        *others,
    ]
    return run_in(copy, "pretrain_gpt.py", *flags).stdout


# Runs in the copy, whose registries contain what the checkpoint was trained with.
WRITE_SINGLE_FILE = """
import sys
from pathlib import Path
from safetensors.torch import save_file
from megatron.checkpoint.discovery import open_checkpoint
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.files import add_checksum
from megatron.files import write_json

source, target = map(Path, sys.argv[1:])
checkpoint = open_checkpoint(source)
reader = open_reader(checkpoint)
target.mkdir()
states = [(kind, name) for name in reader.names for kind in reader.state_names(name)]
tensors = {f"{kind}/{name}": reader.read_unpadded(name, kind).clone() for kind, name in states}
save_file(tensors, target / "states.safetensors")
run = {key: value for key, value in checkpoint.run.items() if key != "sha256"}
write_json(target / "run.json", add_checksum({**run, "files": {}}))
"""


# Tests that read registries, fields of the configuration, the model's file and the documentation.
AFFECTED = (
    "tests/unit/config",
    "tests/unit/data/test_statistics.py",
    "tests/unit/model/test_one_file.py",
    "tests/unit/optimizer/test_parameter_groups.py",
    "tests/unit/pipeline/test_methods.py",
    "tests/unit/test_docs.py",
    "tests/unit/test_documented_names.py",
    "tests/unit/test_imports.py",
    "tests/unit/tokenizer/test_tokenizers.py",
)


@pytest.mark.full
def test_the_tests_pass_with_the_examples(copy: Path) -> None:
    page = run_in(copy, "-m", "megatron.config.flags_page").stdout
    (copy / "docs/flags.md").write_text(page)
    finished = run_in(copy, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--tb=short", *AFFECTED)
    assert re.search(r"\d{3,} passed", finished.stdout)


@pytest.mark.full
def test_a_run_trains_with_what_the_examples_add(copy: Path, data: list[str]) -> None:
    output = run_copy(copy, data, "--save", str(copy / "checkpoints"))
    lines = [line for line in map(parse_log_line, output.splitlines()) if line and line["kind"] == "training"]
    rates = [line["learning_rate"] for line in lines]
    assert rates == pytest.approx([0.02 + (1 - sqrt(step / 4)) * 0.08 for step in (1, 2, 3, 4)], rel=1e-3)
    assert all(line["hidden_norm"] > 0 for line in lines)
    assert "has no effect" not in output
    assert "squared_relu" in output
    folders = [str(copy / name) for name in ("checkpoints/global_step4", "single")]
    run_in(copy, "-c", WRITE_SINGLE_FILE, *folders)
    output = run_copy(copy, data, "--load", str(copy / "single"))
    assert f"starting from {copy / 'single'}, iteration 4" in output
    assert re.search(r"weights, fp32 +\d+ parameters, equal to the last bit", output)
    assert re.search(r"moments, momentum_buffer +\d+ parameters, equal to the last bit", output)


@pytest.mark.full
def test_a_run_reads_what_a_tokenizer_of_the_examples_made(copy: Path, corpus: Path) -> None:
    tokenizer = "--tokenizer-type ByteTokenizer".split()
    output, text = copy / "bytes", str(corpus / "text.jsonl")
    run_in(copy, "tools/preprocess_data.py", "--input", text, "--output-prefix", str(output), *tokenizer)
    data = ["--data-path", f"{output}_text_document", *tokenizer]
    assert "vocabulary 257" in run_copy(copy, data)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "moment", "model"),
    [
        ("radam", "exp_avg_sq", "--position-embedding-type sinusoidal"),
        (
            "polar",
            "momentum_buffer",
            "--position-embedding-type rotary --window-size 8 --window-pattern W F --rope-with-window-only",
        ),
    ],
)
def test_a_run_trains_and_resumes_with_an_optimizer_and_positions_that_the_examples_add(
    name: str, moment: str, model: str, copy: Path, data: list[str]
) -> None:
    flags = ["--optimizer", name, *model.split(), *"--zero-stage 1 --lr-decay-iters 6 --save".split()]
    flags.append(str(copy / name))
    run_copy(copy, data, *flags, sgd=False)
    output = run_copy(copy, data, *flags, "--load", str(copy / name), "--train-iters", "6", sgd=False)
    assert re.search(rf"moments, {moment} +\d+ parameters, equal to the last bit", output)
    lines = [line for line in map(parse_log_line, output.splitlines()) if line and line["kind"] == "training"]
    assert [line["iteration"] for line in lines] == [5, 6]
