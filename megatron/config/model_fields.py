"""What the fields of `ModelConfig` say about themselves, for logs and for Megatron's checkpoints."""

from __future__ import annotations

import dataclasses

from megatron.config.fields import flag_of
from megatron.config.sections.model import ModelConfig

MEGATRON_MODEL_ARGS = tuple(
    field.name for field in dataclasses.fields(ModelConfig) if flag_of(field).megatron_arg
)
"""Fields that Megatron's checkpoints have in their `args` under the same name."""


def model_summary(model: ModelConfig) -> str:
    """Sizes and variants of the model in one line, for logs and reports."""
    variants = [
        summary.format(value)
        for field in dataclasses.fields(ModelConfig)
        if (summary := flag_of(field).summary) and (value := getattr(model, field.name)) != field.default
    ]
    return (
        f"{model.num_layers} layers x {model.hidden_size} hidden, {model.num_attention_heads} heads, "
        + ", ".join([f"sequence {model.seq_length}", f"{model.position_embedding_type} positions", *variants])
    )
