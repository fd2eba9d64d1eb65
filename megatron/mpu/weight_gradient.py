"""The gradients of weights: fused accumulation, and the split backward pass of zero-bubble schedules.

Fused accumulation: matrix products add a weight's gradient directly to its fp32 sum. The gradient of W in y =
x W^T is dy^T x, a product of 16-bit matrices. Autograd would round it to 16 bits, and a second kernel would
add it to `main_grad`, the fp32 sum over all micro-batches. If the device supports it, one product adds to the
fp32 sum instead (Megatron-LM calls this gradient accumulation fusion). The product is
`aten::addmm.dtype_out`, which torch 2.11 and later versions have on CUDA. `fuses_accumulation` decides this
for linear layers. `supports_fused_accumulation` decides it for the LM head, whose gradient the fused loss
adds (`logit_chunks`).

The first product of a step overwrites the sum (`parameters.next_main_grad`), so no kernel sets it to zero.

Autograd then gets None as the weight's gradient. The weight's hooks still run, because buckets count
gradients.

Split backward pass (arXiv 2401.10241): the backward pass of a linear layer y = x W^T has two matrix products.
The previous stage waits for the input's gradient dy W. The weight's gradient dy^T x is needed only at the end
of the step. With `DeferredGradients` the backward pass (B) computes only the first product, and stores x and
dy for the second one.

`DeferredGradients.take` and `accumulate` compute the weight gradients later (W). Autograd accumulates them as
without the split. The sums have equal bits if the micro-batches come in the same order, and hooks that wait
for a gradient are called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from math import nan
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.grouped_linear import (
    Groups,
    add_products_within_groups,
    adds_products,
    multiply_within_groups,
)
from megatron.kernels.operators import first_order
from megatron.kernels.selection import uses_kernels
from megatron.mpu.parameters import has_main_grad, next_main_grad

logger = logging.getLogger(__name__)

Gradient = Callable[[Tensor], Tensor | None]
"""A function that returns the value to add to the gradient of a weight, or None if it has added it
already."""

_HALF = (torch.bfloat16, torch.float16)


def fuses_accumulation(weight: Tensor) -> bool:
    """Returns whether matrix products add the gradient of this weight to its `main_grad`."""
    return has_main_grad(weight) and supports_fused_accumulation(weight)


def supports_fused_accumulation(tensor: Tensor) -> bool:
    """Returns whether `add_product` supports matrices like this tensor: 16-bit, on a device with kernels."""
    return (
        tensor.dtype in _HALF
        and uses_kernels(tensor)
        and _supports_fused_accumulation(tensor.device, tensor.dtype)
    )


@lru_cache
def _supports_fused_accumulation(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether `add_product` runs on the device, and both overwrites and adds correctly. Some versions
    of torch reject fp32 sums."""
    ones, total = torch.ones(16, 16, dtype=dtype, device=device), torch.full((16, 16), nan, device=device)
    try:
        add_product(total, ones, ones, beta=0.0)
        add_product(total, ones, ones)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        logger.info("weight gradients: added by a separate kernel (%s)", error)
        return False
    return bool((total == 32).all())


def add_product(total: Tensor, a: Tensor, b: Tensor, factor: float = 1.0, beta: float = 1.0) -> None:
    """Computes total = beta total + factor a b. a: 16-bit [n, k]. b: 16-bit [k, m]. total: fp32 [n, m]. With
    a `beta` of 0 `total` is not read."""
    torch.addmm(total, a, b, beta=beta, alpha=factor, out_dtype=torch.float32, out=total)


def weight_gradient(weight: Tensor, grad: Tensor, x: Tensor, groups: Groups | None = None) -> Tensor | None:
    """Returns the gradient of `weight` [n_out, n_in] from grad [n, n_out] and x [..., n_in], or None if it
    was added to `main_grad`. groups: the number of rows of each expert, whose matrix is weight[expert]."""
    if groups is not None:
        if not (has_main_grad(weight) and adds_products(grad, x)):
            return multiply_within_groups(grad, x, groups)
        total, beta = next_main_grad(weight)
        add_products_within_groups(total, grad, x, groups, beta)
        return None
    transposed, x = grad.t(), x.reshape(-1, x.shape[-1])
    if not fuses_accumulation(weight):
        return transposed.matmul(x)
    total, beta = next_main_grad(weight)
    add_product(total, transposed, x, beta=beta)
    return None


Deferred = list[tuple[Tensor, Gradient]]


class DeferredGradients:
    """A queue of weight gradients that the backward pass has deferred."""

    def __init__(self) -> None:
        self._deferred: Deferred = []

    def add(self, weight: Tensor, gradient: Gradient) -> None:
        """Queues the gradient of a weight for a later computation. The tensors that `gradient` uses must have
        no graph, because a graph would keep the stage's input in memory."""
        self._deferred.append((weight, gradient))

    def take(self) -> Deferred:
        """Returns the queue's content, in the order of the calls of `add`, and clears the queue."""
        taken, self._deferred = self._deferred, []
        return taken


def accumulate(deferred: Deferred) -> None:
    """Computes the gradients in order and accumulates them in their weights. It empties the list, so that the
    inputs of each gradient are freed as soon as they are used."""
    while deferred:
        output = _Accumulate.apply(*deferred.pop(0))
        output.backward(output.detach())  # the argument's values are not read


def ensure_requires_grad(x: Tensor) -> Tensor:
    """Returns `x`, detached if necessary so that it requires a gradient. A function that defers a weight's
    gradient gets the weight detached, because otherwise autograd would call the weight's hooks in the
    backward pass, even without a gradient. Therefore the input must require a gradient, or no backward pass
    runs."""
    return x if x.requires_grad else x.detach().requires_grad_()


@first_order
class _Accumulate(torch.autograd.Function):
    """A function whose backward pass accumulates the gradient that `gradient` computes in `weight`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Gradient) -> Tensor:
        ctx.weight, ctx.gradient = weight, gradient
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient(ctx.weight), None
