"""Reads the command line: returns its flags as a config, or raises one error with all mistakes of the
user."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron.arguments.checkpoint_args import (
    section_settings,
    use_branch_point,
    use_checkpoint_args,
    use_hugging_face,
)
from megatron.arguments.checks import mistakes_of
from megatron.arguments.notes import risk_notes, unused_setting_notes
from megatron.config.config import SECTIONS, SETTINGS, Config, Setting, settings_of_section
from megatron.config.fields import InvalidSettings, option_name, setting_option
from megatron.config.flag_parser import NOTES, make_parser
from megatron.config.mistakes import Mistakes
from megatron.data.flags import SPLIT_NAMES, read_data_args, read_groups_file, read_per_split_data_args
from megatron.engine.deepspeed_config import file_mistakes, file_notes, merge_file
from megatron.errors import ConfigError, one_line

INTRODUCTION = r"""no flags are given; pretrain_gpt.py trains a GPT with tensor, pipeline and data parallelism
Train a small GPT on this machine's CPU (5 to 8 minutes on 2 cores):
  make train
Plan a run of 354 M parameters on 8 GPUs, on a machine without GPUs:
  python pretrain_gpt.py --dry-run --gpu a100-80gb --world-size 8 --bf16 --num-layers 24 --hidden-size 1024 \
    --num-attention-heads 16 --seq-length 2048 --position-embedding-type rotary --vocab-size 50257 \
    --micro-batch-size 4 --global-batch-size 256 --train-iters 1000 --lr 3e-4
All flags: python pretrain_gpt.py --help. Documentation: README.md and docs/README.md."""


def require_flags(argv: Sequence[str]) -> None:
    """Raises ConfigError with an introduction to the program if argv has no flag, or only the launcher's
    --local-rank."""
    if all(word.replace("_", "-").startswith("--local-rank=") for word in argv):
        raise ConfigError(INTRODUCTION)


@dataclass(frozen=True)
class CommandLine:
    """A parsed and validated command line. notes: sentences to log once."""

    config: Config
    notes: tuple[str, ...]


def read_command_line(
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] = os.environ,
    *,
    reads_files: bool = True,
    mistakes: Mistakes | None = None,
) -> CommandLine:
    """Parses and validates argv (None: sys.argv[1:]). Raises a ConfigError with all mistakes, if there are
    any.

    reads_files: whether the checkpoint of --use-checkpoint-args and --branch-at and the file of
    --deepspeed_config are read. mistakes: mistakes that were found before; None for none.
    """
    mistakes = mistakes or Mistakes()
    settings = vars(make_parser().collect(sys.argv[1:] if argv is None else argv, mistakes))
    notes = list(settings.pop(NOTES))
    typed = set(settings)
    _apply_launcher_env(settings, env, mistakes)
    _read_data_files(settings, mistakes)
    with mistakes.collect():
        use_hugging_face(settings)
    of_model = [setting.option for setting in settings_of_section("model")]
    with mistakes.collect(of_model):
        notes += use_checkpoint_args(settings, reads_files)
    with mistakes.collect(["--train-iters", "--train-samples", "--lr"]):
        notes += use_branch_point(settings, reads_files)
    if settings.get("model.num_experts", 1) not in (None, 1) and "checkpoint.save" in settings:
        settings.setdefault("checkpoint.save_format", "dcp")
    file, curriculum, more = merge_file(settings, mistakes) if reads_files else ({}, None, [])
    _fill_in_required(settings, mistakes)
    sections = {name: _section(name, settings, mistakes) for name in SECTIONS}
    parallel = sections["parallel"]
    if not mistakes.unknown.isdisjoint(_LAYOUT):  # checked as if there were one replica
        sections["parallel"] = dataclasses.replace(parallel, world_size=parallel.ranks_per_replica)
    config = Config(**sections, curriculum=curriculum)
    mistakes.extend(file_mistakes(config, file))
    mistakes.extend(mistakes_of(config))
    mistakes.raise_all()
    notes += [*more, *file_notes(config, file), *unused_setting_notes(config, typed), *risk_notes(config)]
    return CommandLine(config, tuple(notes))


_LAYOUT = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
    "--world-size",
)


def _section(name: str, settings: Mapping[str, Any], mistakes: Mistakes) -> Any:
    """Returns a section of the config. A setting with an invalid value gets its default, or the smallest
    valid value."""
    values, own = section_settings(settings, name), settings_of_section(name)
    while True:
        unknown = [setting for setting in own if setting.option in mistakes.unknown]
        if any(setting.flag.choices is None for setting in unknown):  # derived fields are unknown
            derived = (setting for setting in own if setting.flag.derived and setting.field not in values)
            mistakes.unknown |= {setting.option for setting in derived}
        try:
            return SECTIONS[name](**values)
        except InvalidSettings as error:
            for field, sentence in error.mistakes.items():
                setting = SETTINGS[f"{name}.{field}"]
                mistakes.add(sentence, [setting.option])
                if values.pop(field, None) is None or setting.is_required:
                    values[field] = _smallest(setting)


def _smallest(setting: Setting) -> Any:
    return setting.flag.at_least or 1


def parse_args(argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> Config:
    """Returns the config of `read_command_line`, without the notes."""
    return read_command_line(argv, env).config


def complete_command_line() -> None:
    """Answers a shell that asks for completions (Tab), and exits. Does nothing without argcomplete."""
    if "_ARGCOMPLETE" in os.environ:
        with suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(make_parser())


def _apply_launcher_env(settings: dict[str, Any], env: Mapping[str, str], mistakes: Mistakes) -> None:
    """Sets world size and local rank from the launcher's environment variables."""
    with mistakes.collect(["--local-rank"]):
        if "parallel.local_rank" not in settings and "LOCAL_RANK" in env:
            settings["parallel.local_rank"] = _launcher_number(env, "LOCAL_RANK")
    started = 1
    with mistakes.collect(["--world-size"]):
        started = _launcher_number(env, "WORLD_SIZE") if "WORLD_SIZE" in env else 1
    planned = settings.setdefault("parallel.world_size", started)
    if planned != started and not settings.get("training.dry_run"):
        mistakes.add(
            f"--world-size {planned} does not match the {started} started process(es) (WORLD_SIZE): "
            "remove --world-size, or add --dry-run to plan for another number",
            ["--world-size"],
        )


