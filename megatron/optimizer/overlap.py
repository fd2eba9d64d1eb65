"""Collectives of the optimizer that run while layers compute: buckets (ZeRO-1) and units (ZeRO-2, ZeRO-3).

`ZeroConfig` says which run. Both consist of transformer layers, and their flat groups hold only the
parameters of these layers.

A bucket is a number of consecutive layers. Gradients are final in the backward pass of the step's last
micro-batch. As soon as a bucket's gradients are final, its reduce-scatter starts, while the backward pass
continues; `GradientReduction.run` waits for it. After the update the all-gathers of all buckets' weights
start; a layer's forward pass waits for its bucket's all-gather. But a GPU with one hardware queue
(CUDA_DEVICE_MAX_CONNECTIONS=1) starts no later kernel before the last all-gather has started, so no forward
pass would hide the others. On such a GPU the first stage, which does not wait for a message, chains the
all-gathers: only the first one starts after the update, and a bucket's first layer starts the next one.

A unit (FSDP's term) is one layer. Its full gradients (ZeRO-2) and full weights (ZeRO-3) are allocated
only while the layer runs (arXiv 1910.02054):

    before forward      all-gather weights                                          ZeRO-3
    after forward       free weights                                                ZeRO-3
    before backward     all-gather weights                                          ZeRO-3
    during backward     allocate full gradients, copy each parameter's into them    ZeRO-2, ZeRO-3
    after backward      reduce-scatter gradients, free them; free weights           ZeRO-2, ZeRO-3

While a unit computes, the all-gather of the next unit and the reduce-scatter of the previous unit run
(`UnitOverlap`).

Invariant: every rank of the data-parallel group runs the same layers in the same order, and autograd visits
the same graph in the same order. So the collectives in these hooks are issued in the same order on all ranks.
What a collective sums, and in which order, does not depend on when it starts.

Embedding, final norm and head are in no bucket and no unit. They are reduced after the last backward pass,
and gathered before the step ends. The gradient of the tied embedding is final only at the end of the first
stage's backward pass. The functions that add to it (`mpu.embedding`, the fused loss) return no gradient to
autograd, and the fused loss reads the head's weight outside of any module's forward pass: no hook would run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from megatron.optimizer.flat_group import FlatGroup, Pending, move_grad


@dataclass(frozen=True)
class ZeroConfig:
    """What is sharded over the data-parallel ranks, and where the optimizer state is kept."""

    zero_stage: int
    units: Mapping[str, nn.Module] = field(default_factory=dict)
    """Modules whose gradients (ZeRO-2) and weights (ZeRO-3) are sharded. The key is the 'unit' of their
    parameter groups. Empty below ZeRO-2, and if the data-parallel size is 1."""
    initial_values: Callable[[str, range], Tensor] | None = None
    """With ZeRO-3: returns the initial values of some elements of a parameter by name (fp32, on the host).
    Parameters of units have no memory before the optimizer is made."""
    buckets: Mapping[str, Sequence[nn.Module]] = field(default_factory=dict)
    """Layers whose gradients are reduced, and weights gathered, together (ZeRO-1). The key is the 'unit' of
    their parameter groups. Empty if nothing overlaps, and if the data-parallel size is 1."""
    overlap_grad_reduce: bool = True
    """Whether the gradients of a bucket are reduced during the last backward pass, and the gradients of a
    unit while the next unit computes."""
    overlap_param_gather: bool = True
    """Whether the weights of a bucket may arrive during the next forward pass, and the weights of a unit
    while the previous unit computes."""
    chains_param_gathers: bool = False
    """Whether the all-gather of a bucket's weights starts only when the previous bucket's first layer runs.
    Otherwise the all-gathers of all buckets start after the update."""
    cpu_offload: bool = False
    """Whether master weights and moments are kept and updated in host memory."""


def divide_into_buckets(layer_sizes: Sequence[int], bucket_size: int) -> list[range]:
    """Returns the layer indices of each bucket, in order; [] if one bucket would hold all layers.

    layer_sizes: elements of each layer. A bucket has the fewest layers with at least `bucket_size` elements,
    counted from the last layer. The first bucket, whose gradients are final last, holds the rest.
    """
    ends, held = [len(layer_sizes)], 0
    for index in reversed(range(len(layer_sizes))):
        held += layer_sizes[index]
        if held >= bucket_size:
            ends.append(index)
            held = 0
    if ends[-1] != 0:
        ends.append(0)
    buckets = [range(start, end) for end, start in pairwise(ends)][::-1]
    return buckets if len(buckets) > 1 else []


class _HookedLayers:
    """What buckets and units share. `flats`: the groups that hold the layers' parameters and no others."""

    def __init__(self, flats: Sequence[FlatGroup]) -> None:
        # The shortest message first: with one hardware queue, kernels that are launched after two collectives
        # of a process group start only when the first one has ended.
        self.flats = sorted(flats, key=lambda flat: flat.size)
        self._parameters = [parameter for flat in flats for parameter in flat.parameters]
        self._gathering: list[Pending] = []

    def start_gather(self) -> None:
        """Starts the all-gather of the weights. Collective."""
        self._gathering += [flat.all_gather_params() for flat in self.flats]

    def wait_for_gather(self) -> None:
        """Waits for `start_gather`. Afterwards the weights may be read."""
        gathering, self._gathering = self._gathering, []
        for pending in gathering:
            pending.wait()


