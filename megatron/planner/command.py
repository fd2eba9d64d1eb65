"""The flags of a planned run: from a command line or an sbatch script, and with other settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from megatron.config.cli import make_parser
from megatron.config.config import SECTIONS
from megatron.config.fields import setting_option
from megatron.planner.script_command import read_script, script_environment


def script_flags(script: str) -> list[str]:
    """The flags of a script's training command, with --world-size and --node-size of its launcher."""
    command = read_script("--script", script, [], script_environment())
    if command.processes is None:
        return command.flags
    world, node = str(command.processes), str(command.processes_per_node)
    return ["--world-size", world, "--node-size", node, *command.flags]


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
        notes.append("no length of the run is given: the days are those of 1,000 iterations")
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
        option = setting_option(name)
        if value is True:
            flags.append(option)
        elif value is not None and value is not False:
            flags += [option, str(value)]
    return [*_without(words, set(change)), *flags]


@cache
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
