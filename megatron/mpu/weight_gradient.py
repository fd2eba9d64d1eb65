"""Gradients of the weights of linear layers, added to their fp32 sums by the matrix product itself.

The gradient of W in y = x W^T is dy^T x, a product of 16-bit matrices. Autograd rounds it to 16 bits, and a
second kernel adds it to the fp32 sum of all micro-batches, `main_grad`. Where the device can, one product
adds to the fp32 sum: `aten::addmm.dtype_out`, which torch 2.13 has on CUDA and XPU. `adds_in_product`
selects; for the LM head, whose sum is that of the fused loss (`logit_chunks`), `device_adds`.

Autograd then gets None for the weight. The hooks of the weight run all the same: buckets count gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.selection import uses_kernels
from megatron.mpu.parameters import main_grad_of

logger = logging.getLogger(__name__)

Gradient = Callable[[Tensor], Tensor | None]
"""A function that computes what a backward pass adds to the gradient of a weight; None if it has added it."""

_HALF = (torch.bfloat16, torch.float16)


def adds_in_product(weight: Tensor) -> bool:
    """Whether products add the gradient of this weight to its `main_grad`, which must be allocated at all
    times (`FlatGroup` marks it)."""
    return getattr(weight, "keeps_main_grad", False) and device_adds(weight)


def device_adds(tensor: Tensor) -> bool:
    """Whether `add_product` runs for matrices like this one: 16-bit, on a device with kernels."""
    return tensor.dtype in _HALF and uses_kernels(tensor) and _device_adds(tensor.device, tensor.dtype)


@lru_cache
def _device_adds(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `add_product` runs on the device, and adds. Some versions of torch take no fp32 sum on CUDA."""
    ones, total = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        add_product(total, ones, ones)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        logger.info("weight gradients: added by a kernel of their own (%s)", error)
        return False
    return bool((total == 17).all())


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b: 16-bit [n, k] and [k, m], fp32 [n, m]."""
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def weight_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """The gradient of `weight` [n_out, n_in] from grad [..., n_out] and x [..., n_in]; None if it was added
    to `main_grad`."""
    transposed, x = grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1])
    total = main_grad_of(weight) if adds_in_product(weight) else None
    if total is None:
        return transposed.matmul(x)
    add_product(total, transposed, x)
    return None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, defer: Callable[[Gradient], None] | None = None
) -> Tensor:
    """F.linear with `weight_gradient`, computed in the backward pass, or given to `defer`. A compiled layer
    has autograd's gradient."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    if defer is None and not adds_in_product(weight):
        return F.linear(x, weight, bias)
    output_gradient: list[Tensor] = []
    rows = x.reshape(-1, x.shape[-1])
    rows = _KeepInput.apply(rows, weight if defer is None else None, output_gradient, defer)
    # The product itself stays an operation of PyTorch: activation recomputation ends before the last one.
    y = F.linear(rows, weight.detach(), bias)
    y.register_hook(output_gradient.append)
    # Not a view: a reduction over ranks works in place, and autograd copies gradients of changed views.
    return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


class _KeepInput(torch.autograd.Function):
    """The identity, on the input of a product. Its backward pass runs when the gradient of the product's
    output is known: it computes the weight's gradient, or passes a function for it to `defer`. With `defer`
    the weight is not an input for autograd, which would call its hooks in this backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        output_gradient: list[Tensor],
        defer: Callable[[Gradient], None] | None,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.output_gradient, ctx.defer = weight, output_gradient, defer
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        compute = partial(weight_gradient, grad=ctx.output_gradient.pop(), x=x.detach())
        if ctx.defer is None:
            return grad, compute(ctx.weight), None, None
        ctx.defer(compute)
        return grad, None, None, None