class Bucket(_HookedLayers):
    """The hooks of a bucket's layers."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        flats: Sequence[FlatGroup],
        start_reduction: Callable[[Sequence[FlatGroup]], None] | None,
        not_gathered: deque[Bucket],
    ) -> None:
        """`start_reduction`: called with `flats` when their gradients are final; None: gradients are reduced
        after the backward pass. `not_gathered`: one for all buckets; holds those whose all-gather has not
        started since the last update, in the order of their layers. Make the bucket after registering the
        hooks that accumulate gradients."""
        super().__init__(flats)
        self._start = start_reduction
        self._not_gathered = not_gathered
        self._micro_batches_left: dict[nn.Parameter, int] = {}
        self._parameters_left = 0
        for module in modules:
            module.register_forward_pre_hook(self._before_forward)
        if start_reduction is not None:
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._count_gradient)

    def begin_step(self, micro_batches: int) -> None:
        """Restarts the count: a parameter's gradient is final after this many micro-batches."""
        self._micro_batches_left = dict.fromkeys(self._parameters, micro_batches)
        self._parameters_left = len(self._parameters)

    def start_reduction(self) -> None:
        """Starts the reduction of the gradients, if it runs during the backward pass. Collective."""
        if self._start is not None:
            self._start(self.flats)

    def _count_gradient(self, parameter: nn.Parameter) -> None:
        left = self._micro_batches_left.get(parameter, 0) - 1
        self._micro_batches_left[parameter] = left
        self._parameters_left -= left == 0
        if left == 0 and self._parameters_left == 0:
            self.start_reduction()

    def wait_for_gather(self) -> None:
        """Waits for the all-gather of the weights, which it starts if necessary, after the buckets before it.
        Collective."""
        while self in self._not_gathered:
            self._not_gathered.popleft().start_gather()
        super().wait_for_gather()

    def begin_forward(self) -> None:
        """Waits for the all-gather of the weights. If this is their first use since the update, starts the
        all-gather of the next bucket's. Collective."""
        is_first_use = self in self._not_gathered or bool(self._gathering)
        self.wait_for_gather()
        if is_first_use and self._not_gathered:
            self._not_gathered.popleft().start_gather()

    def _before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.begin_forward()


