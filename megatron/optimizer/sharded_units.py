"""ZeRO-2 and ZeRO-3: module hooks that gather a layer's weights and reduce-scatter its gradients.

The idea (ZeRO, arXiv 1910.02054; the unit is what FSDP calls a unit): a unit is one transformer layer, with
flat groups that hold its parameters and no others. Full gradients (ZeRO-2) and full weights (ZeRO-3) of a
unit are allocated only while the layer runs:

    before forward      all-gather weights                                          ZeRO-3
    after forward       free weights                                                ZeRO-3
    before backward     all-gather weights                                          ZeRO-3
    during backward     allocate full gradients, accumulate into them               ZeRO-2, ZeRO-3
    after backward      reduce-scatter gradients, free them; free weights           ZeRO-2, ZeRO-3

Invariant: every rank of the data-parallel group runs the same layers in the same order, and autograd visits
the same graph in the same order. So the collectives in these hooks are issued in the same order on all ranks.

Embedding, final norm and head are not units; they stay full on each rank, as with ZeRO-1. The fused loss
(`mpu.cross_entropy`) reads the head's weight and adds to its `main_grad` outside of any module's forward
pass, where module hooks do not run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.mpu.compilation import not_compiled
from megatron.optimizer.flat_group import FlatGroup


class ShardedUnit:
    """The hooks of one transformer layer.

    Its backward pass starts when the gradient of the layer's output arrives. It ends when all parameters have
    their gradient: these are then reduce-scattered and freed, and with ZeRO-3 the weights are freed.
    """

    def __init__(self, module: nn.Module, flats: Sequence[FlatGroup], dp_group: dist.ProcessGroup) -> None:
        """`flats`: the groups that hold `module`'s parameters and no others. Registers the hooks."""
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
        """Within this context the layer's full parameters are allocated. Collective."""
        self._gather()
        try:
            yield
        finally:
            self._free()

    # With --compile the layer is compiled; hooks with collectives are not.
    @not_compiled
    def _before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._gather()

    @not_compiled
    def _after_forward(self, module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        hidden = outputs if isinstance(outputs, Tensor) else outputs[0]
        if hidden.requires_grad:
            hidden.register_hook(self._before_backward)
        # With --checkpoint-activations this may be the recomputation within the backward pass, which still
        # needs the weights.
        if not self._in_backward:
            self._free()

    def _before_backward(self, gradient: Tensor) -> None:
        self._in_backward = True
        self._gather()

    def _accumulate_grad(self, parameter: nn.Parameter) -> None:
        """Hook: adds a parameter's gradient to the full gradients; the last one starts the reduce-scatter."""
        if len(self._pending_params) == len(self._parameters):
            for flat in self._flats:
                flat.alloc_full_grads()
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        self._pending_params.discard(parameter)
        if not self._pending_params:
            self._reduce_scatter_grads()

    def _reduce_scatter_grads(self) -> None:
        for flat in self._flats:
            norms = [torch.linalg.vector_norm(parameter.main_grad) for parameter in flat.parameters]
            flat.reduced_grad_norms += torch.stack(norms)
        # Start all groups before waiting: the message of norms and biases is short.
        sums = [flat.reduce_scatter_grads(self._dp_group) for flat in self._flats]
        for flat, pending in zip(self._flats, sums, strict=True):
            pending.wait()
            flat.accumulate_grad_shard()
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
