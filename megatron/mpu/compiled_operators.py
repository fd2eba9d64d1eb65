"""Operators that compiled layers (--compile) call instead of functions that torch.compile cannot trace. Each
layer is then one graph.

- Hidden dropout. The keys of its mask depend on the layer's index, which would give each layer a different
  graph. Therefore the keys are fetched before the layer runs, and are an input of the graph.
- A linear layer that adds its weight's gradient to `main_grad` in the product that computes the gradient (see
  `weight_gradient`). torch.compile cannot trace the result dtype of this product (pytorch issue 163880).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.operators import operator
from megatron.mpu import weight_gradient
from megatron.mpu.compilation import constant_when_compiled
from megatron.mpu.mesh import Axis
from megatron.mpu.parameters import main_grad_of
from megatron.mpu.random import DropoutMask, FixedKeys, Part, dropout_add

# --- linear layers ---


def compiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Runs F.linear in a compiled function. If the product supports it, the backward pass adds the weight's
    gradient to its `main_grad`. `main_grad` must have defined values: a graph does not know which micro-batch
    is the first of a step."""
    total = main_grad_of(weight)
    if total is None or not (x.requires_grad and _adds_products(weight.device, weight.dtype)):
        return F.linear(x, weight, bias)
    return linear_op(x, weight, bias, total)


@constant_when_compiled
def _adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    return weight_gradient.supports_fused_accumulation(torch.empty(0, dtype=dtype, device=device))


@operator("linear")
def linear_op(x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor) -> Tensor:
    """Runs F.linear. Its backward pass adds the weight's gradient to `total`, which is fp32."""
    return F.linear(x, weight, bias)


@linear_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@operator("linear_backward")
def linear_backward_op(grad: Tensor, x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
    """Returns the gradient of `x`, and adds the weight's gradient to `total`.

    The operator does not declare to PyTorch that it changes `total`. If it did, PyTorch would treat `total`
    as an input of the forward pass that was changed before its backward pass ran, and reject the backward
    pass of every micro-batch except the last. No graph reads `total`, and the result is always used, so each
    call runs exactly once.
    """
    rows = grad.reshape(-1, grad.shape[-1])
    weight_gradient.add_product(total.data, rows.t(), x.reshape(-1, x.shape[-1]))
    return rows.mm(weight).view(x.shape)


@linear_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, total = inputs
    ctx.save_for_backward(x, weight, total)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x = linear_backward_op(grad, *ctx.saved_tensors)
    return grad_x, None, grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None, None


linear_op.register_autograd(_linear_backward, setup_context=_keep_linear)


# --- dropout ---


def compiled_dropout_add(
    x: Tensor,
    residual: Tensor,
    p: float,
    keys: Tensor,
    *,
    bias: Tensor | None,
    batch_dim: int,
    part: Part | None,
) -> Tensor:
    """Runs `dropout_add` in a compiled function. keys: the result of `device_sample_keys` for this
    dropout."""
    numbers: list[int] = []
    if part is not None:
        numbers = [part.dim, part.size]
        for indices in part.ranges:
            numbers += [indices.start, indices.stop]
    return dropout_of_keys_op(x, bias, residual, keys, p, batch_dim, numbers)


@operator("dropout_of_keys")
def dropout_of_keys_op(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    keys: Tensor,
    p: float,
    batch_dim: int,
    part: Sequence[int],
) -> Tensor:
    """Returns dropout(x + bias) + residual. part: the dimension, its full size, and then the start and stop
    of each range."""
    ranges = tuple(map(range, part[2::2], part[3::2]))
    of_tensor = Part(part[0], ranges, part[1]) if part else None
    mask = DropoutMask(p, FixedKeys(keys), "", batch_dim, None, Axis("tp"), of_tensor)
    return dropout_add(x, residual, mask, bias)


@dropout_of_keys_op.register_fake
def _(x: Tensor, bias: Tensor | None, residual: Tensor | None, *others: Any) -> Tensor:
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return x.new_empty(x.shape, dtype=dtype)


def _keep_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, keys, p, batch_dim, part = inputs
    ctx.save_for_backward(keys)
    ctx.dtypes = [None if x is None else x.dtype for x in tensors]
    ctx.settings = p, batch_dim, part


def _dropout_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x_dtype, bias_dtype, residual_dtype = ctx.dtypes
    (keys,) = ctx.saved_tensors
    grad_x = dropout_of_keys_op(grad.to(x_dtype), None, None, keys, *ctx.settings)
    grad_bias = None if bias_dtype is None else grad_x.flatten(0, -2).sum(0).to(bias_dtype)
    grad_residual = None if residual_dtype is None else grad.to(residual_dtype)
    return grad_x, grad_bias, grad_residual, None, None, None, None


dropout_of_keys_op.register_autograd(_dropout_backward, setup_context=_keep_dropout)
