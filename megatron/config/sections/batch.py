"""The sizes of the batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.fields import Section, flag


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Section):
    """Sizes of the batches; megatron.config.batch does the arithmetic."""

    group: ClassVar[str] = "training"

    micro_batch_size: int = flag(at_least=1, help="samples that a model replica works on at once")
    global_batch_size: int = flag(
        at_least=1,
        help="samples per optimizer step, over all replicas: micro-batch x accumulation steps x replicas",
    )
    rampup_batch_size: tuple[int, int, int] | None = flag(
        None,
        nargs=3,
        at_least=1,
        metavar=("START", "INCREMENT", "SAMPLES"),
        help="begin with batches of START samples, and add INCREMENT at equal distances, until "
        "--global-batch-size is reached after SAMPLES samples",
    )
