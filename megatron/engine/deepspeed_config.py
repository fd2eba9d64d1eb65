"""Checks the JSON file of --deepspeed_config, and makes the configuration that DeepSpeed gets.

The flags define the run. The file may repeat their values, as published scripts do, but must not contradict
them. There are two exceptions: the file overrides the flags for the loss scale, and only the file can define
a curriculum. Monitoring keys are passed to DeepSpeed; all other keys are rejected. DeepSpeed is configured
for fp32 without clipping, since this repository's optimizer handles precision, clipping and the loss scale
(see workarounds.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeGuard

from megatron.config.config import Config
from megatron.config.foreign_flags import foreign_flags
from megatron.config.mistakes import Mistakes
from megatron.config.sections.curriculum import SOURCE, LengthCurriculum
from megatron.config.sections.precision import PrecisionConfig
from megatron.errors import ConfigError
from megatron.files import read_json

# Keys that are passed to DeepSpeed unchanged. They monitor the run and do not change its results. Each key
# has an effect with the pipeline engine of DeepSpeed 0.19.8.
_PASSED_THROUGH: dict[str, type] = {
    "tensorboard": dict,
    "wandb": dict,
    "csv_monitor": dict,
    "comet": dict,
    "memory_breakdown": bool,
    "checkpoint": dict,
}

# Allowed keys of the section `checkpoint`. All other keys would change where or how checkpoints are written.
_CHECKPOINT_KEYS = ("tag_validation", "parallel_write")

# Supported keys of the section `fp16` -> (field of PrecisionConfig, function from the key's value to the
# field's value). The key "enabled" is compared with --fp16 instead.
_LOSS_SCALE_KEYS: dict[str, tuple[str, Callable[[float], float | None]]] = {
    "loss_scale": ("loss_scale", lambda scale: float(scale) or None),
    "loss_scale_window": ("loss_scale_window", int),
    "hysteresis": ("hysteresis", int),
    "min_loss_scale": ("min_loss_scale", float),
    "initial_scale_power": ("initial_loss_scale", lambda power: 2.0**power),
}

# The loss scale is stored in fp32, so it must be at most 2 to this power.
_LARGEST_SCALE_POWER = 127

# Sections that this module reads.
_OWN_SECTIONS = ("zero_optimization", "fp16", "bf16", "bfloat16", "data_types", "curriculum_learning")

# Keys that this module handles, and that are not passed to DeepSpeed.
_OWN_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    *_OWN_SECTIONS,
    "steps_per_print",
    "elastic_checkpoint",
    "zero_allow_untested_optimizer",
)

_CURRICULA = ("fixed_linear", "fixed_root", "fixed_discrete")
# Largest number of curriculum steps: the sequence length of every step is computed at the start.
_MAX_CURRICULUM_STEPS = 1_000_000


def merge_file(
    flags: dict[str, Any], mistakes: Mistakes
) -> tuple[dict[str, Any], LengthCurriculum | None, list[str]]:
    """Reads the file of --deepspeed_config, if it is set, and writes the file's loss scale into `flags`.

    flags: values of the flags by 'section.field'. Returns the content of the file, its curriculum, and notes
    for the user, one sentence each. Adds a mistake if the file is missing or not JSON. With --dry-run a
    missing file only causes a note.
    """
    path = flags.get("training.deepspeed_config")
    if path is None:
        return {}, None, []
    if _is_absent(path, flags.get("training.dry_run", False)):
        return {}, None, [f"there is no --deepspeed_config {path}: it was not checked"]
    content: dict[str, Any] = {}
    curriculum, notes = None, list[str]()
    with mistakes.collect():
        content = _load(path)
    if flags.get("precision.fp16"):
        with mistakes.collect():
            notes = _override_loss_scale(flags, _section(content, "fp16"))
    with mistakes.collect():
        curriculum = read_curriculum(_section(content, "curriculum_learning"))
    return content, curriculum, notes


def file_mistakes(config: Config, content: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each contradiction between the file and a flag (it names both), for each
    unsupported key, and for each value of a wrong type. content: the content of the file."""
    yield from _mistakes_of_types(content)
    yield from _mistakes_of_keys(content)
    yield from _contradictions(config, content)


