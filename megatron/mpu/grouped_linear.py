"""The linear layer of experts: one product per expert, with the gradients of `layers.linear`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.grouped_linear import (
    Groups,
    add_products_within_groups,
    adds_products,
    multiply_within_groups,
    sum_groups,
)
from megatron.kernels.operators import first_order, keep_input, take_input
from megatron.mpu.compilation import not_compiled
from megatron.mpu.deferred_gradients import DeferredGradients, ensure_requires_grad
from megatron.mpu.parameters import has_main_grad, next_main_grad
from megatron.mpu.products import PLAIN, Products
from megatron.mpu.weight_gradient import Gradient


@not_compiled
def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    deferred: DeferredGradients | None = None,
    products: Products = PLAIN,
) -> Tensor:
    """Returns x_e @ weight[e].T + bias[e] for the rows x_e of each expert e: [N, n_in] -> [N, n_out].

    x: sorted by expert, with the numbers of rows in `groups`. weight: [experts, n_out, n_in]. bias: [experts,
    n_out]. The gradients of an expert without rows are zero. deferred: a queue for the weight's gradient.
    """
    if sum(groups.counts) != len(x) or len(groups.counts) != len(weight):
        raise ValueError(f"{len(x)} rows of {len(weight)} experts, but the groups are {groups.counts}")
    if not torch.is_grad_enabled():
        return products.output(x.contiguous(), weight, bias, groups)
    if deferred is None:
        return _GroupedLinear.apply(x, weight, bias, groups, None, products)
    defer = partial(deferred.add, weight)
    return _GroupedLinear.apply(ensure_requires_grad(x), weight.detach(), bias, groups, defer, products)


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
        products: Products,
    ) -> Tensor:
        x = x.contiguous()
        keep_input(ctx, x)
        ctx.weight, ctx.groups, ctx.defer, ctx.products = weight, groups, defer, products
        return products.output(x, weight, bias, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A gradient may be an expanded tensor, whose strides products of groups do not take.
        x, grad, groups = take_input(ctx), grad.contiguous(), ctx.groups
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.products.input_gradient(grad, ctx.weight, groups)
        compute = partial(_weight_gradient, grad=grad, x=x.detach(), groups=groups)
        if ctx.defer is not None:
            ctx.defer(compute)
        elif ctx.needs_input_grad[1]:
            grad_weight = compute(ctx.weight)
        grad_bias = sum_groups(grad, groups) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _weight_gradient(weight: Tensor, grad: Tensor, x: Tensor, groups: Groups) -> Tensor | None:
    """Returns the gradient of `weight` from grad [N, n_out] and x [N, n_in]; None if it was added to
    `main_grad`."""
    if not (has_main_grad(weight) and adds_products(grad, x)):
        return multiply_within_groups(grad, x, groups)
    total, beta = next_main_grad(weight)
    add_products_within_groups(total, grad, x, groups, beta)
    return None
