"""The padded vocabulary size."""

from __future__ import annotations

from megatron.config.sections.model import ModelConfig
from megatron.errors import ConfigError


def padded_vocab_size(true_size: int, model: ModelConfig, tensor_parallel: int) -> int:
    """Number of rows of the word embeddings over all tensor-parallel ranks, padding included.

    A multiple of make_vocab_size_divisible_by x tensor_parallel, or pad_vocab_size_to if that is set.
    ConfigError if pad_vocab_size_to is smaller than true_size or not divisible by tensor_parallel.
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
    """Raise ConfigError for a padded vocabulary that is not divisible by the tensor-parallel size."""
    if padded % tensor_parallel:
        raise ConfigError(
            f"--pad-vocab-size-to {padded} is not divisible by --tensor-model-parallel-size "
            f"{tensor_parallel}: set it to {-(-padded // tensor_parallel) * tensor_parallel}, or change the "
            "tensor-parallel size"
        )
