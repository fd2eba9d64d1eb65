"""Sends tokens to the experts that they chose, and returns the experts' outputs: the dispatch of expert
layers.

Each token chooses k experts and therefore becomes k rows. `dispatch` sorts the rows by expert and sends each
row to the rank that holds the expert. `combine` sends the results back and sums the results of each token.
Two dispatchers have this interface (--moe-token-dispatcher-type); a back end such as DeepEP would be a third:

    AllToAll     exchanges the rows, k per token, by two all-to-alls in each pass
    AllGather    gathers all tokens on each rank, computes the rows of its experts, and reduce-scatters the
                 weighted results

All orders are fixed, so no result depends on timing: the rows of an expert are ordered by rank and then by
token, and the k results of a token are added in the order of the experts' ids, in fp32, without atomics. A
rank without rows takes part in all exchanges. No token is dropped, and no row is padding.

Shapes: T = tokens of this rank, k = experts per token, E = experts, R = ranks that share the experts, N =
rows that this rank computes, h = hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron.kernels.grouped_linear import Groups
from megatron.kernels.operators import first_order
from megatron.mpu.mappings import (
    all_gather_sequence,
    reduce_scatter_sequence,
    reduce_scatter_to_sequence_region,
)
from megatron.mpu.mesh import Axis


@dataclass(frozen=True)
class Routing:
    """The experts that a rank's tokens chose.

    experts: int64 [T, k], ascending for each token. weights: fp32 [T, k]. tokens: int64 [E], number of rows
    of each expert. counts: the values of `tokens`, if they are known on the host and equal on all ranks
    (--moe-router-force-load-balancing); otherwise None. read: the row counts that the dispatcher has read on
    the host. A recomputed pass uses them, so it neither exchanges them again nor waits for the device.
    """

    experts: Tensor
    weights: Tensor
    tokens: Tensor
    counts: tuple[int, ...] | None = None
    read: list[Any] = field(default_factory=list)

    def read_once(self, read: Callable[[], Any]) -> Any:
        """Returns read(). A recomputed pass gets the result of the first pass."""
        if not self.read:
            self.read.append(read())
        return self.read[0]


class Dispatcher(ABC):
    """Sends tokens to the experts of an expert-parallel group. Each rank of the group holds consecutive
    experts."""

    def __init__(self, ep_group: Axis, num_experts: int) -> None:
        self.ep_group, self.num_experts = ep_group, num_experts
        self.num_local = num_experts // ep_group.size

    @abstractmethod
    def dispatch(self, hidden: Tensor, routing: Routing) -> tuple[Tensor, Groups, Any]:
        """Returns the rows [N, h] of hidden [T, h], ordered by local expert, their number per expert, and the
        state that `combine` needs. It is a collective."""

    @abstractmethod
    def combine(self, rows: Tensor, routing: Routing, state: Any) -> Tensor:
        """Returns the weighted sum of each token's expert outputs, fp32 [T, h]. rows: [N, h]. It is a
        collective."""


class AllToAll(Dispatcher):
    """Sends each row to the rank of its expert. On one rank it only sorts the rows."""

    def dispatch(self, hidden: Tensor, routing: Routing) -> tuple[Tensor, Groups, Any]:
        order, inverse = sorted_by(routing.experts.flatten(), self.num_experts)
        rows = _Expand.apply(hidden, order, inverse, routing.experts.shape[1])
        if self.ep_group.size == 1:
            counts = routing.counts or routing.read_once(lambda: tuple(routing.tokens.tolist()))
            return rows, Groups(counts), (order, inverse, None)
        sent, received = routing.read_once(lambda: self._exchange_counts(routing))
        splits = [sum(part) for part in sent], [sum(part) for part in received]
        rows = _AllToAll.apply(rows, *splits, self.ep_group)
        # The received rows are ordered by rank, and then by expert.
        local = torch.arange(self.num_local, device=rows.device).repeat(self.ep_group.size)
        pinned = get_accelerator().pin_memory(torch.tensor(received).flatten())
        numbers = pinned.to(rows.device, non_blocking=True)
        ids = local.repeat_interleave(numbers, output_size=sum(splits[1]))
        by_expert = sorted_by(ids, self.num_local)
        rows = _Permute.apply(rows, *by_expert)
        groups = Groups(tuple(map(sum, zip(*received, strict=True))))
        return rows, groups, (order, inverse, (by_expert, splits))

    def _exchange_counts(self, routing: Routing) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the numbers of rows that this rank sends and receives, each as [rank][local expert]."""
        shape = (self.ep_group.size, self.num_local)
        if routing.counts is not None:
            sent = torch.tensor(routing.counts).view(shape).tolist()
            return sent, [sent[self.ep_group.rank]] * self.ep_group.size
        received = torch.empty_like(routing.tokens)
        dist.all_to_all_single(received, routing.tokens, group=self.ep_group.group)
        both = torch.stack((routing.tokens, received)).view(2, *shape).tolist()
        return both[0], both[1]

    def combine(self, rows: Tensor, routing: Routing, state: Any) -> Tensor:
        order, inverse, exchange = state
        if exchange is not None:
            (by_expert, back), (sent, received) = exchange
            rows = _AllToAll.apply(_Permute.apply(rows, back, by_expert), received, sent, self.ep_group)
        return _Combine.apply(rows, routing.weights, order, inverse)


