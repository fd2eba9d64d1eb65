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
            "layers, the second attention only; drop one of them"
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
                    f"{option} without --checkpoint-activations: no layer's input is kept to be recomputed "
                    "from; add the latter, or drop the former"
                )
    tensor = config.parallel.tensor_model_parallel_size
    elements = config.batch.micro_batch_size * config.model.seq_length * config.model.hidden_size
    if training.partition_activations and elements % tensor:
        raise ConfigError(
            f"--partition-activations cuts a layer's input of {elements} elements (--micro-batch-size x "
            f"--seq-length x --hidden-size) into --tensor-model-parallel-size {tensor} equal parts, which do "
            "not divide it: change one of them"
        )
    if training.partition_activations and config.parallel.sequence_parallel:
        raise ConfigError(
            "--partition-activations with --sequence-parallel: of a cut sequence each process has its own "
            "part already, drop the former"
        )
