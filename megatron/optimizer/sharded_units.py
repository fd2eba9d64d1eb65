"""When a transformer layer's gradients (ZeRO-2) and weights (ZeRO-3) are whole: while it is worked on.

A unit is one transformer layer: its parameters lie in flat groups of their own. What is no unit (embedding,
final norm) stays whole on each rank as with ZeRO-1: the fused loss (`mpu.cross_entropy`) reads the head's
weight and adds to its `main_grad` outside any module's forward pass, where no hook would see it.

Every rank runs the same layers in the same order, and autograd works through the same graph in one order, so
the collectives in these hooks meet in the same order everywhere.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.optimizer.flat_group import FlatGroup


class ShardedUnit:
    """One layer between its partitions and its whole.

    A backward pass begins when the gradient of the layer's output has come and ends when those of all its
    parameters have: then they are summed over the replicas and let go of, and so are the weights.
    """

    def __init__(self, module: nn.Module, flats: Sequence[FlatGroup], dp_group: dist.ProcessGroup) -> None:
        """`flats`: the groups that hold `module`'s parameters and no others. Puts hooks on both."""
        self.module = module
        self._flats = list(flats)
        self._dp_group = dp_group
        self._shards_weights = any(flat.shards_weights for flat in flats)
        self._parameters = [parameter for flat in flats for parameter in flat.parameters]
        self._pending_params = set(self._parameters)
        self._in_backward = False
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulate_grad)
        if self._shards_weights:
            module.register_forward_pre_hook(self._before_forward)
            module.register_forward_hook(self._after_forward)

    @contextmanager
    def gathered_params(self) -> Iterator[None]:
        """Within this context the layer's parameters can be read. Collective."""
        self._gather()
        try:
            yield
        finally:
            self._free()

    # --compile is for the layer: hooks that exchange messages stay as they are.
    @torch.compiler.disable
    def _before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._gather()

    @torch.compiler.disable
    def _after_forward(self, module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        hidden = outputs if isinstance(outputs, Tensor) else outputs[0]
        if hidden.requires_grad:
            hidden.register_hook(self._before_backward)
        # --checkpoint-activations runs the layer a second time, inside its backward pass, which goes on.
        if not self._in_backward:
            self._free()

    def _before_backward(self, gradient: Tensor) -> None:
        self._in_backward = True
        self._gather()

    def _accumulate_grad(self, parameter: nn.Parameter) -> None:
        """Adds a micro-batch's gradient to the whole ones of this pass."""
        if len(self._pending_params) == len(self._parameters):
            for flat in self._flats:
                flat.alloc_full_grads()
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        self._pending_params.discard(parameter)
        if not self._pending_params:
            self._reduce_scatter_grads()

    def _reduce_scatter_grads(self) -> None:
        # All messages at once: that of norms and biases is short.
        sums = [flat.reduce_scatter_grads(self._dp_group) for flat in self._flats]
        for flat, (part, pending) in zip(self._flats, sums, strict=True):
            pending.wait()
            flat.accumulate_grad_shard(part)
        self._pending_params = set(self._parameters)
        self._in_backward = False
        self._free()

    def _gather(self) -> None:
        missing = [flat for flat in self._flats if not flat.has_full_params]
        for pending in [flat.all_gather_params(self._dp_group) for flat in missing]:
            pending.wait()

    def _free(self) -> None:
        for flat in self._flats:
            if flat.shards_weights:
                flat.free_full_params()
