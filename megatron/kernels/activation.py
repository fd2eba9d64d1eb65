"""Operators of the activation of an MLP that is not gated, and of the gradient of the bias before it.

The bias of the linear layer before the activation is added within its matrix product. Its gradient is the sum
of the rows of the activation's gradient, which the kernel of the backward pass has in registers. So no pass
over memory is needed for it. The backward pass writes in place, as in `gated`. The reference implementation
is in `model.activations`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron.kernels.column_sums import TILE_ROWS, num_blocks, rows_per_block, sum_blocks
from megatron.kernels.operators import Launch, first_order, operator

ACTIVATIONS = {"gelu": "geglu_tanh", "gelu_exact": "geglu"}
"""The values of --activation that the kernels compute, and their names in `triton_kernels`."""
BLOCK, BLOCK_COLUMNS = 4096, 256
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def fused_activation(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Returns activation(x), [..., n]. bias: [n], a parameter that was added to `x` without autograd: it gets
    the sum of the gradient of `x` over the rows. activation: one of `ACTIVATIONS`.

    The backward pass writes the gradient of a contiguous `x` over its elements: see
    `gated.gated_activation`.
    """
    return _Activation.apply(x, bias, activation)


@first_order
class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.activation, ctx.dtype = activation, None if bias is None else bias.dtype
        return activation_op(x, activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x = ctx.saved_tensors[0].detach()
        grad, sums = grad.contiguous(), None
        if ctx.needs_input_grad[1]:
            sums = sum_blocks(activation_and_bias_backward_op(grad, x, ctx.activation), ctx.dtype)
        else:
            activation_backward_op(grad, x, ctx.activation)
        increment_version(x)
        return x, sums, None


@operator("activation")
def activation_op(x: Tensor, activation: str) -> Tensor:
    """Launches the kernel of the forward pass; `x` is contiguous."""
    out = torch.empty_like(x)
    _forward_launch(x.numel(), activation)(x, out)
    return out


@activation_op.register_fake
def _(x: Tensor, activation: str) -> Tensor:
    return torch.empty_like(x)


@operator("activation_backward", mutates_args=("x",))
def activation_backward_op(grad: Tensor, x: Tensor, activation: str) -> None:
    """Overwrites `x` with its gradient, from the contiguous gradient of the output."""
    _backward_launch(x.numel() // x.shape[-1], x.shape[-1], activation, TILE_ROWS)(grad, x, None)


@activation_backward_op.register_fake
def _(grad: Tensor, x: Tensor, activation: str) -> None:
    return None


@operator("activation_and_bias_backward", mutates_args=("x",))
def activation_and_bias_backward_op(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """`activation_backward_op`, which also returns the sums of the gradient over blocks of rows."""
    sums, rows = _partial_sums(x), x.numel() // x.shape[-1]
    _backward_launch(rows, x.shape[-1], activation, rows_per_block(rows))(grad, x, sums)
    return sums


@activation_and_bias_backward_op.register_fake
def _(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    return _partial_sums(x)


def _partial_sums(x: Tensor) -> Tensor:
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    return x.new_empty((num_blocks(rows), columns), dtype=torch.float32)


@lru_cache(maxsize=1024)
def _forward_launch(length: int, activation: str) -> Launch:
    kernel, grid = "triton_kernels.activation_kernel", (-(-length // BLOCK), 1)
    return Launch(kernel, grid, OPTIONS, length=length, ACTIVATION=ACTIVATIONS[activation], BLOCK=BLOCK)


@lru_cache(maxsize=1024)
def _backward_launch(rows: int, columns: int, activation: str, block_rows: int) -> Launch:
    """block_rows: rows of a program. A constant without sums: experts have another number of rows each time,
    and Triton compiles a kernel for each value."""
    return Launch(
        "triton_kernels.activation_backward_kernel",
        (-(-rows // block_rows), -(-columns // BLOCK_COLUMNS)),
        OPTIONS,
        rows=rows,
        columns=columns,
        ACTIVATION=ACTIVATIONS[activation],
        BLOCK_ROWS=block_rows,
        TILE_ROWS=TILE_ROWS,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
    )
