"""Weight gradients in a pass of their own, after the backward pass (zero bubble, arXiv 2401.10241).

The backward pass of a linear layer y = x W^T is two matrix products: the input's gradient dy W, which the
stage before waits for, and the weight's gradient dy^T x, which is needed at the end of the step only. With
`DeferredGradients` the backward pass computes the first one, and keeps x and dy for the second one.

`DeferredGradients.take` and `accumulate` compute the weights' gradients later. They are accumulated by
autograd, as those of an undivided backward pass: the sums have the same bits if the micro-batches come in the
same order, and hooks that wait for a gradient are called.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.mpu import weight_gradient
from megatron.mpu.compilation import not_compiled
from megatron.mpu.weight_gradient import Gradient

Deferred = list[tuple[Tensor, Gradient]]


class DeferredGradients:
    """A queue of the weight gradients that a backward pass has not computed."""

    def __init__(self) -> None:
        self._deferred: Deferred = []

    def add(self, weight: Tensor, gradient: Gradient) -> None:
        """Adds the gradient of a weight, not computed yet. The tensors of `gradient` have no graph: it would
        keep the stage's input."""
        self._deferred.append((weight, gradient))

    def take(self) -> Deferred:
        """What was added since the last call, in this order."""
        taken, self._deferred = self._deferred, []
        return taken


def accumulate(deferred: Deferred) -> None:
    """Computes the gradients in order and accumulates them in their weights. Empties the list, so that what a
    gradient was computed from is freed at once."""
    while deferred:
        output = _Accumulate.apply(*deferred.pop(0))
        output.backward(output.detach())  # a gradient that is not read


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, deferred: DeferredGradients | None) -> Tensor:
    """`weight_gradient.linear`; with `deferred` the backward pass queues the weight's gradient there."""
    if deferred is None or not torch.is_grad_enabled():
        return weight_gradient.linear(x, weight, bias)
    return _deferring_linear(x, weight, bias, deferred)


@not_compiled  # the graph of a compiled function computes all gradients at once
def _deferring_linear(x: Tensor, weight: Tensor, bias: Tensor | None, deferred: DeferredGradients) -> Tensor:
    return weight_gradient.linear(with_gradient(x), weight, bias, partial(deferred.add, weight))


def with_gradient(x: Tensor) -> Tensor:
    """`x` as an input of a function that defers the gradient of its weight. The weight is passed detached:
    autograd would call its hooks in the backward pass, even without a gradient. So `x` must require a
    gradient, or no backward pass runs."""
    return x if x.requires_grad else x.detach().requires_grad_()


class _Accumulate(torch.autograd.Function):
    """A function whose backward pass gives `weight` the gradient that `gradient` computes."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Gradient) -> Tensor:
        ctx.weight, ctx.gradient = weight, gradient
        return weight.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient(ctx.weight), None
