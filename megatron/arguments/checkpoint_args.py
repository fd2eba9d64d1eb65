"""Flags that are taken from a checkpoint, by --use-checkpoint-args and --branch-at.

--use-checkpoint-args takes the flags of the model and the tokenizer. --branch-at takes the schedule, length
and data order of a cooldown branch from the base run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.saved_config import SavedConfig, read_saved_config
from megatron.config.config import SETTINGS, Config
from megatron.config.fields import InvalidSettings, setting_option, value_text
from megatron.config.sections.checkpoint import CheckpointConfig
from megatron.config.sections.data import TOKENIZER_FIELDS
from megatron.config.sections.experts import OPTIONS_OF_EXPERTS
from megatron.errors import ConfigError
from megatron.optimizer.batch_schedule import RunLength

Settings = dict[str, Any]
"""The given flags: 'section.field' -> value."""


def section_settings(settings: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Returns the given flags of a section: field -> value."""
    prefix = section + "."
    return {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}


def use_hugging_face(settings: Settings) -> None:
    """Sets the flags that --load-huggingface implies."""
    folder = settings.get("checkpoint.load_huggingface")
    if folder is None:
        return
    if settings.get("checkpoint.load", folder) != folder:
        raise ConfigError(
            f"--load-huggingface {folder} with --load {settings['checkpoint.load']}: a run starts from one "
            "folder; remove one of the flags"
        )
    # A run that has saved checkpoints resumes from --save, even if the folder of --load-huggingface no longer
    # exists.
    if "checkpoint.save" not in settings and not os.path.isfile(os.path.join(folder, "config.json")):
        raise ConfigError(
            f"--load-huggingface {folder} has no config.json: expected the folder of a Hugging Face model"
        )
    settings["checkpoint.load"] = folder
    settings["checkpoint.use_checkpoint_args"] = True
    if not settings.get("training.no_train"):
        settings["checkpoint.finetune"] = True


def use_checkpoint_args(settings: Settings, reads_files: bool = True) -> list[str]:
    """Adds the checkpoint's flags with --use-checkpoint-args. Returns notes for the log."""
    if not settings.get("checkpoint.use_checkpoint_args"):
        return []
    if "checkpoint.load" not in settings:
        raise ConfigError("--use-checkpoint-args without --load: set --load to the folder of the checkpoint")
    if not reads_files:
        raise ConfigError("--use-checkpoint-args has no effect in this tool: give the flags of the model")
    saved = read_saved_config(CheckpointConfig(**section_settings(settings, "checkpoint")))
    return [add_checkpoint_args(settings, saved)]


def use_branch_point(settings: Settings, reads_files: bool = True) -> list[str]:
    """Adds the schedule of a branch with --branch-at. Returns notes for the log."""
    if "checkpoint.branch_at" not in settings:
        return []
    options = CheckpointConfig(**section_settings(settings, "checkpoint"))
    check_branch_flags(options, settings)
    if not reads_files:
        raise ConfigError("--branch-at has no effect in this tool: give the checkpoint's folder to --load")
    return [add_branch_settings(settings, read_saved_config(options))]


def add_checkpoint_args(settings: Settings, saved: SavedConfig) -> str:
    """Adds the flags of a checkpoint to the given flags, and returns a note for the log.

    settings: the given flags. They take precedence over the checkpoint's flags. Raises ConfigError for a
    given flag that changes the model and whose value differs from the checkpoint's.
    """
    typed_tokenizer = any(f"data.{name}" in settings for name in TOKENIZER_FIELDS)
    is_finetuning = settings.get("checkpoint.finetune", False)
    unused = saved.config.model.unused_fields()  # some are derived from fields such as --seq-length
    values = {
        name: saved.config.value(name)
        for name, setting in SETTINGS.items()
        if setting.section == "model"
        or setting.field in TOKENIZER_FIELDS
        # Fine-tuning may choose how attention and positions treat documents.
        or (setting.section == "data" and setting.changes_model and not is_finetuning)
    }
    for name, value in values.items():
        if not SETTINGS[name].has_type(value):
            raise ConfigError(
                f"checkpoint {saved.source}: {name} in its config is of type "
                f"{type(value).__name__}: the file is damaged, or another program wrote it"
            )
    for name, value in values.items():
        setting = SETTINGS[name]
        is_of_tokenizer = setting.field in TOKENIZER_FIELDS
        if typed_tokenizer and (is_of_tokenizer or name == "model.vocab_size"):
            continue
        if setting.section == "model" and setting.field in unused:
            continue
        if setting.field in {"num_experts", *OPTIONS_OF_EXPERTS} and settings.get(
            "checkpoint.moe_use_upcycling"
        ):
            continue  # the checkpoint has none
        if setting.field == "mtp_num_layers" and value is None and is_finetuning:
            continue  # it initializes these layers
        typed = settings.setdefault(name, value)
        is_other = typed != value and _as_in_config(saved.config, name, typed) != value
        if setting.changes_model and is_other:
            has = "does not have it" if value in (None, False) else f"has {value_text(value)}"
            raise ConfigError(
                f"{setting.option} {'' if typed is True else f'{value_text(typed)} '}contradicts "
                f"--use-checkpoint-args: checkpoint {saved.source} {has}; remove one of the two flags"
            )
    return f"model and tokenizer have the flags of {saved.source} (--use-checkpoint-args)"


def _as_in_config(config: Config, name: str, typed: Any) -> Any:
    """Returns the value that the config of the model has for a typed value, such as the letters for
    --moe-layer-freq 2."""
    try:
        return config.with_settings({name: typed}).value(name)
    except InvalidSettings:  # the value is invalid, alone or with the checkpoint's values
        return typed


