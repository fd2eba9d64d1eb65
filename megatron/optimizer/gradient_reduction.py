"""Reduction of the gradients over ranks. Afterwards all replicas of a parameter have bitwise equal gradients.

Assumption about the communication backend: all members of a process group receive the same bits from an
all-reduce. Nothing more is assumed: two groups, or buffers of different lengths, may sum in different orders
and round differently. The steps, in this order:

1. Sequence-parallel gradients: each tensor-parallel rank has a partial gradient; they are summed over TP.
2. Each flat buffer is summed over the data-parallel group. The result is bitwise equal on its members, the
   replicas of one stage and one tensor-parallel rank.
3. The two replicas of a tied parameter are added over their two stages: a + b has the same bits in both
   orders. This must come after step 2, since the buffers of the two stages have different lengths.
4. Parameters replicated over tensor-parallel ranks: all ranks take the gradient of TP rank 0.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import is_sequence_parallel_grad, spec_of
from megatron.optimizer.flat_group import FlatGroup


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
        self._flats, self._dp_group, self._tied, self._tp_group = list(flats), dp_group, list(tied), tp_group
        for parameter, stages in self._tied:
            if dist.get_world_size(stages) != 2:
                raise ValueError(
                    f"a tied parameter of shape {tuple(parameter.shape)} is on {dist.get_world_size(stages)} "
                    "stages: expected 2, since the sum of more depends on its order"
                )
        held = [(flat, parameter) for flat in flats for parameter in flat.parameters]
        self._sequence_parallel = [pair for pair in held if is_sequence_parallel_grad(pair[1])]
        self._replicated = [pair for pair in held if tp_group.size > 1 and spec_of(pair[1]).shard_dim is None]

    @property
    def exchanges(self) -> bool:
        """Whether `run` changes any gradient of this rank."""
        return self._dp_group is not None or bool(self._tied or self._replicated)

    @torch.no_grad()
    def run(self) -> None:
        """The four steps above, in place. Collective. Sharded gradients (ZeRO-2, ZeRO-3) are already summed
        over the data-parallel group; step 2 skips them."""
        self._all_reduce_packed([flat.local_grad(parameter) for flat, parameter in self._sequence_parallel])
        if self._dp_group is not None:
            for flat in self._flats:
                if not flat.shards_gradients:
                    dist.all_reduce(flat.gradients, group=self._dp_group)
        for parameter, stages in self._tied:
            dist.all_reduce(parameter.main_grad, group=stages)
        replicas = [flat.local_grad(parameter) for flat, parameter in self._replicated]
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
