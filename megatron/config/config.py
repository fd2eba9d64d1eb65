"""The configuration of a run: one frozen section per concern."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from megatron.config.fields import changes_model
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

# Former names, which run.json of older checkpoints contains.
RENAMED_SECTIONS = {"trouble": "stability"}
RENAMED_FIELDS = {"checkpoint.allow_drift": "allow_replica_mismatch"}
_MIN_TOKENS_PER_RANK = 8192
"""Fewest tokens of a sequence on a context-parallel rank that a search or an advice proposes: the activations
of shorter sequences fit."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run. `with_settings` makes a variant."""

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
    """From --deepspeed_config, not from a flag."""

    def __post_init__(self) -> None:
        if self.batch.global_batch_size is None:
            size = self.batch.micro_batch_size * max(self.parallel.data_parallel_size, 1)
            batch = dataclasses.replace(self.batch, global_batch_size=size)
            object.__setattr__(self, "batch", batch)

    def with_settings(self, settings: Mapping[str, Any]) -> Config:
        """Returns a copy with other values, by 'section.field'. It is not validated: see `validate`."""
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
        """Tokens of each sequence on a rank: --seq-length / CP."""
        return self.model.seq_length // self.parallel.context_parallel_size

    def is_long_enough_for(self, context_size: int) -> bool:
        """Returns whether a search or an advice proposes this context-parallel size."""
        return self.model.seq_length // context_size >= _MIN_TOKENS_PER_RANK

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches per step on each data-parallel replica, at the full batch size."""
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
        """Returns field name -> value of all settings that change the model (`changes_model` in their flags),
        without those that have no effect with the chosen variants."""
        unused = self.model.unused_fields()
        return {
            field.name: getattr(getattr(self, section), field.name)
            for section, kind in SECTIONS.items()
            for field in dataclasses.fields(kind)
            if changes_model(kind, field) and not (section == "model" and field.name in unused)
        }

    @classmethod
    def from_dict(cls, settings: Mapping[str, Mapping[str, Any]]) -> Config:
        """Returns the inverse of `to_dict`. Missing fields have their defaults; former names are understood.

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


def _section_from_dict(section: str, kind: type[Any], settings: Mapping[str, Any]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    settings = {RENAMED_FIELDS.get(f"{section}.{name}", name): value for name, value in settings.items()}
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
