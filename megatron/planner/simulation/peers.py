"""The shapes that a stage's neighbours announce, derived from the plan of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, pairwise

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from megatron.config import Config
from megatron.mpu.layout import ParallelLayout
from megatron.planner.simulation.costs import Spec

_MESSAGE_ELEMENTS = 256
"""Length of DeepSpeed's message with shapes (TENSOR_META_SIZE)."""


class Neighbours:
    """Fills the messages with shapes that a rank receives."""

    def __init__(
        self, config: Config, layout: ParallelLayout, inputs_of_stages: Sequence[tuple[Spec, ...]]
    ) -> None:
        """inputs_of_stages: what each stage but the first one receives."""
        self._layout = layout
        holders = config.parallel.rank_of_stage
        received: dict[int, list[tuple[Spec, ...]]] = {}
        for stage, (source, holder) in enumerate(pairwise(holders), start=1):
            if holder == layout.pipeline_stage != source:
                received.setdefault(source, []).append(inputs_of_stages[stage - 1])
        # The shapes of each stage's input come in the order of the rank's stages, and may come again.
        self._inputs = {source: cycle(specs) for source, specs in received.items()}
        self._parts = layout.tp_size if config.parallel.sends_parts else 1

    def fill(self, values: Tensor, source: int) -> None:
        """See `device.Peers`."""
        other = source // (self._layout.tp_size * self._layout.dp_size)
        if values.dtype == torch.int32 and values.numel() == _MESSAGE_ELEMENTS:
            message = self._shape_message(next(self._inputs[other]))
            values[: len(message)] = torch.tensor(message, dtype=torch.int32)

    def _shape_message(self, specs: Sequence[Spec]) -> list[int]:
        """In the format of `PipelineEngine._send_tensor_meta`."""
        ((*shape, hidden), dtype), *others = specs
        described = [
            number
            for shape, dtype in [((*shape, hidden // self._parts), dtype), *others]
            for number in (PipelineEngine.DTYPE_TO_ID[dtype], len(shape), *shape)
        ]
        return [2, len(specs), *described]
