"""The command line: its flags as a config, and all mistakes of a user in one error."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron.config.checkpoint_args import (
    ReadSavedConfig,
    add_branch_settings,
    add_checkpoint_args,
    check_branch_flags,
)
from megatron.config.config import SECTIONS, Config
from megatron.config.data import SPLIT_NAMES, read_data_args, read_groups_file, read_per_split_data_args
from megatron.config.fields import (
    InvalidSettings,
    flag_of,
    option_name,
    setting_option,
)
from megatron.config.flag_parser import NOTES, make_parser
from megatron.config.mistakes import Mistakes
from megatron.config.rules import risk_notes, unused_setting_notes
from megatron.config.sections.checkpoint import CheckpointConfig
from megatron.config.validate import mistakes_of
from megatron.errors import ConfigError, one_line


@dataclass(frozen=True)
class CommandLine:
    """A parsed and validated command line. notes: sentences to log once."""

    config: Config
    notes: tuple[str, ...]


# Reads the file of --deepspeed_config and adds its mistakes: returns the config with its settings, and notes.
ReadDeepSpeedConfig = Callable[[Config, Mistakes], tuple[Config, tuple[str, ...]]]


def read_command_line(
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] = os.environ,
    read_saved_config: ReadSavedConfig | None = None,
    read_deepspeed_config: ReadDeepSpeedConfig | None = None,
    mistakes: Mistakes | None = None,
) -> CommandLine:
    """Parses and validates argv (None: sys.argv[1:]). Raises a ConfigError with all mistakes, if there are
    any.

    read_saved_config: reads the configuration of a checkpoint, for --use-checkpoint-args and --branch-at.
    mistakes: found before.
    """
    mistakes = mistakes or Mistakes()
    settings = vars(make_parser().collect(sys.argv[1:] if argv is None else argv, mistakes))
    notes = list(settings.pop(NOTES))
    typed = set(settings)
    _apply_launcher_env(settings, env, mistakes)
    _read_data_files(settings, mistakes)
    with mistakes.collect():
        _use_hugging_face(settings)
    of_model = [option_name(field.name) for field in dataclasses.fields(SECTIONS["model"])]
    with mistakes.collect(of_model):
        notes += _use_checkpoint_args(settings, read_saved_config)
    with mistakes.collect(["--train-iters", "--train-samples", "--lr"]):
        notes += _use_branch_point(settings, read_saved_config)
    _fill_in_required(settings, mistakes)
    sections = {name: _section(name, settings, mistakes) for name in SECTIONS}
    parallel = sections["parallel"]
    if not mistakes.unknown.isdisjoint(_LAYOUT):  # checked as if there was one replica
        sections["parallel"] = dataclasses.replace(parallel, world_size=parallel.ranks_per_replica)
    flags = config = Config(**sections)
    if read_deepspeed_config is not None:
        config, more = read_deepspeed_config(config, mistakes)
        notes += more
    mistakes.extend(mistakes_of(config))
    mistakes.raise_all()
    return CommandLine(config, (*notes, *unused_setting_notes(flags, typed), *risk_notes(flags)))


_LAYOUT = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
    "--world-size",
)


def _section(name: str, settings: Mapping[str, Any], mistakes: Mistakes) -> Any:
    """Returns a section. A setting with an invalid value has its default, or the smallest valid value."""
    kind, values = SECTIONS[name], _section_settings(settings, name)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    while True:
        unknown = [field for field in fields.values() if option_name(field.name) in mistakes.unknown]
        if any(flag_of(field).choices is None for field in unknown):  # what is derived from it is unknown
            derived = {field.name for field in fields.values() if flag_of(field).derived} - values.keys()
            mistakes.unknown |= set(map(option_name, derived))
        try:
            return kind(**values)
        except InvalidSettings as error:
            for field_name, sentence in error.mistakes.items():
                mistakes.add(sentence, [option_name(field_name)])
                field = fields[field_name]
                if values.pop(field_name, None) is None or field.default is dataclasses.MISSING:
                    values[field_name] = _smallest(field)


def _smallest(field: dataclasses.Field[Any]) -> Any:
    return flag_of(field).at_least or 1


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
    """Reads the prefixes and weights from the files that name them, which may be missing in a dry run."""
    if settings.get("data.mock_data"):  # its rules refuse the files
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
    """Returns the file that a flag of the data names, if it is to be read. replaced: fields of the words in
    the file."""
    file: str | None = settings.get(f"data.{field}")
    if file is None:
        return None
    for name in replaced:
        if f"data.{name}" in settings:
            raise ConfigError(
                f"{option_name(field)} {file} and {option_name(name)} are both given: remove one"
            )
    return file if os.path.exists(file) or not settings.get("training.dry_run") else None


def _use_hugging_face(settings: dict[str, Any]) -> None:
    """Sets the flags that --load-huggingface implies."""
    folder = settings.get("checkpoint.load_huggingface")
    if folder is None:
        return
    if settings.get("checkpoint.load", folder) != folder:
        raise ConfigError(
            f"--load-huggingface {folder} with --load {settings['checkpoint.load']}: a run starts from one "
            "folder; remove one of the flags"
        )
    # A run that has saved checkpoints resumes from --save, even if the folder no longer exists.
    if "checkpoint.save" not in settings and not os.path.isfile(os.path.join(folder, "config.json")):
        raise ConfigError(
            f"--load-huggingface {folder} has no config.json: expected the folder of a Hugging Face model"
        )
    settings["checkpoint.load"] = folder
    settings["checkpoint.use_checkpoint_args"] = True
    if not settings.get("training.no_train"):
        settings["checkpoint.finetune"] = True


def _use_checkpoint_args(settings: dict[str, Any], read: ReadSavedConfig | None) -> list[str]:
    """Adds the checkpoint's flags with --use-checkpoint-args. Returns notes for the log."""
    if not settings.get("checkpoint.use_checkpoint_args"):
        return []
    if "checkpoint.load" not in settings:
        raise ConfigError("--use-checkpoint-args without --load: set --load to the folder of the checkpoint")
    if read is None:
        raise ConfigError("--use-checkpoint-args has no effect in this tool: give the flags of the model")
    saved = read(CheckpointConfig(**_section_settings(settings, "checkpoint")))
    return [add_checkpoint_args(settings, saved)]


