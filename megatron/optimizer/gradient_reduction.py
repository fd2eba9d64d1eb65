"""Sums of gradients over ranks, after which copies of a parameter have equal gradients, to the last bit.

Of a back-end one thing is asked: all members of a process group receive the same bits from one all-reduce.
Two groups, or buffers of two lengths, may be summed in different orders, so no two such sums are taken to be
equal. In this order:

1. Gradients that each tensor rank has computed a part of (--sequence-parallel) are summed over tensor ranks.
2. Each flat buffer is summed over the data-parallel replicas: equal on the replicas of one stage and tensor
   rank, which are the members of one group.
3. The two copies of a tied parameter are added over their two stages: a + b has one result in any order.
   Before step 2 it would not help: the stages' buffers have different lengths.
4. Of a parameter that tensor ranks hold whole, all take the gradient of tensor rank 0.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import is_sequence_parallel_grad, spec_of
from megatron.optimizer.flat_group import FlatGroup


class GradientReduction:
    """The sums of a step over the ranks that hold parts and copies of `flats`."""

    def __init__(
        self,
        flats: Sequence[FlatGroup],
        dp_group: dist.ProcessGroup | None,
        tied: Sequence[tuple[nn.Parameter, dist.ProcessGroup]],
        tp_group: TPGroup,
    ) -> None:
        """`dp_group`: None for one replica. `tied`: parameters with a copy on
        another stage, and the group of both. ValueError for a parameter on more than two stages."""
        self._flats, self._dp_group, self._tied, self._tp_group = list(flats), dp_group, list(tied), tp_group
        for parameter, stages in self._tied:
            if dist.get_world_size(stages) != 2:
                raise ValueError(
                    f"a tied parameter of shape {tuple(parameter.shape)} is on {dist.get_world_size(stages)} "
                    "stages: expected 2, since the sum of more depends on its order"
                )
        held = [(flat, parameter) for flat in flats for parameter in flat.parameters]
        self._partial = [pair for pair in held if is_sequence_parallel_grad(pair[1])]
        self._replicated = [pair for pair in held if tp_group.size > 1 and spec_of(pair[1]).shard_dim is None]

    @property
    def exchanges(self) -> bool:
        """Whether any gradient of this rank changes; if not, `run` does nothing."""
        return self._dp_group is not None or bool(self._tied or self._replicated)

    @torch.no_grad()
    def run(self) -> None:
        """The four steps above, in place. Collective. Gradients that the replicas share out are summed over
        them already."""
        self._sum_over_tensor_ranks([flat.local_grad(parameter) for flat, parameter in self._partial])
        if self._dp_group is not None:
            for flat in self._flats:
                if not flat.shards_gradients:
                    dist.all_reduce(flat.gradients, group=self._dp_group)
        for parameter, stages in self._tied:
            dist.all_reduce(parameter.main_grad, group=stages)
        copies = [flat.local_grad(parameter) for flat, parameter in self._replicated]
        if self._tp_group.rank != 0:
            for copy in copies:
                copy.mul_(0.0)  # x + 0 is exact in any order; NaN * 0 still stops the step on all ranks
        self._sum_over_tensor_ranks(copies)

    def _sum_over_tensor_ranks(self, parts: Sequence[Tensor]) -> None:
        """Many short vectors as one message. Tensor ranks own the same parts of replicated parameters."""
        if sum(part.numel() for part in parts):
            summed = torch.cat(list(parts))
            dist.all_reduce(summed, group=self._tp_group.group)
            for part, total in zip(parts, summed.split([part.numel() for part in parts]), strict=True):
                part.copy_(total)
