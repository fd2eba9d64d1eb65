"""Activations that are made again in the backward pass instead of being kept."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.config import TrainingConfig
from megatron.model.transformer import LayerIO, split_layer_io
from megatron.mpu.layout import TPGroup
from megatron.mpu.random import DropoutRNG


class ActivationCheckpointing:
    """Runs transformer layers of which only the input is kept: whole, or with --partition-activations this
    tensor rank's part of it, or with --checkpoint-in-cpu in the CPU's memory.

    The last two are DeepSpeed's, whose settings are module-wide: those of the model made last hold.
    """

    def __init__(self, training: TrainingConfig, tp_group: TPGroup, dropout_rng: DropoutRNG) -> None:
        self.dropout_rng = dropout_rng
        partition = training.partition_activations and tp_group.size > 1
        # On a CPU they are there already, and DeepSpeed would empty its only copy (workarounds.py, entry 11).
        move = training.checkpoint_in_cpu and get_accelerator().device_name() != "cpu"
        self._checkpoint: Callable = _checkpoint
        if partition or move:
            deepspeed_checkpointing.configure(
                _TensorRanks(tp_group),
                partition_activations=partition,
                checkpoint_in_cpu=move,
            )
            self._checkpoint = deepspeed_checkpointing.checkpoint

    def run(self, function: Callable[[LayerIO], LayerIO], layer_io: LayerIO) -> LayerIO:
        """`function(layer_io)`. The second run's dropout is the first one's: it depends on the samples, which
        are put back. DeepSpeed empties the hidden state that it is given, so nobody may need it again."""
        if not torch.is_grad_enabled():
            return function(layer_io)
        samples = self.dropout_rng.samples
        hidden, document_ids = split_layer_io(layer_io)

        def run(hidden: Tensor) -> Tensor:
            with self.dropout_rng.use_samples(samples):
                return split_layer_io(function(hidden if document_ids is None else (hidden, document_ids)))[0]

        hidden = self._checkpoint(run, hidden)
        return hidden if document_ids is None else (hidden, document_ids)


class _TensorRanks:
    """A tensor-parallel group by the names under which DeepSpeed asks for it."""

    def __init__(self, tp_group: TPGroup) -> None:
        self.tp_group = tp_group

    def get_tensor_model_parallel_rank(self) -> int:
        return self.tp_group.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.tp_group.size

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self.tp_group.group


def _checkpoint(function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    return checkpoint(function, hidden, use_reentrant=False, preserve_rng_state=False)
