"""Reduction of the gradients over ranks. Afterwards all replicas of a parameter have bitwise equal gradients.

Assumption about the communication backend: all members of a process group receive the same bits from an
all-reduce. Nothing more is assumed: two groups, or buffers of different lengths, may sum in different orders
and round differently, and so may a reduce-scatter.

With ZeRO each element is summed and then used on one data-parallel rank only, its owner. The steps:

1. Each flat buffer is reduce-scattered over the data-parallel group into the owners' partitions. All other
   steps are done on the owned elements. Flat buffers have the same layout on all tensor-parallel ranks, so
   all ranks of a tensor-parallel group own the same elements.
2. Sequence-parallel gradients: each tensor-parallel rank has a partial gradient; they are summed over TP.
3. The two replicas of a tied parameter are added over their two stages: a + b has the same bits in both
   orders. The parameter has a flat buffer of its own (`parameter_groups`), so both stages divide it into the
   same partitions.
4. Parameters replicated over tensor-parallel ranks: all ranks take the gradient of TP rank 0.

Without ZeRO every data-parallel rank uses all elements, and the groups of step 2 differ between these ranks.
So step 2 comes first, then an all-reduce of each flat buffer over the data-parallel group gives its members
the same bits. Step 3 must come after it, since the buffers of the two stages have different lengths.

Buckets: layers whose gradients are reduced together during the backward pass, and whose weights are
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

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.mpu.compilation import not_compiled
from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import is_sequence_parallel_grad, spec_of
from megatron.optimizer.flat_group import FlatGroup
from megatron.optimizer.gradient_norm import record_norms


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


class GradientReduction:
    """Reduces the gradients of `flats` once per step."""

    def __init__(
        self,
        flats: Sequence[FlatGroup],
        dp_group: dist.ProcessGroup | None,
        tied: Sequence[tuple[nn.Parameter, dist.ProcessGroup]],
        tp_group: TPGroup,
    ) -> None:
        """`dp_group`: None if the data-parallel size is 1. `tied`: parameters with a replica on another
        stage, and the process group of the two stages. ValueError for a parameter on more than two stages."""
        self._flats, self._dp_group, self._tp_group = list(flats), dp_group, tp_group
        for parameter, stages in tied:
            if dist.get_world_size(stages) != 2:
                raise ValueError(
                    f"a tied parameter of shape {tuple(parameter.shape)} is on {dist.get_world_size(stages)} "
                    "stages: expected 2, since the sum of more depends on its order"
                )
        held = [(flat, parameter) for flat in flats for parameter in flat.parameters]
        stages_of = {parameter: stages for parameter, stages in tied}
        self._tied = [(*pair, stages_of[pair[1]]) for pair in held if pair[1] in stages_of]
        self._sequence_parallel = [pair for pair in held if is_sequence_parallel_grad(pair[1])]
        self._started: list[tuple[FlatGroup, dist.Work]] = []
        self._replicated = [pair for pair in held if tp_group.size > 1 and spec_of(pair[1]).shard_dim is None]

    @property
    def exchanges(self) -> bool:
        """Whether `run` changes any gradient of this rank."""
        return self._dp_group is not None or bool(self._tied or self._replicated)

    @torch.no_grad()
    def start(self, flats: Sequence[FlatGroup]) -> None:
        """Starts the reduce-scatters of partitioned groups whose gradients are final in this step. `run`
        waits for them. Collective, in the same order on all ranks of the data-parallel group."""
        record_norms(flats)
        assert self._dp_group is not None or not flats
        self._started += [(flat, flat.reduce_scatter_grads(self._dp_group)) for flat in flats]

    @torch.no_grad()
    def run(self) -> None:
        """The steps above. Collective. Afterwards `FlatGroup.owned_grad` has the reduced gradients, and
        `FlatGroup.reduced_grad_norms` the norms of this rank's own gradients. Gradients that are sharded
        between micro-batches (ZeRO-2, ZeRO-3) are already reduce-scattered."""
        full = [flat for flat in self._flats if not flat.shards_gradients]
        partitioned = [flat for flat in full if flat.partitions > 1]
        replicated = [flat for flat in full if flat.partitions == 1]
        record_norms(replicated)
        started = {id(flat) for flat, _ in self._started}
        self.start([flat for flat in partitioned if id(flat) not in started])
        for _, pending in self._started:
            pending.wait()
        self._started.clear()
        self._all_reduce_packed([flat.owned_grad(parameter) for flat, parameter in self._sequence_parallel])
        if self._dp_group is not None:
            for flat in replicated:
                dist.all_reduce(flat.gradients, group=self._dp_group)
        for flat, parameter, stages in self._tied:
            if (gradient := flat.owned_grad(parameter)).numel():
                dist.all_reduce(gradient, group=stages)
        replicas = [flat.owned_grad(parameter) for flat, parameter in self._replicated]
        if self._tp_group.rank != 0:
            for replica in replicas:
                replica.mul_(0.0)  # x + 0 is exact in any order; NaN * 0 still stops the step on all ranks
        self._all_reduce_packed(replicas)

    def _all_reduce_packed(self, parts: Sequence[Tensor]) -> None:
        """All-reduces many short vectors as one message. `parts` have the same lengths on all TP ranks."""
        if sum(part.numel() for part in parts):
            summed = torch.cat(list(parts))
            dist.all_reduce(summed, group=self._tp_group.group)
            for part, total in zip(parts, summed.split([part.numel() for part in parts]), strict=True):
                part.copy_(total)
