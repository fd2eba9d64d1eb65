"""Checks of the sequence-length curriculum of a DeepSpeed JSON."""

from __future__ import annotations

from megatron.config.errors import ConfigError
from megatron.config.parsing.curriculum import SOURCE, LengthCurriculum
from megatron.config.sections.model import ModelConfig
from megatron.config.sections.parallel import ParallelConfig
from megatron.config.sections.training import TrainingConfig


def check_curriculum(
    curriculum: LengthCurriculum, model: ModelConfig, parallel: ParallelConfig, training: TrainingConfig
) -> None:
    """Raise ConfigError for sequence lengths that the run does not support."""
    if curriculum.max_length > model.seq_length:
        raise ConfigError(
            f"{SOURCE} reaches {curriculum.max_length} tokens, --seq-length is {model.seq_length}: reduce "
            "its max_difficulty, or increase the latter"
        )
    tensor = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and (odd := [n for n in curriculum.all_lengths() if n % tensor]):
        raise ConfigError(
            f"{SOURCE} has sequences of {odd[0]} tokens, which with --sequence-parallel must be "
            f"divisible by --tensor-model-parallel-size {tensor}: choose multiples of it (difficulty_step)"
        )
    if training.compile:
        raise ConfigError(
            "--compile with a curriculum of sequence lengths: layers would be recompiled for each length, "
            "remove the flag until the curriculum is complete"
        )
