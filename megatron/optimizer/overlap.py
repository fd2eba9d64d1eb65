"""Collectives of the optimizer that run while layers compute: buckets (ZeRO-1) and units (ZeRO-2, ZeRO-3).

`ZeroConfig` says which of the two run. Both consist of transformer layers, and their flat groups hold only
the parameters of these layers.

A bucket is a number of consecutive layers. Its gradients are final in the backward pass of the step's last
micro-batch. As soon as they are final, the bucket's reduce-scatter starts while the backward pass continues;
`GradientReduction.run` waits for it. After the update the all-gathers of all buckets' weights start, and a
layer's forward pass waits for the all-gather of its bucket. But a GPU with one hardware queue
(CUDA_DEVICE_MAX_CONNECTIONS=1) starts kernels in the order of their launches. The forward pass would begin
only after the start of the last all-gather, so it would hide no other all-gather. On such a GPU the first
stage, which waits for no message, chains the all-gathers: only the first one starts after the update, and a
bucket's first layer starts the next one.

A unit (FSDP's term) is one layer. Its full gradients (ZeRO-2) and full weights (ZeRO-3) are allocated only
while the layer runs (arXiv 1910.02054):

    before forward      all-gather weights                                          ZeRO-3
    after forward       free weights                                                ZeRO-3
    before backward     all-gather weights                                          ZeRO-3
    during backward     allocate full gradients, copy each parameter's into them    ZeRO-2, ZeRO-3
    after backward      reduce-scatter gradients, free them; free weights           ZeRO-2, ZeRO-3

While a unit computes, the all-gather of the next unit and the reduce-scatter of the previous unit run
(`UnitOverlap`).

Invariant: every rank of the data-parallel group runs the same layers in the same order, and autograd visits
the same graph in the same order. Therefore the collectives of these hooks are issued in the same order on all
ranks. The terms of a collective's sum, and their order, do not depend on when the collective starts.

Embedding, final norm and head are in no bucket and in no unit. They are reduced after the last backward pass,
and all-gathered before the step ends. The gradient of the tied embedding is final only at the end of the
first stage's backward pass. The functions that add to it (`mpu.embedding`, the fused loss) return no gradient
to autograd, and the fused loss reads the head's weight outside of any module's forward pass. Therefore no
hook would run.
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
    parameter groups. The mapping is empty below ZeRO-2, and if the data-parallel size is 1."""
    initial_values: Callable[[str, range], Tensor] | None = None
    """With ZeRO-3, a function that returns the initial values of a range of a parameter's elements by the
    parameter's name (fp32, on the host). Parameters of units have no memory before the optimizer is made."""
    buckets: Mapping[str, Sequence[nn.Module]] = field(default_factory=dict)
    """Layers whose gradients are reduced together, and whose weights are all-gathered together (ZeRO-1). The
    key is the 'unit' of their parameter groups. The mapping is empty if nothing overlaps, and if the
    data-parallel size is 1."""
    overlap_grad_reduce: bool = True
    """Whether the gradients of a bucket are reduced during the last backward pass, and the gradients of a
    unit while the next unit computes."""
    overlap_param_gather: bool = True
    """Whether the weights of a bucket may arrive during the next forward pass, and the weights of a unit
    while the previous unit computes."""
    chains_param_gathers: bool = False
    """Whether the all-gather of a bucket's weights starts only when the first layer of the previous bucket
    runs. Otherwise the all-gathers of all buckets start after the update."""
    cpu_offload: bool = False
    """Whether master weights and moments are kept and updated in host memory."""


