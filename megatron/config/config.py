"""The whole config of a run: one frozen section per concern."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.errors import ConfigError
from megatron.config.parsing.curriculum import LengthCurriculum
from megatron.config.sections.batch import BatchConfig
from megatron.config.sections.checkpoint import CheckpointConfig
from megatron.config.sections.data import DataConfig
from megatron.config.sections.logging import LoggingConfig
from megatron.config.sections.model import ModelConfig
from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.parallel import ParallelConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.config.sections.schedule import ScheduleConfig
from megatron.config.sections.stability import TroubleConfig
from megatron.config.sections.training import TrainingConfig

SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "batch": BatchConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "trouble": TroubleConfig,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run was asked to do; dataclasses.replace makes a variant."""

    model: ModelConfig
    batch: BatchConfig
    schedule: ScheduleConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    trouble: TroubleConfig = field(default_factory=TroubleConfig)
    curriculum: LengthCurriculum | None = None
    """Not of the flags but of --deepspeed_config."""

    def seq_length_at(self, iteration: int) -> int:
        """Tokens per sample in step `iteration`, counted from 1; in evaluations it is --seq-length."""
        return self.model.seq_length if self.curriculum is None else self.curriculum.length_at(iteration)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Section name -> field name -> value, in types that JSON knows (tuples become lists)."""
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

    @classmethod
    def from_dict(cls, settings: Mapping[str, Mapping[str, Any]]) -> Config:
        """The config that `to_dict` was made from; what is missing takes its default.

        Raises ConfigError for a section or a field that does not exist, and for a missing one that has no
        default.
        """
        settings = dict(settings)
        curriculum = settings.pop("curriculum", None)
        for section in settings:
            if section not in SECTIONS:
                raise ConfigError(f"'{section}' is no section of the config: expected {', '.join(SECTIONS)}")
        sections = {
            section: _section_from_dict(section, kind, settings.get(section, {}))
            for section, kind in SECTIONS.items()
        }
        return cls(**sections, curriculum=LengthCurriculum(**curriculum) if curriculum else None)


def _section_from_dict(section: str, kind: type[Any], settings: Mapping[str, Any]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in settings:
        if name not in fields:
            raise ConfigError(
                f"'{section}.{name}' is no setting: it was written by another version of this program"
            )
    for name, description in fields.items():
        if description.default is dataclasses.MISSING and name not in settings:
            raise ConfigError(f"'{section}.{name}' is missing and has no default")
    return kind(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    )
