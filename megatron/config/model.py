"""The model in one line, its padded vocabulary, and checks of its sizes against the layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron.config.config import Config
from megatron.config.fields import flag_of, option_name, value_text
from megatron.config.sections.model import ModelConfig
from megatron.config.window_pattern import WINDOW
from megatron.errors import ConfigError


def model_summary(model: ModelConfig) -> str:
    """Returns sizes and variants of the model in one line, for logs and reports."""
    variants = [
        summary.format(value_text(value) if isinstance(value, tuple) else value)
        for field in dataclasses.fields(ModelConfig)
        if (summary := flag_of(field).summary) and (value := getattr(model, field.name)) != field.default
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


def model_mistakes(config: Config) -> Iterator[str]:
    """Yields a sentence for sizes that do not fit each other or the tensor-parallel size."""
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    if problem := model.heads_problem(tensor):
        yield problem
    if model.ffn_hidden_size % tensor:
        yield (
            f"--ffn-hidden-size {model.ffn_hidden_size} is not divisible by --tensor-model-parallel-size "
            f"{tensor}: change one of them"
        )
    if model.qk_layernorm_scope == "projection" and model.normalization != "RMSNorm":
        yield (
            f"--qk-layernorm-scope projection with --normalization {model.normalization}: expected RMSNorm; "
            "change one of them"
        )
    if model.window_pattern is not None and len(model.window_pattern) == 1:
        which, flags = (
            ("all", "") if model.window_pattern == (WINDOW,) else ("none of the", " and --window-size")
        )
        yield (
            f"--window-pattern gives {which} {model.num_layers} layers the window of --window-size: expected "
            f"layers with and without it; remove --window-pattern{flags}, or change the pattern"
        )
    if model.seq_length > model.max_position_embeddings:
        yield (
            f"--seq-length {model.seq_length} is larger than --max-position-embeddings "
            f"{model.max_position_embeddings}: increase --max-position-embeddings, or reduce --seq-length"
        )
    if model.position_embedding_type == "rotary":
        yield from _rotary_mistakes(model)
    if model.position_embedding_type == "alibi" and config.data.reset_position_ids:
        yield (
            "--reset-position-ids has no effect with --position-embedding-type alibi, whose positions are "
            "relative: remove --reset-position-ids (--reset-attention-mask separates documents)"
        )
    if model.vocab_size is not None:
        padded_vocab_size(model.vocab_size, model, tensor)
    elif model.pad_vocab_size_to is not None:
        check_vocab_divides(model.pad_vocab_size_to, tensor)


def _rotary_mistakes(model: ModelConfig) -> Iterator[str]:
    if model.kv_channels % 2:
        yield (
            f"--position-embedding-type rotary needs an even head dimension, but it is {model.kv_channels}: "
            "change --kv-channels (default: hidden size / heads)"
        )
    elif model.rotary_dim % 2 or not model.rotary_dim:
        yield (
            f"--rotary-percent {model.rotary_percent:g} rotates {model.rotary_dim} of {model.kv_channels} "
            "elements of each head: expected an even number above 0; change --rotary-percent"
        )
    for low, high in (
        ("rope_low_freq_factor", "rope_high_freq_factor"),
        ("rope_beta_slow", "rope_beta_fast"),
    ):
        if getattr(model, low) >= getattr(model, high):
            yield (
                f"{option_name(low)} {getattr(model, low):g} is not below {option_name(high)} "
                f"{getattr(model, high):g}: change one of them"
            )
