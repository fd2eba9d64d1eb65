"""The flags of a planned run: from a command line or an sbatch script, and with other settings."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.config import ConfigError
from megatron.config.cli import make_parser
from megatron.config.config import SECTIONS
from megatron.config.fields import option_name

PROGRAM = "pretrain_gpt.py"
_SCRIPT_TIMEOUT_S = 60
# Set by Slurm or read by the example scripts: a plan does not depend on the shell that it is made in.
_JOB_VARIABLES = ("SLURM", "MASTER_", "NNODES", "GPUS_PER_NODE", "RUN_DIR")


def script_flags(script: str) -> list[str]:
    """The flags of PROGRAM in the last command that `DRY_RUN=1 bash SCRIPT` prints, with --world-size and
    --node-size of its launcher. ConfigError if it prints none."""
    path = Path(script).resolve()
    if not path.is_file():
        raise ConfigError(f"--script {script}: the file does not exist")
    env = {name: value for name, value in os.environ.items() if not name.startswith(_JOB_VARIABLES)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = subprocess.run(
                ["bash", str(path)],
                cwd=folder,
                env={**env, "DRY_RUN": "1"},
                capture_output=True,
                text=True,
                timeout=_SCRIPT_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"--script {script} has not ended after {_SCRIPT_TIMEOUT_S} s: expected a script that prints "
                "its command with DRY_RUN=1, as those of examples/slurm"
            ) from None
    lines = re.sub(r" \\\n +", " ", run.stdout).splitlines()
    found = [line for line in lines if PROGRAM in line and not line.lstrip().startswith("#")]
    if run.returncode or not found:
        said = (run.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(
            f"--script {script} prints no command with {PROGRAM} when run with DRY_RUN=1 (exit code "
            f"{run.returncode}, it said: {said}): expected a script as those of examples/slurm"
        )
    words = shlex.split(found[-1])
    place = next(index for index, word in enumerate(words) if word.endswith(PROGRAM))
    return [*_launched(words[:place]), *words[place + 1 :]]


def _launched(words: Sequence[str]) -> list[str]:
    """--world-size and --node-size of a torch launcher's words."""
    numbers = {}
    for option in ("--nnodes", "--nproc_per_node", "--nproc-per-node"):
        if option in words:
            numbers[option.replace("-", "_")] = words[words.index(option) + 1]
    nodes, per_node = numbers.get("__nnodes", "1"), numbers.get("__nproc_per_node", "1")
    if not (nodes.isdigit() and per_node.isdigit()):
        return []
    return ["--world-size", str(int(nodes) * int(per_node)), "--node-size", per_node]


def run_flags(flags: Sequence[str], script: str | None, gpus: int | None) -> list[str]:
    """The flags of a dry run: the script's, then the given ones, which override them."""
    words = script_flags(script) if script is not None else []
    changed = _given(flags)
    words = [*_without(words, changed), *flags]
    if gpus is not None:
        words = [*_without(words, {"parallel.world_size"}), "--world-size", str(gpus)]
    return words if "training.dry_run" in _given(words) else ["--dry-run", *words]


def with_defaults(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags with those that a search needs and that its result does not depend on, or hardly; and a note
    on each."""
    given, words, notes = _given(words), list(words), []
    defaults = {
        "schedule.lr": ("--lr", "1e-4"),
        "batch.micro_batch_size": ("--micro-batch-size", "1"),
    }
    if not {"training.train_iters", "training.train_samples"} & given:
        defaults["training.train_iters"] = ("--train-iters", "1000")
    for name, flag in defaults.items():
        if name not in given:
            words += flag
    if "model.max_position_embeddings" not in given and "--seq-length" in words:
        words += ["--max-position-embeddings", words[words.index("--seq-length") + 1]]
    if not {"precision.bf16", "precision.fp16"} & given:
        v100 = "--gpu" in words and words[words.index("--gpu") + 1].startswith("v100")
        words.append("--fp16" if v100 else "--bf16")
        notes.append(f"no precision is given: planned with {words[-1]}")
    return words, notes


def replaced(words: Sequence[str], change: Mapping[str, Any]) -> list[str]:
    """The flags with other values. change: 'section.field' -> value."""
    flags: list[str] = []
    for name, value in change.items():
        option = option_name(name.partition(".")[2])
        if value is True:
            flags.append(option)
        elif value is not None and value is not False:
            flags += [option, str(value)]
    return [*_without(words, set(change)), *flags]


def _options() -> dict[str, str]:
    """Option string -> 'section.field'."""
    parser = make_parser()
    names = {f"{section}.{field.name}" for section, kind in SECTIONS.items() for field in fields(kind)}
    return {
        option: action.dest
        for action in parser._actions  # argparse has no public list
        for option in action.option_strings
        if action.dest in names
    }


def _given(words: Sequence[str]) -> set[str]:
    """'section.field' of the flags."""
    options = _options()
    return {options[word.partition("=")[0]] for word in words if word.partition("=")[0] in options}


def _without(words: Sequence[str], names: set[str]) -> list[str]:
    """The words without these flags and their values."""
    options, kept, skips = _options(), [], False
    for word in words:
        if word.startswith("--"):
            skips = options.get(word.partition("=")[0], "") in names
        if not skips:
            kept.append(word)
    return kept
