"""What a stage receives from its neighbours, derived from the plan of the stages."""

from __future__ import annotations

from itertools import cycle, pairwise

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from megatron.config import Config
from megatron.engine.deepspeed_config import deepspeed_dict
from megatron.mpu.layout import ParallelLayout
from megatron.planner.timing.communication import Spec, tensors_at

_MESSAGE_ELEMENTS = 256
"""Length of DeepSpeed's message with shapes (TENSOR_META_SIZE)."""


class Neighbours:
    """Fills the integer messages that a rank receives: shapes, and tables of partitioned tensors."""

    def __init__(self, config: Config, layout: ParallelLayout, bounds: list[int], seq_length: int) -> None:
        self._layout = layout
        holders = config.parallel.rank_of_stage
        received: dict[int, list[list[Spec]]] = {}
        for stage, (source, holder) in enumerate(pairwise(holders), start=1):
            if holder == layout.pipeline_stage != source:
                received.setdefault(source, []).append(tensors_at(config, bounds[stage], seq_length))
        # The shapes of each stage's input come in the order of the rank's stages, and may come again.
        self._inputs = {source: cycle(specs) for source, specs in received.items()}
        self._output = tensors_at(config, bounds[layout.pipeline_stage + 1], seq_length)
        pipeline = deepspeed_dict(config, config.batch.global_batch_size).get("pipeline", {})
        self._partitioned = layout.tp_size > 1 and pipeline.get("pipe_partitioned", True)

    def fill(self, values: Tensor, source: int) -> None:
        """See `device.Peers`."""
        other = source // (self._layout.tp_size * self._layout.dp_size)
        if values.dtype == torch.int32 and values.numel() == _MESSAGE_ELEMENTS:
            message = self._shape_message(next(self._inputs[other]))
            values[: len(message)] = torch.tensor(message, dtype=torch.int32)
        elif values.dtype == torch.int64 and values.dim() == 1 and self._partitioned:
            # Only with one stage per rank: of an input, or of the gradient of the output.
            specs = next(self._inputs[other]) if other < self._layout.pipeline_stage else self._output
            values.copy_(torch.tensor(self._partition_table(specs[0][0])))

    def _shape_message(self, specs: list[Spec]) -> list[int]:
        """In the format of `PipelineEngine._send_tensor_meta`."""
        if self._partitioned:
            (shape, dtype), *others = specs
            table, elements = self._partition_table(shape), _elements(shape)
            specs = [((len(table),), torch.int64), ((elements // self._layout.tp_size,), dtype), *others]
        described = [
            number
            for shape, dtype in specs
            for number in (PipelineEngine.DTYPE_TO_ID[dtype], len(shape), *shape)
        ]
        return [0, *described] if len(specs) == 1 else [2, len(specs), *described]

    def _partition_table(self, shape: tuple[int, ...]) -> list[int]:
        """In the format of `PartitionedTensor.to_meta`: equal parts."""
        parts, elements = self._layout.tp_size, _elements(shape)
        ends = [elements // parts * part for part in range(parts + 1)]
        return [len(shape), *shape, parts, self._layout.tp_rank, *ends]


def _elements(shape: tuple[int, ...]) -> int:
    elements = 1
    for size in shape:
        elements *= size
    return elements
