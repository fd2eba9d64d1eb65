"""Mean loss over a part of a split that depends on the iteration only, so every layout evaluates the same."""

import torch

from megatron.config import Config
from megatron.data.loader import GPTBatchLoader
from megatron.engine.pipeline_engine import GPTEngine


def evaluate(engine: GPTEngine, loader: GPTBatchLoader, config: Config, first_sample: int) -> torch.Tensor:
    """Loss, a device scalar, over `--eval-iters` global batches that start at `first_sample`. Collective."""
    batch = config.batch
    samples = config.training.eval_iters * batch.global_batch_size
    micro_batches = samples // (batch.micro_batch_size * config.parallel.data_parallel_size)
    return engine.evaluate(loader.micro_batches(first_sample, samples), micro_batches)


def validation_start(config: Config, iteration: int) -> int:
    """First validation sample of the evaluation at `iteration`: each goes on where the one before ended."""
    training = config.training
    evaluations_before = max(-(-iteration // training.eval_interval) - 1, 0)
    return evaluations_before * training.eval_iters * config.batch.global_batch_size
