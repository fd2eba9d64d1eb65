"""The configuration of a run: one frozen section for each topic."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

from megatron.config.fields import Flag, flag_of, option_name
from megatron.config.sections.batch import BatchConfig
from megatron.config.sections.checkpoint import CheckpointConfig
from megatron.config.sections.curriculum import LengthCurriculum
from megatron.config.sections.data import DataConfig
from megatron.config.sections.logging import LoggingConfig
from megatron.config.sections.model import ModelConfig
from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.parallel import ParallelConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.config.sections.schedule import ScheduleConfig
from megatron.config.sections.stability import StabilityConfig
from megatron.config.sections.training import TrainingConfig
from megatron.errors import ConfigError

# Former names of sections and fields, which run.json of older checkpoints contains -> their names.
RENAMED_SECTIONS = {"trouble": "stability"}
RENAMED_FIELDS = {"checkpoint.allow_drift": "allow_replica_mismatch"}
REMOVED_FIELDS = {"training.simulate"}
_MIN_TOKENS_PER_RANK = 8192
"""Minimum number of tokens of a sequence on a context-parallel rank with which a search or a hint proposes
context parallelism. Shorter sequences do not need it, because their activations fit."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run. `with_settings` returns a variant."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    curriculum: LengthCurriculum | None = None
    """The curriculum in the file of --deepspeed_config; it has no flag."""

    def __post_init__(self) -> None:
        if self.batch.global_batch_size is None:
            size = self.batch.micro_batch_size * max(self.parallel.data_parallel_size, 1)
            batch = dataclasses.replace(self.batch, global_batch_size=size)
            object.__setattr__(self, "batch", batch)

    def value(self, setting: str) -> Any:
        """Returns the value of a 'section.field'."""
        section, _, name = setting.partition(".")
        return getattr(getattr(self, section), name)

    def with_settings(self, settings: Mapping[str, Any]) -> Config:
        """Returns a copy with new values. settings: 'section.field' -> value. The copy is not checked by
        `arguments.checks.validate`."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            section, _, field_name = name.partition(".")
            sections.setdefault(section, {})[field_name] = value
        return dataclasses.replace(
            self,
            **{name: dataclasses.replace(getattr(self, name), **values) for name, values in sections.items()},
        )

    def seq_length_at(self, iteration: int) -> int:
        """Returns the tokens per sample in iteration `iteration`, counted from 1. Evaluations use
        --seq-length."""
        return self.model.seq_length if self.curriculum is None else self.curriculum.length_at(iteration)

    @property
    def seq_length_per_rank(self) -> int:
        """Returns the number of tokens that each sequence has on a rank: --seq-length / CP."""
        return self.model.seq_length // self.parallel.context_parallel_size

    def is_long_enough_for(self, context_size: int) -> bool:
        """Returns whether sequences are long enough that a search or a hint proposes this context-parallel
        size."""
        return self.model.seq_length // context_size >= _MIN_TOKENS_PER_RANK

    @property
    def micro_batches_per_step(self) -> int:
        """Returns the micro-batches per step on each data-parallel replica, at the full batch size."""
        batch = self.batch
        return batch.global_batch_size // (batch.micro_batch_size * self.parallel.data_parallel_size)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns section name -> field name -> value, in JSON types (tuples become lists)."""
        sections = {
            section: {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in dataclasses.asdict(getattr(self, section)).items()
            }
            for section in SECTIONS
        }
        if self.curriculum is not None:
            sections["curriculum"] = dataclasses.asdict(self.curriculum)
        return sections

    def model_settings(self) -> dict[str, Any]:
        """Returns field name -> value of all settings that change the model (`changes_model` in their flags).
        Settings that have no effect with the chosen variants are left out."""
        unused = self.model.unused_fields()
        return {
            setting.field: self.value(name)
            for name, setting in SETTINGS.items()
            if setting.changes_model and not (setting.section == "model" and setting.field in unused)
        }

    @classmethod
    def from_dict(cls, settings: Mapping[str, Mapping[str, Any]]) -> Config:
        """Returns the configuration of a dictionary that `to_dict` returned. Missing fields get their
        defaults, and former names are accepted.

        Raises ConfigError for an unknown section or field, and for a missing field without a default.
        """
        settings = {RENAMED_SECTIONS.get(name, name): section for name, section in settings.items()}
        curriculum = settings.pop("curriculum", None)
        for section in settings:
            if section not in SECTIONS:
                raise ConfigError(
                    f"unknown config section '{section}': expected one of {', '.join(SECTIONS)}"
                )
        sections = {
            section: _section_from_dict(section, kind, settings.get(section, {}))
            for section, kind in SECTIONS.items()
        }
        return cls(**sections, curriculum=LengthCurriculum(**curriculum) if curriculum else None)