def check_branch_flags(options: CheckpointConfig, settings: Settings) -> None:
    """Raises ConfigError for folders and flags that --branch-at contradicts."""
    flag = f"--branch-at {options.branch_at}"
    if options.load is None or options.save is None:
        missing = "--load" if options.load is None else "--save"
        raise ConfigError(f"{flag} without {missing}: the branch starts from --load and saves to --save")
    if options.save_is_load_folder:
        raise ConfigError(
            f"{flag} with --load {options.load} and --save {options.save}: a branch is a separate run; "
            "set another --save. To resume a branch, repeat its command, or remove --branch-at"
        )
    for name, option in _CONTRADICTIONS.items():
        if settings.get(name):
            raise ConfigError(f"{flag} and {option} contradict each other: remove one of them")
    style = settings.get("schedule.lr_decay_style", "WSD")
    if style != "WSD":
        raise ConfigError(
            f"{flag} with --lr-decay-style {style}: a branch decays by WSD; remove the flag, and choose the "
            "shape with --lr-wsd-decay-style"
        )


_CONTRADICTIONS = {
    "checkpoint.finetune": "--finetune",
    "training.no_train": "--eval-only",
    "schedule.use_checkpoint_lr_scheduler": "--use-checkpoint-lr-scheduler",
    "schedule.lr_decay_tokens": "--lr-decay-tokens",
}


def add_branch_settings(settings: Settings, saved: SavedConfig) -> str:
    """Adds the schedule, length and data order of a branch to the given flags, and returns a note.

    saved: the branch point, or a checkpoint of this branch if
    the branch point cannot be read any more. Raises ConfigError for a given flag that contradicts the branch.
    """
    base = saved.config
    if saved.is_branch_checkpoint:
        for name in _DERIVED:
            settings.setdefault(name, base.value(name))
        return f"a cooldown branch (--branch-at), continued with the schedule of {saved.source}"
    iteration = settings["checkpoint.branch_at"]
    flag = f"--branch-at {iteration}"
    by_iters = base.training.train_iters is not None
    unit, other = ("iters", "samples") if by_iters else ("samples", "iters")
    for name in (f"schedule.lr_wsd_decay_{other}", f"training.train_{other}"):
        if settings.get(name) is not None:
            option = setting_option(name)
            raise ConfigError(
                f"{flag}: the run of {saved.source} is counted in {unit}; give "
                f"{option.removesuffix(other)}{unit}, not {option}"
            )
    decay = settings.get(f"schedule.lr_wsd_decay_{unit}")
    if not decay:
        raise ConfigError(f"{flag} without --lr-wsd-decay-{unit}: set it to the length of the decay")
    start = saved.progress.count("iterations" if by_iters else "samples")
    _set(settings, f"schedule.lr_decay_{unit}", start + decay, f"{flag} with --lr-wsd-decay-{unit} {decay}")
    settings.setdefault(f"training.train_{unit}", start + decay)
    settings["schedule.lr_decay_style"] = "WSD"
    _set(settings, "schedule.lr", base.schedule.lr, f"{flag}: the run of {saved.source}")
    settings.setdefault("schedule.min_lr", base.schedule.min_lr)
    if base.schedule.lr_decay_style == "WSD":
        settings.setdefault("schedule.lr_wsd_decay_style", base.schedule.lr_wsd_decay_style)
    if not any(name.startswith("schedule.lr_warmup") for name in settings):
        settings[f"schedule.lr_warmup_{unit}"] = min(start, _warmup(base, unit))
    _add_data_order(settings, saved)
    return (
        f"a cooldown branch of {saved.source} (--branch-at): the learning rate decays from {start:,} to "
        f"{start + decay:,} {unit}"
    )


_DERIVED = (
    *("schedule.lr", "schedule.min_lr", "schedule.lr_decay_style", "schedule.lr_wsd_decay_style"),
    *("schedule.lr_decay_iters", "schedule.lr_decay_samples"),
    *("schedule.lr_warmup_iters", "schedule.lr_warmup_samples", "schedule.lr_warmup_fraction"),
    *("training.train_iters", "training.train_samples"),
    *("data.data_order_samples", "data.data_first_sample"),
)


def _set(settings: Settings, name: str, value: Any, reason: str) -> None:
    """Sets a flag. Raises ConfigError if the flag is given with a different value."""
    typed = settings.setdefault(name, value)
    if typed != value:
        option = setting_option(name)
        raise ConfigError(f"{reason} needs {option} {value}, not {typed}: remove {option}")


def _warmup(base: Config, unit: str) -> int:
    """Returns the length of the base run's warm-up in `unit`; 0 if the base run counts it in a different
    unit. The warm-up ends before the branch point, so this changes no learning rate of the branch."""
    schedule = base.schedule
    if schedule.lr_decay_tokens is not None:
        return 0
    if schedule.lr_warmup_fraction is None:
        return int(getattr(schedule, f"lr_warmup_{unit}"))
    length = getattr(schedule, f"lr_decay_{unit}") or getattr(base.training, f"train_{unit}")
    return math.ceil(schedule.lr_warmup_fraction * length)


def _add_data_order(settings: Settings, saved: SavedConfig) -> None:
    """Adds the data order of the base run, which depends on the length of the base run. With --override-data,
    the branch reads the new data from their first sample on."""
    if settings.get("checkpoint.override_data"):
        settings.setdefault("data.data_first_sample", saved.progress.consumed_samples)
        return
    base = saved.config
    settings.setdefault("data.data_first_sample", base.data.data_first_sample)
    planned = RunLength.from_config(base, saved.progress).ordered_samples(base)
    settings.setdefault("data.data_order_samples", planned)
