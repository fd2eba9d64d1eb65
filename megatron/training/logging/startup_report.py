"""Printed once after the first steps: the bits of the moments, and the memory of each stage."""

from collections.abc import Iterator

from megatron.config import Config
from megatron.mpu.layout import ParallelLayout
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.training.logging.moments import describe_moments
from megatron.training.logging.peak_memory import memory_table

# The first step creates the optimizer's state, so the second step has the peak memory.
_STEPS_BEFORE_MEMORY = 2


class StartupReport:
    """Counts the steps since the start of this process, resumed or not."""

    def __init__(self, config: Config, layout: ParallelLayout) -> None:
        self.layout = layout
        parallel = config.parallel
        self._stages_per_rank = parallel.stages_per_rank
        self._moments_pending = config.optimizer.use_bnb_optimizer
        self._steps_until_memory = _STEPS_BEFORE_MEMORY

    def lines(self, optimizer: MixedPrecisionOptimizer, is_last: bool) -> Iterator[str]:
        """The text to print after a step. Collective. is_last: whether this is the run's last step."""
        if self._moments_pending and not optimizer.skipped:
            self._moments_pending = False
            yield describe_moments(optimizer)
        if self._steps_until_memory > 0:
            self._steps_until_memory = 0 if is_last else self._steps_until_memory - 1
            if self._steps_until_memory == 0:
                yield memory_table(self.layout, self._stages_per_rank)
