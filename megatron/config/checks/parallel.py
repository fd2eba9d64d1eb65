"""Checks of the parallel layout and of the pipeline."""

from __future__ import annotations

from megatron.config.config import Config
from megatron.config.parsing.partition_method import parse_partition_method
from megatron.config.sections.parallel import ParallelConfig
from megatron.errors import ConfigError

_MOST_STAGES = 200_000


def check_layout(config: Config) -> None:
    """Raise ConfigError for sizes that the degrees do not divide, and for ZeRO stages that do not combine."""
    parallel = config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if parallel.world_size % (tensor * pipeline):
        raise ConfigError(
            f"{parallel.world_size} processes are not divisible by --tensor-model-parallel-size {tensor} x "
            f"--pipeline-model-parallel-size {pipeline} = {tensor * pipeline}: start a multiple of that "
            "(--world-size with --dry-run), or change one of the two"
        )
    if parallel.sequence_parallel and config.model.seq_length % tensor:
        raise ConfigError(
            f"--sequence-parallel: --seq-length {config.model.seq_length} is not divisible by "
            f"--tensor-model-parallel-size {tensor}: change one of them"
        )
    if parallel.tp_comm_overlap and parallel.schedule.splits_backward:
        raise ConfigError(
            f"--tp-comm-overlap with --pipeline-schedule {parallel.pipeline_schedule}: the gradients "
            "of weights have passes of their own, which do not divide the sequence; remove one of the two"
        )
    elements = config.batch.micro_batch_size * config.model.seq_length * config.model.hidden_size
    if config.training.partition_activations and elements % tensor:
        raise ConfigError(
            f"--partition-activations: the {elements} elements of a layer's input (--micro-batch-size x "
            f"--seq-length x --hidden-size) are not divisible by --tensor-model-parallel-size {tensor}: "
            "change one of them"
        )
    if parallel.zero_stage >= 2 and pipeline > 1:
        raise ConfigError(
            f"--zero-stage {parallel.zero_stage} with --pipeline-model-parallel-size {pipeline}: pipeline "
            "parallelism accumulates gradients over micro-batches and cannot shard them, use --zero-stage 1"
        )


def check_pipeline(config: Config) -> None:
    """Raise ConfigError for partition methods and pipeline schedules that cannot be run."""
    parallel = config.parallel
    method = parse_partition_method(parallel.partition_method)
    if parallel.partition_profile is not None and method.kind != "profile":
        raise ConfigError(
            f"--partition-profile {parallel.partition_profile} with --partition-method {method.text}: only "
            "the method profile uses it, change the method or remove the file"
        )
    _check_stages_per_rank(parallel)


def _check_stages_per_rank(parallel: ParallelConfig) -> None:
    virtual, name = parallel.virtual_pipeline_stages, parallel.pipeline_schedule
    if parallel.num_stages > _MOST_STAGES:
        raise ConfigError(
            f"--virtual-pipeline-stages {virtual} x --pipeline-model-parallel-size "
            f"{parallel.pipeline_model_parallel_size} are {parallel.num_stages:,} stages: expected at most "
            f"{_MOST_STAGES:,}, reduce one of the two"
        )
    if virtual > 1 and parallel.schedule.stages_per_rank > 0:
        raise ConfigError(
            f"--virtual-pipeline-stages {virtual} with --pipeline-schedule {name}, which has "
            f"{parallel.stages_per_rank} per rank: remove it, or use the schedule interleaved"
        )
    if virtual == 1 and parallel.schedule.stages_per_rank == 0:
        raise ConfigError(
            f"--pipeline-schedule {name} with --virtual-pipeline-stages 1: expected 2 or more stages per "
            "pipeline rank, or the schedule 1f1b"
        )
    if name != "1f1b" and parallel.pipeline_model_parallel_size == 1:
        given = f"--virtual-pipeline-stages {virtual}" if virtual > 1 else f"--pipeline-schedule {name}"
        raise ConfigError(
            f"{given} with --pipeline-model-parallel-size 1: expected 2 or more, or the schedule 1f1b "
            "with one stage per rank"
        )
