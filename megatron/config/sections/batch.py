"""Batch sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.fields import COMMON_FLAGS, Section, flag


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Section):
    """The batch sizes. `megatron.optimizer.batch_schedule` computes steps and samples from them."""

    group: ClassVar[str] = "training"

    micro_batch_size: int = flag(
        at_least=1,
        at_most=1_000_000,
        help="samples per micro-batch on each data-parallel replica",
        group=COMMON_FLAGS,
    )
    global_batch_size: int = flag(
        derived="micro-batch size x data-parallel size",
        at_least=1,
        help="samples per optimizer step: micro-batch size x gradient accumulation steps x data-parallel "
        "size",
        group=COMMON_FLAGS,
    )
    rampup_batch_size: tuple[int, int, int] | None = flag(
        None,
        nargs=3,
        at_least=1,
        metavar=("START", "INCREMENT", "SAMPLES"),
        help="batch-size ramp-up: start with batches of START samples and add INCREMENT samples at regular "
        "intervals, so that --global-batch-size is reached after SAMPLES samples (default: all batches have "
        "--global-batch-size)",
    )
