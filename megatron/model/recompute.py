"""Activation checkpointing: activations are recomputed in the backward pass, not kept (arXiv 1604.06174)."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.config import TrainingConfig
from megatron.model.layer_context import LayerIO, split_layer_io
from megatron.mpu.layout import TPGroup
from megatron.mpu.random import DropoutRNG


class ActivationCheckpointing:
    """Runs transformer layers and keeps only their input for the backward pass.

    With --partition-activations each tensor-parallel rank keeps its partition of the input; with
    --checkpoint-in-cpu the input is kept in host memory. These two use DeepSpeed's implementation. Its
    settings are global to the process: the last model that was made sets them.
    """

    def __init__(self, training: TrainingConfig, tp_group: TPGroup, dropout_rng: DropoutRNG) -> None:
        self.dropout_rng = dropout_rng
        partition = training.partition_activations and tp_group.size > 1
        # On a CPU there is nothing to move, and DeepSpeed would free the only copy (workarounds.py, 11).
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
        """Returns `function(layer_io)`. The recomputation uses the same dropout masks, since it uses the same
        sample numbers. The caller must not use layer_io again: DeepSpeed frees the hidden state."""
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
    """A tensor-parallel group with the method names that DeepSpeed expects of an `mpu` object."""

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
