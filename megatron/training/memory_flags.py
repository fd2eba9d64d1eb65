"""The flags that reduce the memory of a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.config import Config
from megatron.config.checks.validate import validate
from megatron.config.parsing.partition_method import parse_partition_method
from megatron.errors import UserError
from megatron.model.attention_choice import Implementation, attention_of


def memory_flags(config: Config) -> Iterator[tuple[str, Config]]:
    """(flag and value, the configuration with it) of each flag that may reduce the memory and that the other
    flags allow. The model and the global batches stay.

    In the order in which to try them: activations, optimizer state, fewer data-parallel replicas.
    """
    for flag, settings in _candidates(config):
        changed = config.with_settings(settings)
        try:
            validate(changed)
        except UserError:
            continue
        yield flag, changed


def _candidates(config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """(flag and value, 'section.field' -> value)."""
    parallel, training, micro_batch = config.parallel, config.training, config.batch.micro_batch_size
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if tensor > 1 and not parallel.sequence_parallel:
        yield "--sequence-parallel", {"parallel.sequence_parallel": True}
    if micro_batch > 1:
        yield f"--micro-batch-size {micro_batch // 2}", {"batch.micro_batch_size": micro_batch // 2}
    if not training.recomputes_layers:
        stores_scores = attention_of(config) == Implementation.UNFUSED
        if stores_scores and not training.recomputes_attention:
            yield "--recompute-granularity selective", {"training.recompute_granularity": "selective"}
        yield "--checkpoint-activations", {"training.checkpoint_activations": True}
    if parallel.data_parallel_size > 1:
        for stage in range(parallel.zero_stage + 1, 4 if pipeline == 1 else 2):
            yield f"--zero-stage {stage}", {"parallel.zero_stage": stage}
    if not parallel.cpu_offload:
        # Without the norm after the embedding, a published run with 8-bit moments stagnated.
        if config.model.embed_layernorm and not config.optimizer.use_bnb_optimizer:
            yield "--use-bnb-optimizer", {"optimizer.use_bnb_optimizer": True}
        yield "--cpu-offload", {"parallel.cpu_offload": True}
    yield (
        f"--tensor-model-parallel-size {2 * tensor}",
        {"parallel.tensor_model_parallel_size": 2 * tensor},
    )
    if not parse_partition_method(parallel.partition_method).stages:
        yield (
            f"--pipeline-model-parallel-size {2 * pipeline}",
            {"parallel.pipeline_model_parallel_size": 2 * pipeline},
        )