def file_notes(config: Config, content: Mapping[str, Any]) -> list[str]:
    """Returns notes for the user, one sentence each, about keys of the file that have no effect, and about
    its curriculum."""
    notes: list[str] = []
    if content.get("steps_per_print") is not None:
        notes.append(
            f"the DeepSpeed config's steps_per_print {content['steps_per_print']} is not used: "
            f"--log-interval {config.logging.log_interval} decides when a line is printed"
        )
    if content.get("elastic_checkpoint"):
        notes.append(
            "the DeepSpeed config's elastic_checkpoint is deprecated and ignored: every checkpoint opens "
            "on any layout"
        )
    zero = _section(content, "zero_optimization")
    replaced = [key for key, value in zero.items() if key != "stage" and not _unset(value)]
    if replaced:
        notes.append(
            f"the DeepSpeed config's zero_optimization ({', '.join(replaced)}) is deprecated and ignored: "
            "--zero-stage decides, and this repository's optimizer replaces DeepSpeed's"
        )
    for name, value in _passed_through(content).items():
        if not _is_off(value):
            notes.append(f"the DeepSpeed config's {name} is passed to DeepSpeed unchanged")
    return notes if config.curriculum is None else [*notes, config.curriculum.describe()]


def with_curriculum(config: Config) -> Config:
    """Returns the config with the curriculum of the file of --deepspeed_config, if the curriculum determines
    the number of samples (with --train-tokens). All other settings of the file are not compared with the
    flags. Raises ConfigError if the file is missing or not JSON."""
    path = config.training.deepspeed_config
    if path is None or config.training.train_tokens is None:
        return config
    curriculum = read_curriculum(_section(_load(path), "curriculum_learning"))
    return dataclasses.replace(config, curriculum=curriculum)


def deepspeed_dict(config: Config, global_batch_size: int) -> dict[str, Any]:
    """Returns the configuration that DeepSpeed gets, including the monitoring keys of the user's file.

    global_batch_size: number of samples in the next step. With --rampup-batch-size it changes during the run.
    """
    micro, data = config.batch.micro_batch_size, config.parallel.data_parallel_size
    path = config.training.deepspeed_config
    settings = {} if path is None or _is_absent(path, config.training.dry_run) else _load(path)
    return {
        "wall_clock_breakdown": False,
        # This timer synchronizes with the device in every forward pass, and nothing reads it.
        "timers": {"throughput": {"enabled": False}},
        **_passed_through(settings),
        # DeepSpeed's data-parallel group includes the context-parallel ranks, which read the same samples.
        "train_batch_size": global_batch_size * config.parallel.context_parallel_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": global_batch_size // (micro * data),
        "gradient_clipping": 0.0,
        # DeepSpeed's pipeline rejects ZeRO stages above 1. With ZeRO stage 1 each replica writes its
        # optimizer file. This repository's optimizer does the sharding.
        "zero_optimization": {"stage": min(config.parallel.zero_stage, 1)},
        "zero_allow_untested_optimizer": True,
    }


def _is_absent(path: str, dry_run: bool) -> bool:
    """Returns whether the file is missing in a dry run, which is allowed, because a job script may write it
    later."""
    return dry_run and not Path(path).exists()


def _load(path: str) -> dict[str, Any]:
    try:
        settings = read_json(Path(path))
    except OSError as error:
        raise ConfigError(
            f"--deepspeed_config {path} cannot be read ({error.strerror}): correct or remove the flag"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"--deepspeed_config {path} is not valid JSON ({error}): correct the file"
        ) from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--deepspeed_config {path}: expected a JSON object; correct the file")
    return settings


def _unset(value: Any) -> bool:
    return value is None or value == "auto"


def _is_off(value: Any) -> bool:
    """Returns whether a key has no effect, because it is absent, false, or a section that is not enabled."""
    return _unset(value) or value is False or (isinstance(value, dict) and value.get("enabled") is False)


def _section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a section of the file; {} if it is absent or not an object (see `_mistakes_of_types`)."""
    section = settings.get(name)
    return section if isinstance(section, dict) else {}


def _value(settings: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a key, such as 'train_batch_size' or 'fp16.enabled'; None if it is absent."""
    section, _, name = key.rpartition(".")
    return (_section(settings, section) if section else settings).get(name)


