"""What the layers of a run and its optimizer step cost. All types are frozen and can be pickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from megatron.planner.simulation.passes import Action, Collective, Kernel, Wait

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


def spec_bytes(specs: Sequence[Spec]) -> int:
    """Bytes of tensors of these shapes and dtypes."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in specs)


@dataclass(frozen=True)
class PassCost:
    """A pass of a micro-batch through a layer.

    peak: the most bytes that are allocated, beyond those at its begin. change: the bytes at its end, minus
    those at its begin.
    """

    actions: tuple[Action, ...] = ()
    peak: int = 0
    change: int = 0


@dataclass(frozen=True)
class LayerCost:
    """An entry of the layer list; several, if they are recomputed together or computed with the loss.

    first, end: indices in the layer list. frees_input: bytes of the input that nothing holds when the forward
    pass has ended, but the caller. output: shapes and dtypes of what the layer returns, on this rank.
    """

    first: int
    end: int
    forward: PassCost
    backward: PassCost
    frees_input: int
    output: tuple[Spec, ...]


@dataclass(frozen=True)
class ModelCosts:
    """The costs of a model of few layers.

    weight: the pass that computes the gradients that the backward pass has left, of all layers together
    (--pipeline-schedule zero-bubble). tables: bytes that stay allocated between micro-batches and are not
    state. host: bytes that a micro-batch in flight keeps in host memory.
    """

    layers: tuple[LayerCost, ...]
    weight: PassCost
    tables: int
    host: int


@dataclass(frozen=True)
class UpdateCosts:
    """The state of a rank, in bytes, and what its optimizer step does.

    host: state in host memory. reductions: of the buckets of layers, started in the last backward pass, the
    last layers first. reduce: the reduction after that. step: the rest of the step. gathers: the all-gathers
    of the weights of the buckets, in the order of the layers; the next forward pass waits for them. peak: the
    most bytes that are allocated during the step, beyond the state.
    """

    parameters: int
    gradients: int
    optimizer: int
    host: int
    reductions: tuple[tuple[Action, ...], ...]
    reduce: tuple[Action, ...]
    step: tuple[Action, ...]
    gathers: tuple[tuple[Action, ...], ...]
    peak: int

    def plus(self, times: float, fewer: UpdateCosts, more: UpdateCosts) -> UpdateCosts:
        """These costs and `times` the difference of two others; their buckets stay."""

        def extrapolated(own: int, few: int, many: int) -> int:
            return round(own + times * (many - few))

        return replace(
            self,
            parameters=extrapolated(self.parameters, fewer.parameters, more.parameters),
            gradients=extrapolated(self.gradients, fewer.gradients, more.gradients),
            optimizer=extrapolated(self.optimizer, fewer.optimizer, more.optimizer),
            host=extrapolated(self.host, fewer.host, more.host),
            peak=extrapolated(self.peak, fewer.peak, more.peak),
            reduce=_sum(self.reduce, times, fewer.reduce, more.reduce),
            step=_sum(self.step, times, fewer.step, more.step),
        )

    def with_buckets(self, layers: Sequence[int]) -> UpdateCosts:
        """The costs with other buckets, instead of a bucket of each layer. layers: of each bucket."""
        if not layers or not self.reductions:
            return self
        return replace(
            self,
            reductions=tuple(_scaled(self.reductions[-1], count) for count in reversed(layers)),
            gathers=tuple(_scaled(self.gathers[-1], count) for count in layers),
        )

    def between_stages(self, last: int) -> UpdateCosts:
        """The costs in a pipeline whose last rank is `last`: the group of the tied embedding has rank 0 and
        that one."""

        def moved(actions: tuple[Action, ...]) -> tuple[Action, ...]:
            return tuple(
                replace(action, group=(0, last))
                if isinstance(action, Collective) and isinstance(action.group, tuple)
                else action
                for action in actions
            )

        return replace(self, reduce=moved(self.reduce), step=moved(self.step))


def _scaled(actions: Sequence[Action], factor: float) -> tuple[Action, ...]:
    """The actions with `factor` times as many bytes."""
    return tuple(
        replace(action, bytes=factor * action.bytes) if isinstance(action, Kernel | Collective) else action
        for action in actions
    )


def _sum(
    actions: Sequence[Action], times: float, fewer: Sequence[Action], more: Sequence[Action]
) -> tuple[Action, ...]:
    """The actions and `times` the difference of two others, by kind: as many equal actions as there are then,
    with the bytes of all. Each collective is waited for at once."""
    sums: dict[tuple[Any, ...], list[float]] = {}
    for factor, part in ((1.0, actions), (times, more), (-times, fewer)):
        for action in part:
            if isinstance(action, Kernel | Collective):
                kind = (action.name,) if isinstance(action, Kernel) else (action.group, action.operation)
                entry = sums.setdefault(kind, [0.0, 0.0])
                entry[0] += factor
                entry[1] += factor * action.bytes
    found: list[Action] = []
    for kind, (number, size) in sums.items():
        count = max(round(number), 1)
        if len(kind) == 1:
            found += [Kernel(kind[0], 0.0, size / count)] * count
        else:
            found += [Collective(*kind, size / count), Wait(0)] * count
    return tuple(found)
