"""The size that the embedding table really has."""

from __future__ import annotations

from megatron.config.errors import ConfigError
from megatron.config.sections.model import ModelConfig


def padded_vocab_size(true_size: int, model: ModelConfig, tensor_parallel: int) -> int:
    """Rows of the embedding table, padding included, over all tensor ranks.

    A multiple of make_vocab_size_divisible_by x tensor_parallel, or exactly pad_vocab_size_to where that is
    set; then it must hold the true size and be divisible by tensor_parallel, else ConfigError.
    """
    padded = model.pad_vocab_size_to
    if padded is None:
        multiple = model.make_vocab_size_divisible_by * tensor_parallel
        return -(-true_size // multiple) * multiple
    if padded < true_size:
        raise ConfigError(
            f"--pad-vocab-size-to {padded} is smaller than the vocabulary of {true_size} tokens: "
            f"give at least {true_size}"
        )
    check_vocab_divides(padded, tensor_parallel)
    return padded


def check_vocab_divides(padded: int, tensor_parallel: int) -> None:
    """Raise ConfigError where tensor ranks could not hold equal parts of the padded vocabulary."""
    if padded % tensor_parallel:
        raise ConfigError(
            f"--pad-vocab-size-to {padded} is not divisible by --tensor-model-parallel-size "
            f"{tensor_parallel}: give {-(-padded // tensor_parallel) * tensor_parallel}, or change the "
            "tensor-parallel size"
        )
