"""ZeRO-2 and ZeRO-3: module hooks that gather a layer's weights and reduce-scatter its gradients.

The idea (ZeRO, arXiv 1910.02054; the unit is what FSDP calls a unit): a unit is one transformer layer, with
flat groups that hold its parameters and no others. Full gradients (ZeRO-2) and full weights (ZeRO-3) of a
unit are allocated only while the layer runs:

    before forward      all-gather weights                                          ZeRO-3
    after forward       free weights                                                ZeRO-3
    before backward     all-gather weights                                          ZeRO-3
    during backward     allocate full gradients, accumulate into them               ZeRO-2, ZeRO-3
    after backward      reduce-scatter gradients, free them; free weights           ZeRO-2, ZeRO-3

Communication overlaps with computation (`UnitOverlap`): while a unit computes, the all-gather of the next one
runs, and the reduce-scatter of the last one. What is summed, and in which order, does not depend on this.

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


class UnitOverlap:
    """What runs while a unit computes: at most one prefetched all-gather, of the next unit's weights, and one
    reduce-scatter, of the previous unit's gradients.

    Which unit is next is known from the order of the all-gathers in an earlier micro-batch, layers that are
    recomputed included. If the order differs, as in an evaluation, prefetching stops until the next
    micro-batch.
    """

    def __init__(self, prefetch_params: bool, overlap_reduction: bool) -> None:
        self._prefetch_params, self._overlap_reduction = prefetch_params, overlap_reduction
        self._order: list[ShardedUnit] = []
        self._gathered: list[ShardedUnit] = []
        self._follows_order = False
        self._prefetched: ShardedUnit | None = None
        self._reducing: ShardedUnit | None = None

    def begin_micro_batch(self) -> None:
        """Called before the first forward pass of a micro-batch."""
        if self._gathered != self._order[: len(self._gathered)]:
            self._order = self._gathered
        self._gathered = []
        self._follows_order = self._prefetch_params

    def gather(self, unit: "ShardedUnit") -> None:
        """Waits for the unit's weights, then starts the all-gather of the next unit's. Collective."""
        if not unit.lacks_weights:
            return
        if self._prefetched is not None and self._prefetched is not unit:
            self._prefetched.free_weights()
        unit.start_gather()
        unit.wait_for_gather()
        index = len(self._gathered)
        self._gathered.append(unit)
        self._follows_order &= self._order[index : index + 1] == [unit]
        following = self._order[index + 1 : index + 2] if self._follows_order else []
        self._prefetched = following[0] if following and following[0] is not unit else None
        if self._prefetched is not None:
            self._prefetched.start_gather()

    def free_prefetched(self) -> None:
        """Frees weights that were prefetched and not used: they are about to change."""
        if self._prefetched is not None:
            self._prefetched.free_weights()
            self._prefetched = None

    def reduce(self, unit: "ShardedUnit") -> None:
        """Starts the reduce-scatter of the unit's gradients, then finishes that of the unit before.
        Collective."""
        unit.start_reduction()
        self.finish_reduction()
        self._reducing = unit
        if not self._overlap_reduction:
            self.finish_reduction()

    def finish_reduction(self) -> None:
        """Afterwards the gradients of all units whose backward pass has ended are in the partitions."""
        if self._reducing is not None:
            self._reducing.finish_reduction()
            self._reducing = None


class ShardedUnit:
    """The hooks of one transformer layer.

    Its backward pass starts when the gradient of the layer's output arrives. It ends when all parameters have
    their gradient: these are then reduce-scattered and freed, and with ZeRO-3 the weights are freed.
    """

    def __init__(
        self,
        module: nn.Module,
        flats: Sequence[FlatGroup],
        dp_group: dist.ProcessGroup,
        overlap: UnitOverlap,
    ) -> None:
        """`flats`: the groups that hold `module`'s parameters and no others. `overlap`: one for all units.
        Registers the hooks."""
        self.module = module
        self._flats = list(flats)
        self._dp_group = dp_group
        self._overlap = overlap
        self._parameters = [parameter for flat in flats for parameter in flat.parameters]
        self._pending_params = set(self._parameters)
        self._in_backward = False
        self._gathering: list[dist.Work] = []
        self._reducing: list[dist.Work] = []
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulate_grad)
        if any(flat.shards_weights for flat in flats):
            module.register_forward_pre_hook(self._before_forward)
            module.register_forward_hook(self._after_forward)

    @contextmanager
    def gathered_params(self) -> Iterator[None]:
        """Within this context the layer's full parameters are allocated. Collective."""
        self.start_gather()
        self.wait_for_gather()
        try:
            yield
        finally:
            self.free_weights()

    # --- weights ---

    # With --compile the layer is compiled; hooks with collectives are not.
    @not_compiled
    def _before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._overlap.gather(self)

    @not_compiled
    def _after_forward(self, module: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        hidden = outputs if isinstance(outputs, Tensor) else outputs[0]
        if hidden.requires_grad:
            hidden.register_hook(self._before_backward)
        # With --checkpoint-activations this may be the recomputation within the backward pass, which still
        # needs the weights.
        if not self._in_backward:
            self.free_weights()

    def _before_backward(self, gradient: Tensor) -> None:
        self._in_backward = True
        self._overlap.gather(self)

    @property
    def lacks_weights(self) -> bool:
        """Whether the weights have to be gathered, or are being gathered, before they may be read."""
        return bool(self._gathering) or any(not flat.has_full_params for flat in self._flats)

    def start_gather(self) -> None:
        """Starts the all-gather of the weights that are not there. Collective."""
        missing = [flat for flat in self._flats if not flat.has_full_params]
        self._gathering += [flat.all_gather_params(self._dp_group) for flat in missing]

    def wait_for_gather(self) -> None:
        """Waits for `start_gather`. Afterwards the weights may be read."""
        gathering, self._gathering = self._gathering, []
        for pending in gathering:
            pending.wait()

    def free_weights(self) -> None:
        """Frees the full weights (ZeRO-3)."""
        self.wait_for_gather()
        for flat in self._flats:
            if flat.shards_weights:
                flat.free_full_params()

    # --- gradients ---

    def _accumulate_grad(self, parameter: nn.Parameter) -> None:
        """Hook: adds a parameter's gradient to the full gradients; the last one starts the reduce-scatter."""
        if len(self._pending_params) == len(self._parameters):
            if self._reducing:  # of the micro-batch before, into the same buffers
                self._overlap.finish_reduction()
            for flat in self._flats:
                flat.alloc_full_grads()
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        self._pending_params.discard(parameter)
        if not self._pending_params:
            self._overlap.reduce(self)

    def start_reduction(self) -> None:
        """Starts the reduce-scatter of the full gradients, and frees the weights. Collective."""
        for flat in self._flats:
            # Of the whole group: only a diagnosis reads it, which then looks for the parameter.
            flat.add_grad_norms(torch.linalg.vector_norm(flat.gradients, torch.inf))
        self._reducing = [flat.reduce_scatter_grads(self._dp_group) for flat in self._flats]
        self._pending_params = set(self._parameters)
        self._in_backward = False
        self.free_weights()

    def finish_reduction(self) -> None:
        """Waits for `start_reduction`, and frees the full gradients."""
        for flat, pending in zip(self._flats, self._reducing, strict=True):
            pending.wait()
            flat.accumulate_grad_shard()
        self._reducing = []
