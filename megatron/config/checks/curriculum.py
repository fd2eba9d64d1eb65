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
    """Raise ConfigError for lengths that the run cannot have."""
    if curriculum.max_length > model.seq_length:
        raise ConfigError(
            f"{SOURCE} goes to {curriculum.max_length} tokens, and --seq-length is {model.seq_length}: lower "
            "its max_difficulty, or raise the latter"
        )
    tensor = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and (odd := [n for n in curriculum.all_lengths() if n % tensor]):
        raise ConfigError(
            f"{SOURCE} has sequences of {odd[0]} tokens, which --sequence-parallel cannot cut over "
            f"--tensor-model-parallel-size {tensor}: choose multiples of it (difficulty_step)"
        )
    if training.compile:
        raise ConfigError(
            "--compile with a curriculum of sequence lengths: layers would be compiled anew for each length, "
            "drop the flag until the sequences have grown"
        )
