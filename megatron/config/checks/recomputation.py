"""Checks of activation checkpointing."""

from __future__ import annotations

from megatron.config.config import Config
from megatron.config.errors import ConfigError


def check_recomputation(config: Config) -> None:
    """Raise ConfigError for activation-checkpointing flags that contradict each other or lack their base."""
    training = config.training
    if training.checkpoint_activations and training.recomputes_attention:
        raise ConfigError(
            "--checkpoint-activations with --recompute-granularity selective: the first recomputes whole "
            "layers, the second only attention; remove one of them"
        )
    if not training.recomputes_layers:
        settings = {
            f"--checkpoint-num-layers {training.checkpoint_num_layers}": training.checkpoint_num_layers != 1,
            "--partition-activations": training.partition_activations,
            "--checkpoint-in-cpu": training.checkpoint_in_cpu,
        }
        for option, given in settings.items():
            if given:
                raise ConfigError(
                    f"{option} without --checkpoint-activations: it applies to checkpointed activations "
                    "only; add the latter, or remove the former"
                )
    tensor = config.parallel.tensor_model_parallel_size
    elements = config.batch.micro_batch_size * config.model.seq_length * config.model.hidden_size
    if training.partition_activations and elements % tensor:
        raise ConfigError(
            f"--partition-activations: the {elements} elements of a layer's input (--micro-batch-size x "
            f"--seq-length x --hidden-size) are not divisible by --tensor-model-parallel-size {tensor}: "
            "change one of them"
        )
    if training.partition_activations and config.parallel.sequence_parallel:
        raise ConfigError(
            "--partition-activations with --sequence-parallel: activations are already sharded "
            "along the sequence, remove the former"
        )
