"""Buckets: layers whose gradients are reduced together during the backward pass, and whose weights are
gathered together during the next forward pass (ZeRO-1).

A bucket is a number of consecutive transformer layers, with flat groups that hold their parameters and no
others. Gradients are final in the backward pass of the step's last micro-batch. As soon as those of a bucket
are, its reduce-scatter starts, while the backward pass continues; `GradientReduction.run` waits for it. After
the update the all-gathers of all buckets' weights start; a layer's forward pass waits for those of its
bucket.

Invariant: every rank of the data-parallel group runs the same layers in the same order, and autograd visits
the same graph in the same order. So the collectives are issued in the same order on all ranks. What a
collective sums does not depend on when it starts.

Embedding, final norm and head belong to no bucket: they are reduced after the last backward pass, and
gathered before the step ends. The gradient of the tied embedding is final at the end of the first stage's
backward pass only, and the two functions that add to it (`mpu.embedding`, the fused loss) return no gradient
to autograd, so no hook would run.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron.mpu.compilation import not_compiled
from megatron.optimizer.flat_group import FlatGroup


def divide_into_buckets(layer_sizes: Sequence[int], bucket_size: int) -> list[range]:
    """Indices of the layers of each bucket, in order; [] if one bucket would hold all of them.

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


class Bucket:
    """The hooks of a bucket's layers."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        flats: Sequence[FlatGroup],
        dp_group: dist.ProcessGroup,
        start_reduction: Callable[[Sequence[FlatGroup]], None] | None,
    ) -> None:
        """`flats`: the groups that hold the parameters of `modules` and no others. `start_reduction`: called
        with them when their gradients are final; None: gradients are reduced after the backward pass.
        Registers the hooks: after those that accumulate the gradients."""
        self.flats = list(flats)
        self._dp_group = dp_group
        self._start = start_reduction
        self._parameters = [parameter for flat in flats for parameter in flat.parameters]
        self._micro_batches_left: dict[nn.Parameter, int] = {}
        self._parameters_left = 0
        self._pending: list[dist.Work] = []
        for module in modules:
            module.register_forward_pre_hook(self._before_forward)
        if start_reduction is not None:
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._count_gradient)

    def begin_step(self, micro_batches: int) -> None:
        """The gradients are final when each parameter has those of this many micro-batches."""
        self._micro_batches_left = dict.fromkeys(self._parameters, micro_batches)
        self._parameters_left = len(self._parameters)

    def start_reduction(self) -> None:
        """Starts the reduction of the gradients, if it runs during the backward pass. Collective."""
        if self._start is not None:
            self._start(self.flats)

    def start_gather(self) -> None:
        """Starts the all-gather of the weights. Collective."""
        self._pending = [flat.all_gather_params(self._dp_group) for flat in self.flats]

    def wait_for_gather(self) -> None:
        """Waits for `start_gather`. Afterwards the weights may be read."""
        pending, self._pending = self._pending, []
        for work in pending:
            work.wait()

    def _count_gradient(self, parameter: nn.Parameter) -> None:
        left = self._micro_batches_left.get(parameter, 0) - 1
        self._micro_batches_left[parameter] = left
        self._parameters_left -= left == 0
        if left == 0 and self._parameters_left == 0:
            self.start_reduction()

    # With --compile the layer is compiled; hooks with collectives are not.
    @not_compiled
    def _before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.wait_for_gather()