class AllGather(Dispatcher):
    """Gathers the tokens of all ranks, and reduce-scatters the weighted sums of each rank's experts."""

    def dispatch(self, hidden: Tensor, routing: Routing) -> tuple[Tensor, Groups, Any]:
        hidden = gather_from_ranks(hidden, self.ep_group)
        weights = gather_from_ranks(routing.weights, self.ep_group)
        experts = routing.experts
        if self.ep_group.size > 1:
            experts, pending = all_gather_sequence(experts, self.ep_group)
            pending.wait()
        first = self.ep_group.rank * self.num_local
        local = (experts - first).flatten()
        # The rows of other ranks' experts come last, and are not computed.
        is_local = (local >= 0) & (local < self.num_local)
        ids = torch.where(is_local, local, self.num_local)
        order, inverse = sorted_by(ids, self.num_local + 1)
        if routing.counts is None:
            counts = routing.read_once(lambda: tuple(count_experts(ids, self.num_local + 1).tolist()[:-1]))
        else:
            own = routing.counts[first : first + self.num_local]
            counts = tuple(count * self.ep_group.size for count in own)
        rows = _Expand.apply(hidden, order[: sum(counts)], inverse, experts.shape[1])
        return rows, Groups(counts), (weights, order, inverse)

    def combine(self, rows: Tensor, routing: Routing, state: Any) -> Tensor:
        weights, order, inverse = state
        sums = _Combine.apply(rows, weights, order[: len(rows)], inverse)
        return reduce_scatter_to_sequence_region(sums, self.ep_group)


DISPATCHERS: dict[str, type[Dispatcher]] = {"alltoall": AllToAll, "allgather": AllGather}
"""The classes that --moe-token-dispatcher-type selects."""


def sorted_by(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns the stable order that sorts `ids`, which are 0 to size - 1, and the inverse order: the new
    position of each row."""
    order = ids.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return order, inverse


def count_experts(ids: Tensor, size: int) -> Tensor:
    """Returns the number of each id, int64 [..., size], in ids [..., n]. The counts are exact in any
    order."""
    counts = ids.new_zeros(*ids.shape[:-1], size)
    return counts.scatter_add_(-1, ids, torch.ones_like(ids))


def gather_from_ranks(x: Tensor, ep_group: Axis) -> Tensor:
    """All-gathers rows of tokens. The backward pass reduce-scatters their gradients."""
    return x if ep_group.size == 1 else _GatherTokens.apply(x, ep_group)


@first_order
class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ep_group: Axis) -> Tensor:
        ctx.ep_group = ep_group
        full, pending = all_gather_sequence(x, ep_group)
        pending.wait()
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # The sum is in fp32, because gradients of a token come from several ranks.
        part, pending = reduce_scatter_sequence(grad.float(), ctx.ep_group)
        pending.wait()
        return part.to(grad.dtype), None


@first_order
class _AllToAll(torch.autograd.Function):
    """Exchanges rows. sent, received: number of rows that go to, or come from, each rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], ep_group: Axis) -> Tensor:
        ctx.sent, ctx.received, ctx.ep_group = sent, received, ep_group
        return _exchange(rows, sent, received, ep_group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, ctx.received, ctx.sent, ctx.ep_group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], ep_group: Axis) -> Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=ep_group.group)
    return result


@first_order
class _Permute(torch.autograd.Function):
    """Returns rows[order]. The backward pass reads with the inverse order; autograd's would add with
    atomics."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.saved_tensors[0]], None, None


@first_order
class _Expand(torch.autograd.Function):
    """Returns the rows of hidden [T, h] that `order` selects: n of the T k rows. inverse: int64 [T k], the
    position of each row in the result; rows with a position from n on are not in the result. The backward
    pass sums each token's rows, in the order of the experts, in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return hidden[order.div(k, rounding_mode="floor")]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _sum_of_rows(grad, inverse.view(-1, ctx.k)).to(grad.dtype), None, None, None


@first_order
class _Combine(torch.autograd.Function):
    """Returns the weighted sum of each token's rows, fp32 [T, h]. rows: [n, h]. weights: [T, k]. See
    `_Expand`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        return _sum_of_rows(rows, inverse.view(weights.shape), weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order, inverse = ctx.saved_tensors
        grad_rows, dots = torch.empty_like(rows), weights.new_empty(len(rows))
        # Computes as many rows at a time as there are tokens: fp32 products of all rows would take k times
        # the memory.
        parts = (x.split(max(len(grad), 1)) for x in (order, rows, grad_rows, dots))
        for places, row, grad_row, dot in zip(*parts, strict=True):
            of_rows = grad[places.div(weights.shape[1], rounding_mode="floor")]
            torch.mul(of_rows, weights.flatten()[places].unsqueeze(1), out=grad_row)
            torch.sum(of_rows.mul_(row), 1, out=dot)
        return grad_rows, _rows_or_zero(dots, inverse).view(weights.shape), None, None


def _sum_of_rows(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Returns the sum of each token's rows, fp32 [T, h], added one after the other. places: the rows'
    indices, [T, k]. weights: if given, a factor for each row, fp32 [T, k]."""
    is_complete = len(rows) == places.numel()
    total = rows.new_zeros(len(places), rows.shape[1], dtype=torch.float32)
    for index, place in enumerate(places.unbind(1)):
        part = rows[place] if is_complete else _rows_or_zero(rows, place)
        if weights is None:
            total += part
        else:
            total.addcmul_(part.float(), weights[:, index : index + 1])
    return total


def _rows_or_zero(rows: Tensor, places: Tensor) -> Tensor:
    """Returns the rows at `places`. A place after the last row gives zeros."""
    if len(rows) == 0:
        return rows.new_zeros(len(places), *rows.shape[1:])
    found = rows[places.clamp(max=len(rows) - 1)]
    is_there = (places < len(rows)).view(-1, *[1] * (rows.dim() - 1))
    return torch.where(is_there, found, 0)
