"""Checks of the model's sizes against the layout and other settings."""

from __future__ import annotations

from megatron.config.config import Config
from megatron.config.errors import ConfigError
from megatron.config.fields import option_name
from megatron.config.vocab import check_vocab_divides, padded_vocab_size


def check_model(config: Config) -> None:
    """Raise ConfigError for sizes that do not fit each other or the tensor-parallel size."""
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    if config.training.z_loss_weight and config.training.loss_implementation == "plain":
        raise ConfigError(
            f"--z-loss-weight {config.training.z_loss_weight:g} with --loss-implementation plain: only the "
            "fused loss supports it, remove one of the two"
        )
    for name in ("num_attention_heads", "ffn_hidden_size"):
        size = getattr(model, name)
        if size % tensor:
            raise ConfigError(
                f"{option_name(name)} {size} is not divisible by --tensor-model-parallel-size {tensor}: "
                "change one of them"
            )
    if model.mup and config.optimizer.optimizer == "sgd":
        raise ConfigError(
            "--mup with --optimizer sgd: muP's learning rates hold for Adam, use --optimizer adam or remove "
            "--mup"
        )
    if model.pad_vocab_size_to is not None:
        check_vocab_divides(model.pad_vocab_size_to, tensor)
    if model.vocab_size is not None:
        padded_vocab_size(model.vocab_size, model, tensor)
    if model.seq_length > model.max_position_embeddings:
        raise ConfigError(
            f"--seq-length {model.seq_length} is larger than --max-position-embeddings "
            f"{model.max_position_embeddings}: increase the latter, or reduce the sequence length"
        )
    if model.position_embedding_type == "rotary" and model.kv_channels % 2:
        raise ConfigError(
            f"--position-embedding-type rotary needs an even head dimension, it is {model.kv_channels}: "
            "change --kv-channels (default: hidden size / heads)"
        )
    if model.position_embedding_type == "alibi" and config.data.reset_position_ids:
        raise ConfigError(
            "--reset-position-ids has no effect with --position-embedding-type alibi, whose positions are "
            "relative: remove it (--reset-attention-mask separates documents)"
        )