def _use_branch_point(settings: dict[str, Any], read: ReadSavedConfig | None) -> list[str]:
    """Adds the schedule of a branch with --branch-at. Returns notes for the log."""
    if "checkpoint.branch_at" not in settings:
        return []
    options = CheckpointConfig(**_section_settings(settings, "checkpoint"))
    check_branch_flags(options, settings)
    if read is None:
        raise ConfigError("--branch-at has no effect in this tool: give the checkpoint's folder to --load")
    return [add_branch_settings(settings, read(options))]


def _launcher_number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} is '{one_line(env[name], 40)}': expected the integer that the "
            "launcher sets"
        ) from None


def _fill_in_required(settings: dict[str, Any], mistakes: Mistakes) -> None:
    """Adds the missing required flags to the mistakes, and to the settings with the smallest values."""
    missing: dict[str, str] = {}
    for section, kind in SECTIONS.items():
        for field in dataclasses.fields(kind):
            name, option = f"{section}.{field.name}", option_name(field.name)
            if field.default is dataclasses.MISSING and name not in settings:
                settings[name] = _smallest(field)
                if option not in mistakes.unknown:
                    missing[name] = f"{option} ({flag_of(field).help.split(':')[0]})"
    if missing:
        of_model = any(name.startswith("model.") for name in missing)
        hint = "; --use-checkpoint-args takes those of the model from the checkpoint in --load"
        sentence = f"missing required flags: {', '.join(missing.values())}"
        mistakes.add(
            sentence + hint * (of_model and "checkpoint.load" in settings), map(setting_option, missing)
        )


def _section_settings(settings: Mapping[str, Any], section: str) -> dict[str, Any]:
    prefix = section + "."
    return {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}