SECTIONS: dict[str, type[Any]] = {
    name: kind for name, kind in get_type_hints(Config).items() if name != "curriculum"
}


@dataclass(frozen=True)
class Setting:
    """A flag and its place in the configuration."""

    section: str
    field: str
    flag: Flag
    group: str
    """Title of the flag's group in --help."""
    type: Any
    default: Any
    """The default of the field: None if it is derived from other fields, `dataclasses.MISSING` if the flag is
    required."""
    changes_model: bool

    @property
    def name(self) -> str:
        """Returns 'section.field'."""
        return f"{self.section}.{self.field}"

    @property
    def option(self) -> str:
        """Returns the flag's name."""
        return option_name(self.field)

    @property
    def options(self) -> tuple[str, ...]:
        """Returns all names of the flag."""
        return (self.option, *self.flag.aliases)

    @property
    def is_required(self) -> bool:
        """Returns whether the flag has no default."""
        return self.default is dataclasses.MISSING

    def has_type(self, value: Any) -> bool:
        """Returns whether a value from a file has the field's type, such as `int | None`."""
        is_union = isinstance(self.type, types.UnionType)
        kinds = [get_origin(kind) or kind for kind in (get_args(self.type) if is_union else (self.type,))]
        return type(value) in kinds or (type(value) is int and float in kinds)

    @property
    def kind(self) -> type[Any]:
        """Returns the type of a single value: int for `int | None` and for `tuple[int, int, int] | None`."""
        kind = self.type
        while parts := [part for part in get_args(kind) if part not in (type(None), Ellipsis)]:
            kind = parts[0]
        return kind


def _settings() -> Iterator[Setting]:
    for section, kind in SECTIONS.items():
        types = get_type_hints(kind)
        for entry in dataclasses.fields(kind):
            flag, name = flag_of(entry), entry.name
            owner: Any = next(base for base in kind.__mro__ if name in inspect.get_annotations(base))
            changes = kind.changes_model if flag.changes_model is None else flag.changes_model
            yield Setting(section, name, flag, flag.group or owner.group, types[name], entry.default, changes)


SETTINGS = {setting.name: setting for setting in _settings()}
"""All flags: 'section.field' -> setting."""
OPTIONS = {option: name for name, setting in SETTINGS.items() for option in setting.options}
"""All names of all flags -> 'section.field'."""


def settings_of_section(section: str) -> list[Setting]:
    """Returns the settings of a section."""
    return [setting for setting in SETTINGS.values() if setting.section == section]


def _section_from_dict(section: str, kind: type[Any], settings: Mapping[str, Any]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    settings = {
        RENAMED_FIELDS.get(f"{section}.{name}", name): value
        for name, value in settings.items()
        if f"{section}.{name}" not in REMOVED_FIELDS
    }
    for name in settings:
        if name not in fields:
            raise ConfigError(
                f"unknown setting '{section}.{name}': it was written by another version of this program"
            )
    for name, description in fields.items():
        if description.default is dataclasses.MISSING and name not in settings:
            raise ConfigError(f"'{section}.{name}' is missing and has no default")
    return kind(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    )
