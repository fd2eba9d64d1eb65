"""Deferred weight gradients: the split backward pass of zero-bubble schedules (arXiv 2401.10241).

The backward pass of a linear layer y = x W^T has two matrix products: the input's gradient dy W, which the
previous stage waits for, and the weight's gradient dy^T x, which is needed only at the end of the step. With
`DeferredGradients` the backward pass (B) computes only the first product, and keeps x and dy for the second.

`DeferredGradients.take` and `accumulate` compute the weight gradients later (W). Autograd accumulates them as
it does without the split: the sums have the same bits if the micro-batches come in the same order, and hooks
that wait for a gradient are called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.operators import first_order
from megatron.mpu.weight_gradient import Gradient

Deferred = list[tuple[Tensor, Gradient]]


class DeferredGradients:
    """A queue of the weight gradients that a backward pass has deferred."""

    def __init__(self) -> None:
        self._deferred: Deferred = []

    def add(self, weight: Tensor, gradient: Gradient) -> None:
        """Queues the gradient of a weight, to be computed later. The tensors of `gradient` must have no
        graph, which would keep the stage's input in memory."""
        self._deferred.append((weight, gradient))

    def take(self) -> Deferred:
        """Returns and clears the queue, in the order of the calls of `add`."""
        taken, self._deferred = self._deferred, []
        return taken


def accumulate(deferred: Deferred) -> None:
    """Computes the gradients in order and accumulates them in their weights. Empties the list, to free each
    gradient's inputs as soon as they are used."""
    while deferred:
        output = _Accumulate.apply(*deferred.pop(0))
        output.backward(output.detach())  # the gradient's values are not read


def ensure_requires_grad(x: Tensor) -> Tensor:
    """Returns `x`, detached if necessary so that it requires a gradient. A function that defers a weight's
    gradient gets the weight detached: autograd would call the weight's hooks in the backward pass, even
    without a gradient. So the input must require a gradient, or no backward pass runs."""
    return x if x.requires_grad else x.detach().requires_grad_()


@first_order
class _Accumulate(torch.autograd.Function):
    """A function whose backward pass gives `weight` the gradient that `gradient` computes."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Gradient) -> Tensor:
        ctx.weight, ctx.gradient = weight, gradient
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient(ctx.weight), None
