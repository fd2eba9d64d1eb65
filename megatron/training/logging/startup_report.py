"""What a run tells once, after its first steps: how moments are kept, and the memory of each stage."""

from collections.abc import Iterator

from megatron.config import Config
from megatron.mpu.layout import ParallelLayout
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.training.logging.moments import describe_moments
from megatron.training.logging.peak_memory import memory_table

# The optimizer's state is made by the first step, and lies beside the activations of the second.
_STEPS_BEFORE_MEMORY = 2


class StartupReport:
    """Counts the steps that this process takes, resumed or not."""

    def __init__(self, config: Config, layout: ParallelLayout) -> None:
        self.layout = layout
        parallel = config.parallel
        self._stages_per_rank = parallel.num_stages // parallel.pipeline_model_parallel_size
        self._moments_pending = config.optimizer.use_bnb_optimizer
        self._steps_until_memory = _STEPS_BEFORE_MEMORY

    def lines(self, optimizer: MixedPrecisionOptimizer, is_last: bool) -> Iterator[str]:
        """To be printed after a step, on all ranks. Collective; `is_last`: the run's last step."""
        if self._moments_pending and not optimizer.skipped:
            self._moments_pending = False
            yield describe_moments(optimizer)
        if self._steps_until_memory > 0:
            self._steps_until_memory = 0 if is_last else self._steps_until_memory - 1
            if self._steps_until_memory == 0:
                yield memory_table(self.layout, self._stages_per_rank)