def _mistakes_of_types(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each section that is not an object, and for each switch that is not true or
    false."""
    sections = [name for name, kind in _PASSED_THROUGH.items() if kind is dict]
    for name in (*sections, *_OWN_SECTIONS):
        if not _unset(settings.get(name)) and not isinstance(settings[name], dict):
            yield f"the DeepSpeed config's {name} is {settings[name]!r}: expected an object in braces"
    for name, kind in _PASSED_THROUGH.items():
        value = settings.get(name)
        if kind is bool and not _unset(value) and not isinstance(value, bool):
            yield f"the DeepSpeed config's {name} is {json.dumps(value)}: expected true or false"


def _mistakes_of_keys(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each key that is unknown, or that this program does not support."""
    rejected = foreign_flags().deepspeed_keys if settings else {}
    known = (*_OWN_KEYS, *rejected, *_PASSED_THROUGH)
    for name, value in settings.items():
        if name not in known and not _unset(value):
            yield (
                f"the DeepSpeed config has {name}, which is not supported: {_correction(name, known)} "
                f"(DeepSpeed gets only {', '.join(_PASSED_THROUGH)})"
            )
    for name, instead in rejected.items():
        if not _is_off(settings.get(name)):
            yield f"the DeepSpeed config has {name}: {instead}"
    for name, value in _section(settings, "data_types").items():
        if not _unset(value) and value != "fp32":
            yield (
                f"the DeepSpeed config's data_types.{name} is {value}, but gradients are always summed in "
                "fp32: remove it from the file"
            )
    for name in ("offload_optimizer", "offload_param"):
        device = _offload_device(settings, name)
        if device not in (None, "none", "cpu") or (name == "offload_param" and device == "cpu"):
            yield (
                f"the DeepSpeed config's zero_optimization.{name} to {device} is not supported: remove it "
                "from the file (--cpu-offload keeps the optimizer's state on the CPU)"
            )
    for section, supported in (
        ("fp16", ("enabled", *_LOSS_SCALE_KEYS)),
        *((name, ("enabled",)) for name in ("bf16", "bfloat16")),
        ("checkpoint", _CHECKPOINT_KEYS),
    ):
        for name, value in _section(settings, section).items():
            if name not in supported and not _is_off(value):
                yield (
                    f"the DeepSpeed config's {section}.{name} is not supported: "
                    f"{_correction(name, supported)}"
                )
    if len({"bf16", "bfloat16"} & settings.keys()) == 2:
        yield "the DeepSpeed config has bf16 and bfloat16: remove one of them from the file"


_REMOVE = "remove it from the file"


def _correction(name: str, known: Sequence[str]) -> str:
    nearest = get_close_matches(name, known, n=1, cutoff=0.8)
    return f"did you mean {nearest[0]}? Otherwise remove it from the file" if nearest else _REMOVE


def _offload_device(settings: Mapping[str, Any], name: str) -> Any:
    """Returns the offload device of zero_optimization.`name`; None if the file does not set it."""
    zero = _section(settings, "zero_optimization")
    if name == "offload_optimizer" and not _unset(zero.get("cpu_offload")):
        return "cpu" if zero["cpu_offload"] else "none"  # cpu_offload is the key's old name
    section = zero.get(name)
    device = section.get("device", "none") if isinstance(section, dict) else section
    return None if _unset(device) or device is False else device


def _contradictions(config: Config, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each value of the file that differs from its flag."""
    parallel, precision, batch = config.parallel, config.precision, config.batch
    accumulation = "--global-batch-size / (--micro-batch-size x data-parallel size)"
    flags: dict[str, tuple[str, Any]] = {
        "train_micro_batch_size_per_gpu": ("--micro-batch-size", batch.micro_batch_size),
        "train_batch_size": ("--global-batch-size", batch.global_batch_size),
        "gradient_clipping": ("--clip-grad", config.optimizer.clip_grad),
        "zero_optimization.stage": ("--zero-stage", parallel.zero_stage),
        "fp16.enabled": ("--fp16", precision.fp16),
        f"{'bfloat16' if 'bfloat16' in settings else 'bf16'}.enabled": ("--bf16", precision.bf16),
    }
    # If the batch is not whole micro-batches per replica, the batch size or the number of processes is wrong.
    per_step = batch.micro_batch_size * parallel.data_parallel_size
    if per_step and batch.global_batch_size % per_step == 0:
        flags["gradient_accumulation_steps"] = (accumulation, config.micro_batches_per_step)
    pairs = [(key, _value(settings, key), *flag) for key, flag in flags.items()]
    offload = {"cpu": True, "none": False}.get(_offload_device(settings, "offload_optimizer"))
    pairs.append(
        ("zero_optimization.offload_optimizer to cpu", offload, "--cpu-offload", parallel.cpu_offload)
    )
    different = {key for key, in_file, _, value in pairs if not _unset(in_file) and in_file != value}
    if different & {"train_micro_batch_size_per_gpu", "train_batch_size"}:
        different -= {"gradient_accumulation_steps"}
    for key, in_file, flag, value in pairs:
        if key in different:
            yield (
                f"the DeepSpeed config's {key} is {json.dumps(in_file)} but {flag} is {json.dumps(value)}: "
                "change one of them, or remove the key from the file"
            )


def _override_loss_scale(flags: dict[str, Any], fp16: Mapping[str, Any]) -> list[str]:
    """Writes the file's loss-scale settings into `flags`, and returns a note for each setting that it
    changes."""
    in_file = {key: fp16[key] for key in _LOSS_SCALE_KEYS if not _unset(fp16.get(key))}
    for key, value in in_file.items():
        is_number = not isinstance(value, bool) and isinstance(value, (int, float))
        if not is_number or not abs(value) <= 2.0**_LARGEST_SCALE_POWER:  # NaN fails this comparison
            raise ConfigError(f"the DeepSpeed config's fp16.{key} is {json.dumps(value)}: expected a number")
    power = in_file.get("initial_scale_power", 0)
    if not 0 <= power <= _LARGEST_SCALE_POWER:
        raise ConfigError(
            f"the DeepSpeed config's fp16.initial_scale_power is {power}: expected 0 to "
            f"{_LARGEST_SCALE_POWER}; correct the file"
        )
    changes: dict[str, Any] = {
        name: convert(in_file[key]) for key, (name, convert) in _LOSS_SCALE_KEYS.items() if key in in_file
    }
    notes = []
    for name, value in changes.items():
        before = flags.get(f"precision.{name}", getattr(PrecisionConfig, name))
        if name == "loss_scale":
            before = before or None  # 0 stands for a dynamic scale
        flags[f"precision.{name}"] = value
        if before != value:
            notes.append(
                f"the DeepSpeed config sets the loss scale: {_describe_loss_scale(name, value)} from the "
                f"file overrides {_describe_loss_scale(name, before)} from --{name.replace('_', '-')}"
            )
    return notes


def _describe_loss_scale(name: str, value: float | None) -> str:
    if name == "loss_scale":
        return "a dynamic scale" if value is None else f"a static scale of {value:g}"
    return f"{name} {value:g}"


def _passed_through(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in _PASSED_THROUGH if not _unset(settings.get(key))}


def read_curriculum(section: Mapping[str, Any]) -> LengthCurriculum | None:
    """Returns the curriculum of a JSON section, or None if the curriculum is off. Raises ConfigError for
    invalid settings."""
    if section.get("enabled") is not True:
        return None
    for key in ("curriculum_type", "schedule_type", "schedule_config", "min_difficulty", "max_difficulty"):
        if key not in section:
            raise ConfigError(f"{SOURCE} has no {key}: add it to the file")
    kind, schedule, details = (section[k] for k in ("curriculum_type", "schedule_type", "schedule_config"))
    if kind != "seqlen":
        raise ConfigError(f"{SOURCE}.curriculum_type is {kind!r}: expected 'seqlen'")
    if schedule not in _CURRICULA:
        raise ConfigError(f"{SOURCE}.schedule_type is {schedule!r}: expected one of {', '.join(_CURRICULA)}")
    if not isinstance(details, Mapping):
        raise ConfigError(f"{SOURCE}.schedule_config is {details!r}: expected an object in braces")
    shortest, longest = (_number(section, key) for key in ("min_difficulty", "max_difficulty"))
    if shortest > longest:
        raise ConfigError(
            f"{SOURCE}: min_difficulty {shortest} is larger than max_difficulty {longest}: swap them"
        )
    if schedule == "fixed_discrete":
        return _with_bounded_steps(_discrete(details, shortest, longest))
    multiple = _number(details, "difficulty_step")
    if longest % multiple:
        raise ConfigError(
            f"{SOURCE}: max_difficulty {longest} is not a multiple of difficulty_step {multiple} and would "
            "never be reached: change one of them"
        )
    return _with_bounded_steps(
        LengthCurriculum(
            schedule,
            shortest,
            longest,
            total_steps=_number(details, "total_curriculum_step"),
            multiple=multiple,
            root_degree=_number(details, "root_degree") if schedule == "fixed_root" else 1,
        )
    )


def _with_bounded_steps(curriculum: LengthCurriculum) -> LengthCurriculum:
    if curriculum.steps > _MAX_CURRICULUM_STEPS:
        raise ConfigError(
            f"{SOURCE} reaches its final sequence length in step {curriculum.steps:,}: expected at most "
            f"{_MAX_CURRICULUM_STEPS:,}"
        )
    return curriculum


def _discrete(details: Mapping[str, Any], shortest: int, longest: int) -> LengthCurriculum:
    lengths, steps = (
        tuple(value) if isinstance(value, list) else ()
        for value in (details.get("difficulty"), details.get("max_step"))
    )
    fits = (
        0 < len(steps) == len(lengths) - 1
        and all(_is_count(number) for number in (*lengths, *steps))
        and list(lengths) == sorted(lengths)
        and list(steps) == sorted(steps)
        and shortest <= lengths[0]
        and lengths[-1] == longest
    )
    if not fits:
        raise ConfigError(
            f"{SOURCE}.schedule_config: fixed_discrete expects ascending integers, 'difficulty' from "
            f"min_difficulty {shortest} or more to max_difficulty {longest}, and 'max_step', one fewer"
        )
    return LengthCurriculum("fixed_discrete", shortest, longest, lengths=lengths, last_steps=steps)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _number(section: Mapping[str, Any], key: str) -> int:
    value = section.get(key)
    if not _is_count(value):
        raise ConfigError(f"{SOURCE}: {key} is {value!r}: expected a positive integer")
    return value
