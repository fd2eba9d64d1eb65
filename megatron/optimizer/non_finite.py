"""Where a gradient is not finite: the parameters and ranks, for the message of a step that was not taken."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from megatron.optimizer.flat_group import FlatGroup
from megatron.optimizer.zero import OptimizerProcessGroups
from megatron.text_table import first_few

_SHOWN_RANKS = 4


def finite_after_reduction(
    flats: Sequence[FlatGroup], names: Mapping[nn.Parameter, str], groups: OptimizerProcessGroups
) -> set[str]:
    """Names of the parameters with sharded gradients (ZeRO-2, ZeRO-3) whose sums over the replicas are
    finite. Collective."""
    sharded = [(flat, p) for flat in flats if flat.shards_gradients for p in flat.parameters]
    if not sharded:
        return set()
    bad = [names[p] for flat, p in sharded if not flat.owned_grad(p).isfinite().all()]
    of_ranks: list[list[str]] = [[] for _ in range(groups.dp_size)]
    dist.all_gather_object(of_ranks, bad, group=groups.data)
    return {names[p] for _, p in sharded}.difference(*of_ranks)


def where_not_finite(bad: Sequence[str], groups: OptimizerProcessGroups, loss: Tensor | None) -> str:
    """The first ranks with parameters `bad`, as one text for all ranks. Collective.

    bad: names of this rank's parameters whose gradient is not finite. loss: of this rank, if it has one.
    """
    report = f"{groups.description}: {first_few(bad, limit=1)}" if bad else None
    if report and loss is not None and not loss.isfinite():
        report += f", with a loss of {loss.item()}"
    reports = [report]
    if dist.is_initialized() and dist.get_world_size() > 1:
        reports = [None] * dist.get_world_size()
        dist.all_gather_object(reports, report)
    culprits = [r for r in reports if r]
    hidden = len(culprits) - _SHOWN_RANKS
    where = "; ".join(culprits[:_SHOWN_RANKS]) or "in the sum over ranks only, which overflowed fp32"
    return where + (f"; and on {hidden} more ranks" if hidden > 0 else "")
