"""Describes the model in one line, and computes its padded vocabulary."""

from __future__ import annotations

from megatron.config.config import settings_of_section
from megatron.config.fields import value_text
from megatron.config.sections.model import ModelConfig
from megatron.errors import ConfigError


def model_summary(model: ModelConfig) -> str:
    """Returns sizes and variants of the model in one line, for logs and reports."""
    unused = model.unused_fields()
    variants = [
        summary.format(value_text(value) if isinstance(value, tuple) else value)
        for setting in settings_of_section("model")
        if (summary := setting.flag.summary) and setting.field not in unused
        if (value := getattr(model, setting.field)) != setting.default or setting.flag.summarizes_default
    ]
    return (
        f"{model.num_layers} layers x {model.hidden_size} hidden, {model.num_attention_heads} heads, "
        + ", ".join([f"sequence {model.seq_length}", f"{model.position_embedding_type} positions", *variants])
    )


def padded_vocab_size(true_size: int, model: ModelConfig, tensor_parallel: int) -> int:
    """Returns the number of rows of the word embeddings over all tensor-parallel ranks, with padding.

    It is a multiple of make_vocab_size_divisible_by x tensor_parallel, or pad_vocab_size_to if that is set.
    Raises ConfigError if pad_vocab_size_to is smaller than true_size or not divisible by tensor_parallel.
    """
    padded = model.pad_vocab_size_to
    if padded is None:
        multiple = model.make_vocab_size_divisible_by * tensor_parallel
        return -(-true_size // multiple) * multiple
    if padded < true_size:
        raise ConfigError(
            f"--pad-vocab-size-to {padded} is smaller than the vocabulary of {true_size} tokens: "
            f"set it to at least {true_size}"
        )
    check_vocab_divides(padded, tensor_parallel)
    return padded


def check_vocab_divides(padded: int, tensor_parallel: int) -> None:
    """Raises ConfigError for a padded vocabulary that is not divisible by the tensor-parallel size."""
    if padded % tensor_parallel:
        raise ConfigError(
            f"--pad-vocab-size-to {padded} is not divisible by --tensor-model-parallel-size "
            f"{tensor_parallel}: set it to {-(-padded // tensor_parallel) * tensor_parallel}, or change the "
            "tensor-parallel size"
        )
