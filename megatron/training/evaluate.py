"""Mean loss over a range of samples that depends only on the iteration, so all layouts evaluate the same."""

from collections.abc import Callable

from megatron.config import Config
from megatron.data.loader import GPTBatchLoader
from megatron.engine.pipeline_engine import GPTEngine
from megatron.model.distributed_inference import MICRO_BATCHES_PER_STAGE


def evaluate(
    engine: GPTEngine,
    loader: GPTBatchLoader,
    config: Config,
    first_sample: int,
    *,
    stop_requested: Callable[[], bool],
    heartbeat: Callable[[], None],
) -> float | None:
    """Mean loss over `--eval-iters` global batches that start at `first_sample`; None if it was stopped.
    Collective.

    stop_requested: asked between groups of micro-batches; collective, the same on all ranks. heartbeat:
    called for every micro-batch.
    """
    batch = config.batch
    samples = config.training.eval_iters * batch.global_batch_size
    num_micro_batches = samples // (batch.micro_batch_size * config.parallel.data_parallel_size)
    micro_batches = loader.micro_batches(first_sample, samples)
    # The same groups on every rank and in every run of a layout, so that the rounding of the mean is the
    # same.
    group = MICRO_BATCHES_PER_STAGE * config.parallel.num_stages
    total = 0.0
    for start in range(0, num_micro_batches, group):
        if start and stop_requested():
            return None
        count = min(group, num_micro_batches - start)
        total += count * engine.evaluate(micro_batches, count, heartbeat=heartbeat).item()
    return total / num_micro_batches


def validation_start(config: Config, iteration: int) -> int:
    """First validation sample of the evaluation at `iteration`. Evaluations use consecutive samples."""
    training = config.training
    evaluations_before = max(-(-iteration // training.eval_interval) - 1, 0)
    return evaluations_before * training.eval_iters * config.batch.global_batch_size