class UnitOverlap:
    """Overlaps at most one all-gather, of the next unit's weights (prefetch), and one reduce-scatter, of the
    previous unit's gradients.

    The next unit is known from the order of the all-gathers in an earlier micro-batch, including those of
    recomputed layers. If the order differs (in an evaluation), prefetching stops until the next micro-batch.
    """

    def __init__(self, prefetch_params: bool, overlap_reduction: bool) -> None:
        self._prefetch_params, self._overlap_reduction = prefetch_params, overlap_reduction
        self._order: list[ShardedUnit] = []
        self._gathered: list[ShardedUnit] = []
        self._follows_order = False
        self._prefetched: ShardedUnit | None = None
        self._reducing: ShardedUnit | None = None

    def begin_micro_batch(self) -> None:
        """Restarts the order of units. Call it before the first forward pass of a micro-batch."""
        if self._gathered != self._order[: len(self._gathered)]:
            self._order = self._gathered
        self._gathered = []
        self._follows_order = self._prefetch_params

    def gather(self, unit: ShardedUnit) -> None:
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

    def reduce(self, unit: ShardedUnit) -> None:
        """Starts the reduce-scatter of the unit's gradients, and finishes the previous unit's. Collective."""
        unit.start_reduction()
        self.finish_reduction()
        self._reducing = unit
        if not self._overlap_reduction:
            self.finish_reduction()

    def finish_reduction(self) -> None:
        """Finishes the pending reduce-scatter: afterwards the partitions hold the gradients of its unit."""
        if self._reducing is not None:
            self._reducing.finish_reduction()
            self._reducing = None


class ShardedUnit(_HookedLayers):
    """The hooks of a unit.

    Its backward pass starts when the gradient of the layer's output arrives. It ends when all parameters have
    their gradient: the gradients are then reduce-scattered and freed, and with ZeRO-3 the weights are freed.
    """

    def __init__(self, module: nn.Module, flats: Sequence[FlatGroup], overlap: UnitOverlap) -> None:
        """`overlap`: one for all units. Registers the hooks."""
        super().__init__(flats)
        self.module = module
        self._overlap = overlap
        norms = [norm for flat in flats for norm in flat.reduced_grad_norms.unbind()]
        totals = [total for flat in flats for total in flat.full_grads]
        self._targets = dict(zip(self._parameters, zip(totals, norms, strict=True), strict=True))
        self._pending_params = set(self._parameters)
        self._in_backward = False
        self._reducing: list[Pending] = []
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._take_grad)
        if any(flat.shards_weights for flat in flats):
            module.register_forward_pre_hook(self._before_forward)
            module.register_forward_hook(self._after_forward)

    @contextmanager
    def gathered_params(self) -> Iterator[None]:
        """Allocates the layer's full parameters within this context. Collective."""
        self.start_gather()
        self.wait_for_gather()
        try:
            yield
        finally:
            self.free_weights()

    # --- weights ---

    def _before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._overlap.gather(self)

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
        return bool(self._gathering) or any(not flat.has_full_params for flat in self.flats)

    def start_gather(self) -> None:
        """Starts the all-gather of the weights that are not allocated. Collective."""
        missing = [flat for flat in self.flats if not flat.has_full_params]
        self._gathering += [flat.all_gather_params() for flat in missing]

    def free_weights(self) -> None:
        """Frees the full weights (ZeRO-3)."""
        self.wait_for_gather()
        for flat in self.flats:
            if flat.shards_weights:
                flat.free_full_params()

    # --- gradients ---

    def _take_grad(self, parameter: nn.Parameter) -> None:
        """Copies a parameter's gradient to the full gradients; the last one starts the reduce-scatter."""
        if len(self._pending_params) == len(self._parameters):
            if self._reducing:  # the previous micro-batch's reduction uses these buffers
                self._overlap.finish_reduction()
            for flat in self.flats:
                flat.alloc_full_grads()
        move_grad(parameter, *self._targets[parameter])
        self._pending_params.discard(parameter)
        if not self._pending_params:
            self._overlap.reduce(self)

    def start_reduction(self) -> None:
        """Starts the reduce-scatter of the full gradients, and frees the weights. Collective."""
        self._reducing = [flat.reduce_scatter_grads() for flat in self.flats]
        self._pending_params = set(self._parameters)
        self._in_backward = False
        self.free_weights()

    def finish_reduction(self) -> None:
        """Waits for `start_reduction`, and frees the full gradients."""
        for flat, pending in zip(self.flats, self._reducing, strict=True):
            pending.wait()
            flat.accumulate_grad_shard()
        self._reducing = []
