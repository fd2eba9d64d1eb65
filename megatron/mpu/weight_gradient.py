"""Fused gradient accumulation: matrix products that add a weight's gradient directly to its fp32 sum.

The gradient of W in y = x W^T is dy^T x, a product of 16-bit matrices. Autograd rounds it to 16 bits, and a
second kernel adds it to `main_grad`, the fp32 sum over all micro-batches. Where the device supports it, one
product adds to the fp32 sum (Megatron-LM: gradient accumulation fusion). The product is
`aten::addmm.dtype_out`, which torch has on CUDA since 2.11 or earlier. `fuses_accumulation` decides for
linear layers. `supports_fused_accumulation` decides for the LM head, which adds to a sum of the fused loss
(`logit_chunks`).

The first product of a step overwrites the sum (`parameters.next_main_grad`): nothing sets it to zero before.

Autograd then gets None for the weight. The weight's hooks still run, because buckets count gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from math import nan

import torch
from torch import Tensor

from megatron.kernels.selection import uses_kernels
from megatron.mpu.parameters import has_main_grad, next_main_grad

logger = logging.getLogger(__name__)

Gradient = Callable[[Tensor], Tensor | None]
"""A function that computes what to add to the gradient of a weight; it returns None if it has added it."""

_HALF = (torch.bfloat16, torch.float16)


def fuses_accumulation(weight: Tensor) -> bool:
    """Returns whether products add the gradient of this weight to its `main_grad`."""
    return has_main_grad(weight) and supports_fused_accumulation(weight)


def supports_fused_accumulation(tensor: Tensor) -> bool:
    """Returns whether `add_product` runs for matrices like this tensor: 16-bit, on a device with kernels."""
    return (
        tensor.dtype in _HALF
        and uses_kernels(tensor)
        and _supports_fused_accumulation(tensor.device, tensor.dtype)
    )


@lru_cache
def _supports_fused_accumulation(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether `add_product` runs on the device, overwrites, and adds. Some versions of torch reject
    fp32 sums."""
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
    """Computes total = beta total + factor a b for 16-bit [n, k] and [k, m], fp32 [n, m]. With a `beta` of 0
    `total` is not read."""
    torch.addmm(total, a, b, beta=beta, alpha=factor, out_dtype=torch.float32, out=total)


def weight_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Returns the gradient of `weight` [n_out, n_in] from grad [n, n_out] and x [..., n_in]; None if it was
    added to `main_grad`."""
    transposed, x = grad.t(), x.reshape(-1, x.shape[-1])
    if not fuses_accumulation(weight):
        return transposed.matmul(x)
    total, beta = next_main_grad(weight)
    add_product(total, transposed, x, beta=beta)
    return None