def _read_data_files(settings: dict[str, Any], mistakes: Mistakes) -> None:
    """Reads data prefixes and weights from the files that flags name. In a dry run these files may be
    missing."""
    if settings.get("data.mock_data"):  # the rules of --mock-data reject the files
        return
    words: dict[str, Any] = {}
    for name in ("data_path", *(f"{split}_weighted_split_paths" for split in SPLIT_NAMES)):
        field = "data_args_path" if name == "data_path" else f"{name}_path"
        read = read_data_args if name == "data_path" else read_groups_file
        with mistakes.collect([option_name(name), option_name(field)]):
            if file := _file_to_read(settings, field, (name,)):
                words[f"data.{name}"] = read(option_name(field), file)
    per_split = "per_split_data_args_path"
    replaced = tuple(f"{split}_data_path" for split in SPLIT_NAMES)
    with mistakes.collect(map(option_name, (per_split, *replaced))):
        if file := _file_to_read(settings, per_split, replaced):
            found = read_per_split_data_args(option_name(per_split), file)
            words |= {f"data.{split}_data_path": value for split, value in found.items()}
    settings |= words


def _file_to_read(settings: dict[str, Any], field: str, replaced: tuple[str, ...]) -> str | None:
    """Returns the file that a data flag names; None if it must not be read. replaced: fields that the words
    in the file set."""
    file: str | None = settings.get(f"data.{field}")
    if file is None:
        return None
    for name in replaced:
        if f"data.{name}" in settings:
            raise ConfigError(
                f"{option_name(field)} {file} and {option_name(name)} are both given: remove one"
            )
    return file if os.path.exists(file) or not settings.get("training.dry_run") else None


def _launcher_number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} is '{one_line(env[name], 40)}': expected the integer that the "
            "launcher sets"
        ) from None


def _fill_in_required(settings: dict[str, Any], mistakes: Mistakes) -> None:
    """Adds the missing required flags to the mistakes, and sets them to their smallest values."""
    missing: dict[str, str] = {}
    for name, setting in SETTINGS.items():
        if setting.is_required and name not in settings:
            settings[name] = _smallest(setting)
            if setting.option not in mistakes.unknown:
                missing[name] = f"{setting.option} ({setting.flag.help.split(':')[0]})"
    if missing:
        of_model = any(name.startswith("model.") for name in missing)
        hint = "; --use-checkpoint-args takes the flags of the model from the checkpoint in --load"
        sentence = f"missing required flags: {', '.join(missing.values())}"
        mistakes.add(
            sentence + hint * (of_model and "checkpoint.load" in settings), map(setting_option, missing)
        )
