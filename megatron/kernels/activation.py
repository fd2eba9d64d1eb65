"""Operators of an MLP's activation. A gated activation is (value + offset) * activation(gate), with values
and gates in one tensor.

Each element is read once and written once. The backward pass overwrites its input with the gradient, which
saves the largest tensor of a layer's backward pass. The reference implementation is in `model.activations`.

The matrix product of the linear layer before a plain activation adds the bias. The gradient of this bias is
the sum of the rows of the activation's gradient, which the kernel of the backward pass has in registers.
Therefore it needs no separate pass over memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron.kernels.column_sums import TILE_ROWS, num_blocks, rows_per_block, sum_blocks
from megatron.kernels.operators import Launch, first_order, operator

ACTIVATIONS = {"gelu": "geglu_tanh", "gelu_exact": "geglu"}
"""The values of --activation that the kernels support, and their names in `triton_kernels`."""
GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "quick_geglu", "reglu", "liglu")
"""The values of --glu-activation that the kernels support."""
BLOCK, GATED_BLOCK, BLOCK_COLUMNS = 4096, 1024, 256
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def fused_activation(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Returns activation(x), [..., n]. bias: [n], a parameter that was added to `x` without autograd; its
    gradient is the sum of the gradient of `x` over the rows. activation: a key of `ACTIVATIONS`.

    The backward pass overwrites a contiguous `x` with its gradient, so nothing may read `x` afterwards.
    Autograd raises an error in a second backward pass, and in the backward pass of any other function that
    has saved `x`.
    """
    return _Activation.apply(x, bias, ACTIVATIONS[activation], None)


def gated_activation(
    wide: Tensor, activation: str, limit: float | None = None, offset: float = 0.0
) -> Tensor:
    """Returns (value + offset) * activation(gate), [..., n]. wide: [..., 2n], first the values, then the
    gates. activation: one of `GATED_ACTIVATIONS`. limit: gates are clamped to at most limit, values to -limit
    to limit; None: no clamping. The backward pass overwrites `wide`: see `fused_activation`."""
    return _Activation.apply(wide, None, activation, (math.inf if limit is None else limit, offset))


@first_order
class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, activation: str, gate: Sequence[float] | None
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.activation, ctx.gate = activation, gate
        ctx.dtype = None if bias is None else bias.dtype
        return activation_op(x, activation, gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x = ctx.saved_tensors[0].detach()
        grad, sums = grad.contiguous(), None
        if ctx.needs_input_grad[1]:
            sums = sum_blocks(activation_and_bias_backward_op(grad, x, ctx.activation), ctx.dtype)
        else:
            activation_backward_op(grad, x, ctx.activation, ctx.gate)
        increment_version(x)
        return x, sums, None, None


@operator("activation")
def activation_op(x: Tensor, activation: str, gate: Sequence[float] | None) -> Tensor:
    """Launches the kernel of the forward pass. x: contiguous. gate: limit and offset of a gated activation;
    None if it is plain."""
    columns = x.shape[-1] if gate is None else x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], columns))
    if gate is not None:
        _gated_launch("gated_activation_kernel", columns, activation, *gate)(x, out, grid=_gated_grid(out))
    else:
        grid = (-(-x.numel() // BLOCK), 1)
        _launch("activation_kernel", columns, activation, BLOCK=BLOCK)(x, out, _num_rows(x), grid=grid)
    return out


@operator("activation_backward", mutates_args=("x",))
def activation_backward_op(grad: Tensor, x: Tensor, activation: str, gate: Sequence[float] | None) -> None:
    """Overwrites `x` with its gradient. grad: the contiguous gradient of the output."""
    if gate is not None:
        launch = _gated_launch("gated_activation_backward_kernel", grad.shape[-1], activation, *gate)
        launch(grad, x, grid=_gated_grid(grad))
    else:
        _launch_backward(grad, x, None, activation, TILE_ROWS)


@operator("activation_and_bias_backward", mutates_args=("x",))
def activation_and_bias_backward_op(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """Runs `activation_backward_op`, and returns the sums of the gradient over blocks of rows."""
    sums = x.new_empty((num_blocks(_num_rows(x)), x.shape[-1]), dtype=torch.float32)
    _launch_backward(grad, x, sums, activation, rows_per_block(_num_rows(x)))
    return sums


def _num_rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _launch_backward(grad: Tensor, x: Tensor, sums: Tensor | None, activation: str, block_rows: int) -> None:
    """Launches the kernel of the backward pass. block_rows: number of rows per program, a constant of the
    kernel."""
    rows, columns = _num_rows(x), x.shape[-1]
    constants = {"BLOCK_ROWS": block_rows, "TILE_ROWS": TILE_ROWS, "BLOCK_COLUMNS": BLOCK_COLUMNS}
    grid = (-(-rows // block_rows), -(-columns // BLOCK_COLUMNS))
    _launch("activation_backward_kernel", columns, activation, **constants)(grad, x, sums, rows, grid=grid)


# A call passes the number of rows and the grid, because the number of rows of an expert changes in each step.


@lru_cache(maxsize=1024)
def _launch(kernel: str, columns: int, activation: str, **constants: int) -> Launch:
    return Launch(
        f"triton_kernels.{kernel}", None, OPTIONS, columns=columns, ACTIVATION=activation, **constants
    )


@lru_cache(maxsize=1024)
def _gated_launch(kernel: str, width: int, activation: str, limit: float, offset: float) -> Launch:
    numbers = {"width": width, "ACTIVATION": activation, "LIMIT": limit, "OFFSET": offset}
    return Launch(f"triton_kernels.{kernel}", None, OPTIONS, BLOCK=GATED_BLOCK, **numbers)


def _gated_grid(out: Tensor) -> tuple[int, int]:
    return _num_rows(out), -(-out.shape[-1] // GATED_BLOCK)
