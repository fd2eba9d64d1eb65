"""The linear layer of experts: one product per expert, with the gradients of `layers.linear`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.grouped_linear import Groups, multiply_groups, multiply_within_groups, sum_groups
from megatron.kernels.operators import first_order, keep_input, take_input
from megatron.mpu.compilation import not_compiled
from megatron.mpu.deferred_gradients import DeferredGradients, ensure_requires_grad
from megatron.mpu.parameters import main_grad_of
from megatron.mpu.weight_gradient import Gradient


@not_compiled
def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    deferred: DeferredGradients | None = None,
) -> Tensor:
    """Returns x_e @ weight[e].T + bias[e] for the rows x_e of each expert e: [N, n_in] -> [N, n_out].

    x: sorted by expert, with the numbers of rows in `groups`. weight: [experts, n_out, n_in]. bias: [experts,
    n_out]. The gradients of an expert without rows are zero. deferred: a queue for the weight's gradient.
    """
    if sum(groups.counts) != len(x) or len(groups.counts) != len(weight):
        raise ValueError(f"{len(x)} rows of {len(weight)} experts, but the groups are {groups.counts}")
    if not torch.is_grad_enabled():
        return multiply_groups(x.contiguous(), weight, bias, groups)
    if deferred is None:
        return _GroupedLinear.apply(x, weight, bias, groups, None)
    return _GroupedLinear.apply(
        ensure_requires_grad(x), weight.detach(), bias, groups, partial(deferred.add, weight)
    )


@first_order
class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        groups: Groups,
        defer: Callable[[Gradient], None] | None,
    ) -> Tensor:
        x = x.contiguous()
        keep_input(ctx, x)
        ctx.weight, ctx.groups, ctx.defer = weight, groups, defer
        return multiply_groups(x, weight, bias, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A gradient may be an expanded tensor, whose strides products of groups do not take.
        x, grad, groups = take_input(ctx), grad.contiguous(), ctx.groups
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = multiply_groups(grad, ctx.weight, None, groups, transposed=True)
        compute = partial(_weight_gradient, grad=grad, x=x.detach(), groups=groups)
        if ctx.defer is not None:
            ctx.defer(compute)
        elif ctx.needs_input_grad[1]:
            grad_weight = compute(ctx.weight)
        grad_bias = sum_groups(grad, groups) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None


def _weight_gradient(weight: Tensor, grad: Tensor, x: Tensor, groups: Groups) -> Tensor | None:
    """Returns the gradient of `weight` from grad [N, n_out] and x [N, n_in]; None if it was added to
    `main_grad`."""
    return multiply_within_groups(grad, x, groups, main_grad_of(weight))
