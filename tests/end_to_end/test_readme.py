"""Every command in README.md's bash blocks, in order, in a copy of the repository.

They run as they stand, with these differences: `make train` becomes the script that it runs, made small by
the variables at its top; `make test` is only looked up in the Makefile; the cluster has one node. The `sh`
block, which installs for GPUs, is not run.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.command import ROOT
from tests.end_to_end.flags import ABSOLUTE, MODEL, SHORT

QUICKSTART = "examples/quickstart.sh"
SMALL_QUICKSTART = {
    "TRAIN_ITERS": "6",
    "MAX_FILES": "20",
    "VOCAB_SIZE": "512",
    "NUM_LAYERS": "2",
    "HIDDEN_SIZE": "32",
    "NUM_HEADS": "2",
    "SEQ_LENGTH": "32",
    "EVAL_ITERS": "1",
    "LOG_INTERVAL": "1",
    "NEW_TOKENS": "10",
}
PARTS = ("examples", "megatron", "pretrain_gpt.py", "tools")
TIMEOUT_S = 300


def readme_commands() -> list[str]:
    """The commands of all bash blocks; one that goes on after a backslash is one."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    joined = "".join(blocks).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip()]


def first_words(command: str) -> str:
    """What a command is known by: its program and what that runs."""
    return " ".join(re.findall(r"make \w+|[\w/]+\.py|distributed\.launch|--dry-run|--nnodes", command))


EXPECTED = [
    "make train",
    "tools/generate.py",
    "make test",
    "tools/train_tokenizer.py",
    "tools/preprocess_data.py",
    "distributed.launch pretrain_gpt.py",
    "pretrain_gpt.py --dry-run",
    "distributed.launch --nnodes pretrain_gpt.py",
    "tools/inspect_checkpoint.py",
]


def test_the_readme_has_the_commands_that_are_run_here() -> None:
    assert [first_words(command) for command in readme_commands()] == EXPECTED


@pytest.mark.parametrize(("target", "recipe"), [("train", QUICKSTART), ("test", "-m pytest")])
def test_the_makefile_does_what_the_readme_says(target: str, recipe: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make on this machine")
    shown = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert recipe in shown.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A folder that looks like a clone after `make setup`, with a user's my_text.jsonl in it."""
    folder = tmp_path_factory.mktemp("clone")
    for part in PARTS:
        (folder / part).symlink_to(ROOT / part)
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        # A link would be taken for an interpreter without this environment's packages.
        script = folder / ".venv" / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        script.chmod(0o755)
    (folder / "my_text.jsonl").write_bytes((corpus / "text.jsonl").read_bytes())
    return folder


def run(command: str, copy: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the copy; the test fails with its output if the command does."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = f"{copy / '.venv' / 'bin'}{os.pathsep}{inherited['PATH']}"
    fixed = {"PATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    finished = subprocess.run(
        ["bash", "-c", command],
        cwd=copy,
        env={**inherited, **fixed, **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
    return finished


def command_with(words: str) -> str:
    """The README's command that is known by `words`."""
    (command,) = (command for command in readme_commands() if first_words(command) == words)
    return command


@pytest.fixture(scope="module")
def quickstart(copy: Path) -> str:
    """What the small quickstart printed; its files are in runs/quickstart of the copy."""
    return run(QUICKSTART, copy, **SMALL_QUICKSTART).stdout


def test_the_quickstart_trains_resumes_samples_and_plots(quickstart: str, copy: Path) -> None:
    made = copy / "runs" / "quickstart"
    assert "exiting program at iteration 3 (--exit-interval 3)" in quickstart
    assert "starting from runs/quickstart/checkpoints/global_step3, iteration 3" in quickstart
    assert (made / "checkpoints" / "latest").read_text() == "global_step6"
    assert (made / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((made / "tensorboard").iterdir())
    assert re.search(r"Done in \d+ s\. validation loss at .* \| lm loss value: \d\.\d+E\+00", quickstart)
    assert "def read(self, size=-1):" in quickstart.partition("6/6")[2]


@pytest.mark.full
def test_a_second_quickstart_makes_nothing_twice_and_goes_on(quickstart: str, copy: Path) -> None:
    files = [copy / "runs" / "quickstart" / name for name in ("text.jsonl", "tokens_text_document.bin")]
    before = [file.stat().st_mtime_ns for file in files]
    again = run(QUICKSTART, copy, **{**SMALL_QUICKSTART, "TRAIN_ITERS": "8"}).stdout
    assert "starting from runs/quickstart/checkpoints/global_step6, iteration 6" in again
    assert "4/6" not in again
    assert [file.stat().st_mtime_ns for file in files] == before


def test_a_text_is_continued(quickstart: str, copy: Path) -> None:
    assert run(command_with("tools/generate.py"), copy).stdout.startswith("class Queue:")


def test_the_quickstarts_checkpoint_is_inspected(quickstart: str, copy: Path) -> None:
    told = run(command_with("tools/inspect_checkpoint.py"), copy).stdout
    newest = (copy / "runs" / "quickstart" / "checkpoints" / "latest").read_text()
    assert newest in told and "tied_modules.embed.word_embeddings.weight" in told


def test_four_processes_train(quickstart: str, copy: Path) -> None:
    # The launcher finds a port that is free and keeps it.
    command = command_with("distributed.launch pretrain_gpt.py").replace(
        "--nproc_per_node 4", "--nproc_per_node 4 --standalone"
    )
    printed = run(command, copy).stdout
    assert "4 processes = tensor 2 x pipeline 2 x data 1" in printed
    assert "iteration        5/       5" in printed


def test_a_176b_run_is_planned(copy: Path) -> None:
    printed = run(command_with("pretrain_gpt.py --dry-run"), copy).stdout
    assert "parameters 176,247,271,424" in printed
    assert "384 processes = tensor 4 x pipeline 12 x data 8" in printed


@pytest.mark.full
def test_a_cluster_of_one_node_trains(corpus: Path, data: list[str], copy: Path) -> None:
    flags = [*MODEL, *ABSOLUTE, *SHORT, *data, "--pipeline-model-parallel-size", "2"]
    printed = run(
        command_with("distributed.launch --nnodes pretrain_gpt.py"),
        copy,
        NNODES="1",
        NODE_RANK="0",
        GPUS_PER_NODE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        FLAGS=" ".join(flags),
    ).stdout
    assert "iteration        5/       5" in printed


def test_own_text_becomes_token_files(copy: Path) -> None:
    run(command_with("tools/train_tokenizer.py"), copy)
    run(command_with("tools/preprocess_data.py"), copy)
    assert (copy / "my_text_text_document.bin").stat().st_size > 0
    assert (copy / "my_text_text_document.idx").is_file()


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 150
    assert max(len(line) for line in lines) <= 100


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, f"docs/README.md lacks {page.name}"


def test_files_that_the_documents_link_to_are_there() -> None:
    slurm = ROOT / "examples" / "slurm" / "README.md"
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", slurm, *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