def divide_into_buckets(layer_sizes: Sequence[int], bucket_size: int) -> list[range]:
    """Returns the layer indices of each bucket, in order; [] if one bucket would hold all layers.

    layer_sizes: number of elements of each layer. Counted from the last layer, each bucket has the fewest
    layers with at least `bucket_size` elements together. The first bucket, whose gradients are final last,
    holds the remaining layers.
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
    """The common part of buckets and units. flats: the groups that hold the layers' parameters, and no
    others."""

    def __init__(self, flats: Sequence[FlatGroup]) -> None:
        # The shortest message comes first: with one hardware queue, kernels that are launched after two
        # collectives of a process group start only after the first collective has ended.
        self.flats = sorted(flats, key=lambda flat: flat.size)
        self._parameters = [parameter for flat in flats for parameter in flat.parameters]
        self._gathering: list[Pending] = []

    def start_gather(self) -> None:
        """Starts the all-gather of the weights. It is a collective."""
        self._gathering += [flat.all_gather_params() for flat in self.flats]

    def wait_for_gather(self) -> None:
        """Waits for `start_gather`. After it the weights may be read."""
        gathering, self._gathering = self._gathering, []
        for pending in gathering:
            pending.wait()


class Bucket(_HookedLayers):
    """The layers of a bucket, with the hooks that overlap their collectives."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        flats: Sequence[FlatGroup],
        start_reduction: Callable[[Sequence[FlatGroup]], None] | None,
        not_gathered: deque[Bucket],
    ) -> None:
        """start_reduction: is called with `flats` when their gradients are final; None: gradients are reduced
        after the backward pass. not_gathered: a queue that all buckets share, of the buckets whose all-gather
        has not started since the last update, in the order of their layers. The bucket must be made after the
        hooks that accumulate gradients are registered."""
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
        """Starts a new count: a parameter's gradient is final after this many micro-batches."""
        self._micro_batches_left = dict.fromkeys(self._parameters, micro_batches)
        self._parameters_left = len(self._parameters)

    def start_reduction(self) -> None:
        """Starts the reduction of the gradients, if it runs during the backward pass. It is a collective."""
        if self._start is not None:
            self._start(self.flats)

    def _count_gradient(self, parameter: nn.Parameter) -> None:
        left = self._micro_batches_left.get(parameter, 0) - 1
        self._micro_batches_left[parameter] = left
        self._parameters_left -= left == 0
        if left == 0 and self._parameters_left == 0:
            self.start_reduction()

    def wait_for_gather(self) -> None:
        """Waits for the all-gather of the weights. If it has not started, starts it after the all-gathers of
        the earlier buckets. It is a collective."""
        while self in self._not_gathered:
            self._not_gathered.popleft().start_gather()
        super().wait_for_gather()

    def begin_forward(self) -> None:
        """Waits for the all-gather of the weights. At the first use of the weights since the update, it
        starts the all-gather of the next bucket in the queue. It is a collective."""
        is_first_use = self in self._not_gathered or bool(self._gathering)
        self.wait_for_gather()
        if is_first_use and self._not_gathered:
            self._not_gathered.popleft().start_gather()

    def _before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.begin_forward()


class UnitOverlap:
    """Overlaps at most two collectives with a unit's computation: the all-gather of the next unit's weights
    (prefetch), and the reduce-scatter of the previous unit's gradients.

    The next unit is known from the order of the all-gathers in an earlier micro-batch, including the
    all-gathers for recomputed layers. If the order differs (in an evaluation), prefetching stops until the
    next micro-batch.
    """

    def __init__(self, prefetch_params: bool, overlap_reduction: bool) -> None:
        self._prefetch_params, self._overlap_reduction = prefetch_params, overlap_reduction
        self._order: list[ShardedUnit] = []
        self._gathered: list[ShardedUnit] = []
        self._follows_order = False
        self._prefetched: ShardedUnit | None = None
        self._reducing: ShardedUnit | None = None

    def begin_micro_batch(self) -> None:
        """Starts a new order of units. It must be called before the first forward pass of a micro-batch."""
        if self._gathered != self._order[: len(self._gathered)]:
            self._order = self._gathered
        self._gathered = []
        self._follows_order = self._prefetch_params

    def gather(self, unit: ShardedUnit) -> None:
        """Waits for the unit's weights, and then starts the all-gather of the next unit's weights. It is a
        collective."""
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
        """Frees weights that were prefetched but not used, because they are about to change."""
        if self._prefetched is not None:
            self._prefetched.free_weights()
            self._prefetched = None

    def reduce(self, unit: ShardedUnit) -> None:
        """Starts the reduce-scatter of the unit's gradients, and finishes the pending reduce-scatter of the
        previous unit. It is a collective."""
        unit.start_reduction()
        self.finish_reduction()
        self._reducing = unit
        if not self._overlap_reduction:
            self.finish_reduction()

    def finish_reduction(self) -> None:
        """Finishes the pending reduce-scatter. Afterwards the partitions hold the gradients of the unit."""
        if self._reducing is not None:
            self._reducing.finish_reduction()
            self._reducing = None


class ShardedUnit(_HookedLayers):
    """A layer whose gradients (ZeRO-2) and weights (ZeRO-3) are sharded, with the hooks that overlap its
    collectives.

    Its backward pass starts when the gradient of the layer's output arrives. It ends when all parameters have
    their gradient: then the gradients are reduce-scattered and freed, and with ZeRO-3 the weights are freed.
    """

    def __init__(self, module: nn.Module, flats: Sequence[FlatGroup], overlap: UnitOverlap) -> None:
        """Registers the hooks. overlap: an object that all units share."""
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
        """Returns a context in which the layer's full parameters are allocated. It is a collective."""
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
        """Whether the weights must be gathered, or are being gathered, so that they cannot be read yet."""
        return bool(self._gathering) or any(not flat.has_full_params for flat in self.flats)

    def start_gather(self) -> None:
        """Starts the all-gather of the weights that are not allocated. It is a collective."""
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
        """Copies a parameter's gradient to the full gradients. The last gradient starts the
        reduce-scatter."""
        if len(self._pending_params) == len(self._parameters):
            if self._reducing:  # the reduction of the previous micro-batch uses these buffers
                self._overlap.finish_reduction()
            for flat in self.flats:
                flat.alloc_full_grads()
        move_grad(parameter, *self._targets[parameter])
        self._pending_params.discard(parameter)
        if not self._pending_params:
            self._overlap.reduce(self)

    def start_reduction(self) -> None:
        """Starts the reduce-scatter of the full gradients, and frees the weights. It is a collective."""
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
