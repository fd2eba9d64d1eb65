"""The types of the costs of layers and optimizer steps. All of them are frozen and can be pickled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from math import prod
from typing import Any, TypeVar

import torch

from megatron.planner.simulation.passes import Action, Collective, Kernel, Wait

_Action = TypeVar("_Action", bound=Action)
Spec = tuple[tuple[int, ...], torch.dtype]
"""(shape, dtype) of a tensor."""


def spec_bytes(specs: Sequence[Spec]) -> int:
    """Returns the bytes of tensors of these shapes and dtypes."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in specs)


@dataclass(frozen=True)
class PassCost:
    """The cost of a pass of a micro-batch through a layer.

    peak: largest number of allocated bytes during the pass, minus the bytes at its start. change: allocated
    bytes at the end of the pass, minus the bytes at its start.
    """

    actions: tuple[Action, ...] = ()
    peak: int = 0
    change: int = 0


@dataclass(frozen=True)
class LayerCost:
    """The costs of an entry of the layer list, or of several entries that are recomputed together or computed
    with the loss.

    first, end: range of indices in the layer list. weight: the weight-gradient pass of --pipeline-schedule
    zero-bubble. frees_input: bytes of the input that only the caller holds after the forward pass. output:
    shapes and dtypes of the layer's output on this rank.
    """

    first: int
    end: int
    forward: PassCost
    backward: PassCost
    weight: PassCost
    frees_input: int
    output: tuple[Spec, ...]


@dataclass(frozen=True)
class ModelCosts:
    """The costs of a model with few layers.

    tables: bytes that stay allocated between micro-batches, without the state. host: bytes in host memory
    that each micro-batch in flight keeps.
    """

    layers: tuple[LayerCost, ...]
    tables: int
    host: int


@dataclass(frozen=True)
class UpdateCosts:
    """The state of a rank in bytes, and the actions of its optimizer step.

    host: bytes of the state in host memory. reductions: gradient reductions of the buckets of layers, which
    start in the last backward pass, last layers first. reduce: the reductions after that pass. step: the rest
    of the step. gathers: for each bucket the starts of the all-gathers of its weights. chained: whether the
    first layer of a bucket starts the all-gathers of the next bucket; otherwise all of them start at the end
    of the step. peak: largest number of bytes that the step allocates in addition to the state.
    """

    parameters: int
    gradients: int
    optimizer: int
    host: int
    reductions: tuple[tuple[Action, ...], ...]
    reduce: tuple[Action, ...]
    step: tuple[Action, ...]
    gathers: tuple[tuple[Collective, ...], ...]
    chained: bool
    peak: int

    def plus(self, times: float, fewer: UpdateCosts, more: UpdateCosts) -> UpdateCosts:
        """Returns these costs plus `times` x (`more` - `fewer`), for an extrapolation to more layers or
        replicas. The buckets do not change."""

        def extrapolated(size: str) -> int:
            own, few, many = (getattr(costs, size) for costs in (self, fewer, more))
            return round(own + times * (many - few))

        names = ("parameters", "gradients", "optimizer", "host", "peak")
        sizes: dict[str, Any] = {name: extrapolated(name) for name in names}
        reduce = _sum(self.reduce, times, fewer.reduce, more.reduce)
        return replace(self, reduce=reduce, step=_sum(self.step, times, fewer.step, more.step), **sizes)

    def with_buckets(self, buckets: Sequence[Sequence[int]]) -> UpdateCosts:
        """Returns the costs with larger buckets. These costs must have one bucket per layer. buckets: for
        each layer of a new bucket the index of a layer with equal costs."""
        if not buckets or not self.reductions:
            return self
        reductions = self.reductions[::-1]
        return replace(
            self,
            reductions=tuple(_together([reductions[i] for i in layers]) for layers in reversed(buckets)),
            gathers=tuple(_together([self.gathers[i] for i in layers]) for layers in buckets),
        )

    def gathers_and(self, layers: Action) -> list[Action]:
        """Returns the starts of all-gathers at the end of the step, followed by the next forward pass. In
        this pass, each bucket's waits and starts precede the actions of its layers. layers: an action that
        stands for the layers of one bucket."""
        at_once = 1 if self.chained else len(self.gathers)
        actions: list[Action] = list(chain(*self.gathers[:at_once]))
        pending = len(actions)
        for index, starts in enumerate(self.gathers):
            actions += [Wait(pending - 1 - number) for number in range(len(starts))]
            following = self.gathers[index + 1] if self.chained and index + 1 < len(self.gathers) else ()
            pending += len(following) - len(starts)
            actions += [*following, layers]
        return actions

    def between_stages(self, last: int) -> UpdateCosts:
        """Returns the costs in a pipeline whose last rank is `last`: the process group of the tied embedding
        then consists of the pipeline ranks 0 and `last`."""

        def moved(actions: tuple[Action, ...]) -> tuple[Action, ...]:
            return tuple(
                replace(action, group=(0, last))
                if isinstance(action, Collective) and isinstance(action.group, tuple)
                else action
                for action in actions
            )

        return replace(self, reduce=moved(self.reduce), step=moved(self.step))


