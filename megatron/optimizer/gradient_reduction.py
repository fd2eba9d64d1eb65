"""Reduction of the gradients over ranks. It gives all replicas of a parameter bitwise equal gradients.

The only assumption about the communication backend is that all members of a process group receive the same
bits from an all-reduce. Two groups, two buffers of different lengths, or a reduce-scatter may sum in
different orders and round differently.

With ZeRO each element is summed, and afterwards used, only on one data-parallel rank, its owner. The steps:

1. Each flat buffer is reduce-scattered over the data-parallel group into the owners' partitions. All other
   steps work on the owned elements. Flat buffers have the same layout on all tensor-parallel ranks, so all
   ranks of a tensor-parallel group own the same elements.
2. Sequence-parallel gradients are partial on each tensor-parallel rank; they are summed over TP.
3. The two replicas of a tied parameter are added over their two stages: a + b has the same bits in both
   orders. The parameter has its own flat buffer (`parameter_groups`), so both stages divide it into the
   same partitions.
4. For parameters that are replicated over tensor-parallel ranks, all ranks take the gradient of TP rank 0.

Without ZeRO every data-parallel rank uses all elements, and the tensor-parallel groups of step 2 differ
between these ranks. Therefore step 2 comes first. Then an all-reduce of each flat buffer over the
data-parallel group gives its members equal bits. Step 3 must follow this all-reduce, since the buffers of the
two stages have different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.mpu.mesh import Axis
from megatron.mpu.parameters import is_sequence_parallel_grad, is_tp_replicated
from megatron.optimizer.flat_group import FlatGroup, Pending
from megatron.optimizer.gradient_norm import record_norms


class GradientReduction:
    """Reduces the gradients of `flats` once per step."""

    def __init__(
        self,
        flats: Sequence[FlatGroup],
        tied: Sequence[tuple[nn.Parameter, dist.ProcessGroup]],
        tp_group: Axis,
    ) -> None:
        """tied: parameters with a replica on another stage, and the process group of the two stages. Raises
        ValueError for a parameter that is on three or more stages."""
        self._flats, self._tp_group = list(flats), tp_group
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
        self._started: list[tuple[FlatGroup, Pending]] = []
        self._replicated = [pair for pair in held if tp_group.size > 1 and is_tp_replicated(pair[1])]

    @property
    def exchanges(self) -> bool:
        """Whether `run` changes any gradient of this rank."""
        is_reduced = any(flat.axis.size > 1 for flat in self._flats)
        return is_reduced or bool(self._tied or self._replicated)

    @torch.no_grad()
    def start(self, flats: Sequence[FlatGroup]) -> None:
        """Starts the reduce-scatters of partitioned groups whose gradients are final in this step. `run`
        waits for them. It is a collective that all ranks of the data-parallel group must call in the same
        order."""
        _complete(flats)
        self._started += [(flat, flat.reduce_scatter_grads()) for flat in flats]

    @torch.no_grad()
    def run(self) -> None:
        """Runs the steps of the module's docstring. It is a collective. Afterwards `FlatGroup.owned_grad`
        returns the reduced gradients, and `FlatGroup.reduced_grad_norms` holds the norms of this rank's
        gradients before the reduction. Gradients that are sharded between micro-batches (ZeRO-2, ZeRO-3) must
        already be reduce-scattered."""
        full = [flat for flat in self._flats if not flat.shards_gradients]
        partitioned = [flat for flat in full if flat.partitions > 1]
        replicated = [flat for flat in full if flat.partitions == 1]
        _complete(replicated)
        for flat in self._flats:
            if flat.shards_gradients:
                flat.complete_gradients()
        started = {id(flat) for flat, _ in self._started}
        self.start([flat for flat in partitioned if id(flat) not in started])
        for _, pending in self._started:
            pending.wait()
        self._started.clear()
        self._all_reduce_packed([flat.owned_grad(parameter) for flat, parameter in self._sequence_parallel])
        for flat in replicated:
            if flat.axis.size > 1:
                dist.all_reduce(flat.gradients, group=flat.axis.group)
        for flat, parameter, stages in self._tied:
            if (gradient := flat.owned_grad(parameter)).numel():
                dist.all_reduce(gradient, group=stages)
        replicas = [flat.owned_grad(parameter) for flat, parameter in self._replicated]
        if self._tp_group.rank != 0:
            for replica in replicas:
                replica.mul_(0.0)  # sums with 0 are exact; NaN * 0 still stops the step on all ranks
        self._all_reduce_packed(replicas)

    def _all_reduce_packed(self, parts: Sequence[Tensor]) -> None:
        """All-reduces many short vectors as one message. parts: vectors with equal lengths on all TP
        ranks."""
        if sum(part.numel() for part in parts):
            summed = torch.cat(list(parts))
            dist.all_reduce(summed, group=self._tp_group.group)
            for part, total in zip(parts, summed.split([part.numel() for part in parts]), strict=True):
                part.copy_(total)


def _complete(flats: Sequence[FlatGroup]) -> None:
    """Completes this rank's full gradients and their norms. It is called when they are final."""
    for flat in flats:
        flat.complete_gradients()
    record_norms(flats)
