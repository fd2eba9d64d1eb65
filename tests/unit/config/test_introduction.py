"""Runs `pretrain_gpt.py` without flags, prints its --help, and completes its flags in a shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.arguments import INTRODUCTION, parse_args, require_flags
from megatron.config import ConfigError

PROGRAM = Path(__file__).parents[3] / "pretrain_gpt.py"


def test_a_command_without_flags_prints_the_introduction_before_torch_is_imported() -> None:
    program = (
        "import sys, runpy\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print('torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv = [{str(PROGRAM)!r}]\n{program}"],
        capture_output=True,
        text=True,
        cwd=PROGRAM.parent,
    )
    assert (run.returncode, run.stdout, run.stderr) == (2, "False\n", f"error: {INTRODUCTION}\n")


@pytest.mark.parametrize("argv", [[], ["--local-rank=3"], ["--local_rank=0"]])
def test_the_launchers_flag_is_not_a_flag_of_the_user(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="^no flags are given"):
        require_flags(argv)
    require_flags([*argv, "--dry-run"])


def test_the_command_of_the_introduction_is_complete() -> None:
    command = (
        INTRODUCTION.partition("  python pretrain_gpt.py ")[2]
        .partition("\nAll flags")[0]
        .replace("\\\n", " ")
    )
    config = parse_args(shlex.split(command), {})
    assert config.training.dry_run and config.parallel.data_parallel_size == 8


def complete(line: str, tmp_path: Path) -> list[str]:
    """Returns argcomplete's completions for Tab at the end of the line."""
    pytest.importorskip("argcomplete")
    answer = tmp_path / "completions"
    env = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    run = subprocess.run(
        [sys.executable, str(PROGRAM)], env=env, capture_output=True, text=True, cwd=tmp_path
    )
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
    return [word.rstrip() for word in answer.read_text().split("\n")]


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("--num-att", ["--num-attention-heads"]),
        ("--bf16 --pipeline-schedule ", ["1f1b", "interleaved", "dualpipev", "zero-bubble"]),
        ("--optimizer ad", ["adam", "adamw"]),
        ("--num-layers ", [""]),
        ("--save runs", ["runs/"]),
    ],
)
def test_tab_completes_flags_choices_and_paths(words: str, completions: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert complete(f"pretrain_gpt.py {words}", tmp_path) == completions


def test_the_shell_finds_the_marker_of_argcomplete() -> None:
    assert b"PYTHON_ARGCOMPLETE_OK" in PROGRAM.read_bytes()[:1024]