def _together(parts: Sequence[Sequence[_Action]]) -> tuple[_Action, ...]:
    """Returns the actions of several layers, merged into the actions of one bucket: bytes of equal actions
    are added."""
    numbered, sizes = list(map(_numbered, parts)), defaultdict[tuple[Any, int], float](float)
    for part in numbered:
        for key, action in part.items():
            if isinstance(action, Kernel | Collective):
                sizes[key] += action.bytes
    return tuple(
        replace(action, bytes=sizes[key]) if isinstance(action, Kernel | Collective) else action
        for key, action in max(numbered, key=len).items()
    )


def _numbered(actions: Sequence[_Action]) -> dict[tuple[Any, int], _Action]:
    """Returns the actions by (kind, number of earlier actions of this kind)."""
    found: dict[tuple[Any, int], _Action] = {}
    for action in actions:
        kind = _kind(action)
        found[kind, sum(other == kind for other, _ in found)] = action
    return found


def _kind(action: Action) -> tuple[Any, ...]:
    """Returns what equal actions have in common, apart from their bytes."""
    if isinstance(action, Collective):
        return action.group, action.operation
    return (action.name if isinstance(action, Kernel) else type(action),)


def _sum(
    actions: Sequence[Action], times: float, fewer: Sequence[Action], more: Sequence[Action]
) -> tuple[Action, ...]:
    """Returns `actions` plus `times` x (`more` - `fewer`). It is computed for each kind of action: the first
    action of a kind with the first, the second with the second. Actions that only `actions` has do not
    change. If a kind has different numbers of actions otherwise, their number and total bytes are
    extrapolated, and each action gets the mean bytes. Each collective is followed by its wait."""
    sizes: dict[tuple[Any, ...], tuple[list[float], ...]] = {}
    for index, part in enumerate((actions, more, fewer)):
        for action in part:
            if isinstance(action, Kernel | Collective):
                sizes.setdefault(_kind(action), ([], [], []))[index].append(action.bytes)
    found: list[Action] = []
    for kind, lists in sizes.items():
        if len(lists[0]) >= len(lists[1]) == len(lists[2]):
            columns = zip_longest(*lists, fillvalue=0.0)
            all_bytes = [own + times * (many - few) for own, many, few in columns]
        else:
            number, total = (
                own + times * (many - few) for own, many, few in (map(len, lists), map(sum, lists))
            )
            count = max(round(number), 1)
            all_bytes = [total / count] * count
        for size in all_bytes:
            if len(kind) == 1:
                found.append(Kernel(kind[0], 0.0, size))
            else:
                found += [Collective(kind[0], kind[1], size), Wait(0)]
    return tuple(found)
