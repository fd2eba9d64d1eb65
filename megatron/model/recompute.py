"""Activations that are made again in the backward pass instead of being kept."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.config import TrainingConfig
from megatron.model.transformer import Payload, split_payload
from megatron.mpu.layout import TensorGroup
from megatron.mpu.random import DropoutStream


class LayerRecomputation:
    """Runs transformer layers of which only the input is kept: whole, or with --partition-activations this
    tensor rank's part of it, or with --checkpoint-in-cpu in the CPU's memory.

    The last two are DeepSpeed's, whose settings are module-wide: those of the model made last hold.
    """

    def __init__(self, training: TrainingConfig, tensor: TensorGroup, stream: DropoutStream) -> None:
        self.stream = stream
        partition = training.partition_activations and tensor.size > 1
        # On a CPU they are there already, and DeepSpeed would empty its only copy (workarounds.py, entry 11).
        move = training.checkpoint_in_cpu and get_accelerator().device_name() != "cpu"
        self._checkpoint: Callable = _checkpoint
        if partition or move:
            deepspeed_checkpointing.configure(
                _TensorRanks(tensor),
                partition_activations=partition,
                checkpoint_in_cpu=move,
            )
            self._checkpoint = deepspeed_checkpointing.checkpoint

    def run(self, function: Callable[[Payload], Payload], payload: Payload) -> Payload:
        """`function(payload)`. The second run's dropout is the first one's: it depends on the samples, which
        are put back. DeepSpeed empties the hidden state that it is given, so nobody may need it again."""
        if not torch.is_grad_enabled():
            return function(payload)
        samples = self.stream.samples
        hidden, segments = split_payload(payload)

        def run(hidden: Tensor) -> Tensor:
            with self.stream.samples_in_use(samples):
                return split_payload(function(hidden if segments is None else (hidden, segments)))[0]

        hidden = self._checkpoint(run, hidden)
        return hidden if segments is None else (hidden, segments)


class _TensorRanks:
    """A tensor-parallel group by the names under which DeepSpeed asks for it."""

    def __init__(self, tensor: TensorGroup) -> None:
        self.tensor = tensor

    def get_tensor_model_parallel_rank(self) -> int:
        return self.tensor.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.tensor.size

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self.tensor.group


def _checkpoint(function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    return checkpoint(function, hidden, use_reentrant=False, preserve_rng_state=False)
