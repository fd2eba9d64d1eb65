"""A checkpoint's weights on several ranks, for an evaluation without training."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.lineage.start import first_problem_of_ranks
from megatron.checkpoint.record import Checkpoint
from megatron.cluster.exit_codes import SharedUserError
from megatron.config import Config, ParallelConfig
from megatron.config.checks.model import check_model
from megatron.config.checks.parallel import check_layout
from megatron.errors import UserError
from megatron.model.distributed_inference import DistributedGPT
from megatron.model.pipeline_module import GPTModelPipe
from megatron.mpu.layout import ParallelLayout, TPGroup
from megatron.mpu.parameters import spec_of
from megatron.pipeline.stages import plan_stages

# Settings that make a training step smaller or faster.
_FOR_TRAINING = {
    "training.compile": False,
    "training.checkpoint_activations": False,
    "training.recompute_granularity": None,
    "training.partition_activations": False,
    "training.checkpoint_in_cpu": False,
    "optimizer.use_apex": False,
}


def config_of_layout(checkpoint: Checkpoint, tp_size: int, pp_size: int, world_size: int) -> Config:
    """The checkpoint's model on another layout. UserError if the layout does not fit the model."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=pp_size, world_size=world_size
    )
    config = replace(checkpoint.config, parallel=parallel).with_settings(_FOR_TRAINING)
    check_layout(config)
    check_model(config)
    plan_stages(config, checkpoint.vocab_size)
    return config


@torch.no_grad()
def load_distributed_model(
    checkpoint: Checkpoint, config: Config, rank: int, micro_batch_size: int
) -> DistributedGPT:
    """This rank's part of the model, in evaluation mode. Each rank reads its own shards. Collective.
    UserError on all ranks for files that one of them cannot read."""
    layout = ParallelLayout.from_config(config.parallel, rank)
    tp_group = layout.make_tp_group()
    bounds = plan_stages(config, checkpoint.vocab_size).bounds
    # The initial values are overwritten: zeros, which are quickly made.
    module = GPTModelPipe(
        config, layout, tp_group, checkpoint.vocab_size, checkpoint.eod, bounds, lambda *_: torch.zeros(())
    )
    problem = None
    try:
        _load_weights(module, checkpoint, tp_group)
    except UserError as error:
        problem = str(error)
    # The other ranks would wait for this one.
    if (found := first_problem_of_ranks(problem)) is not None:
        raise SharedUserError(found[1])
    return DistributedGPT(module.eval(), layout, tp_group, micro_batch_size)


def _load_weights(module: GPTModelPipe, checkpoint: Checkpoint, tp_group: TPGroup) -> None:
    reader = open_reader(checkpoint)
    for name, parameter in module.named_parameters():
        if name not in reader.stored_names:
            raise UserError(f"checkpoint {checkpoint.folder} holds no parameter {name}")
        shard = reader.read_shard(name, VALUES, spec_of(parameter), tp_group)
        parameter.copy_(shard.view_as(parameter))
