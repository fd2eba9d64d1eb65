"""Weight gradients in a pass of their own, after the backward pass (zero bubble, arXiv 2401.10241).

The backward pass of a linear layer y = x W^T is two matrix products: the input's gradient dy W, which the
stage before waits for, and the weight's gradient dy^T x, which is needed at the end of the step only. With
`DeferredGradients` the backward pass computes the first one, and keeps x and dy for the second one.

`DeferredGradients.take` and `accumulate` compute the weights' gradients later. They are accumulated by
autograd, as those of an undivided backward pass: the sums have the same bits if the micro-batches come in the
same order, and hooks that wait for a gradient are called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.mpu import weight_gradient
from megatron.mpu.compilation import not_compiled

Gradient = Callable[[Tensor], Tensor | None]
"""A function that computes what a backward pass adds to the gradient of a weight; None if it has added it."""
Deferred = list[tuple[Tensor, Gradient]]


class DeferredGradients:
    """Collects what a backward pass leaves for later."""

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
    """`weight_gradient.linear`; the backward pass leaves the weight's gradient to `deferred`, if that is
    given."""
    if deferred is None:
        return weight_gradient.linear(x, weight, bias)
    return _deferring_linear(x, weight, bias, deferred)


@not_compiled  # the graph of a compiled function computes all gradients at once
def _deferring_linear(x: Tensor, weight: Tensor, bias: Tensor | None, deferred: DeferredGradients) -> Tensor:
    if not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    output_gradient: list[Tensor] = []
    # The product itself stays an operation of PyTorch: activation recomputation ends before the last one.
    x = _KeepInput.apply(with_gradient(x), output_gradient, partial(deferred.add, weight))
    y = F.linear(x, weight.detach(), bias)
    y.register_hook(output_gradient.append)
    return y


def with_gradient(x: Tensor) -> Tensor:
    """`x` as an input of a function that defers the gradient of its weight, which gets the weight detached:
    autograd would call the weight's hooks in the backward pass, even without a gradient. So it is `x` that
    makes the backward pass arrive."""
    return x if x.requires_grad else x.detach().requires_grad_()


class _KeepInput(torch.autograd.Function):
    """The identity of the input of `_deferring_linear`. When the backward pass arrives here, the gradient of
    the output is known, and `defer` gets the computation of the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, output_gradient: list[Tensor], defer: Callable[[Gradient], None]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.output_gradient, ctx.defer = output_gradient, defer
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        compute = partial(weight_gradient.weight_gradient, grad=ctx.output_gradient.pop(), x=x.detach())
        ctx.defer(compute)
        return grad, None, None


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
