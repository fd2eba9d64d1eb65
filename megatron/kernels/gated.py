"""Operators of a gated MLP's activation: value * activation(gate), with value and gate in one tensor.

Each element is read once and written once. The backward pass writes in place, which saves the largest tensor
of a layer's backward pass. The reference implementation is in `model.activations.gated_by`.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megatron.kernels.operators import Launch, first_order, operator

ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu", "liglu")
"""The values of --glu-activation that the kernels compute."""
BLOCK = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def gated_activation(wide: Tensor, activation: str) -> Tensor:
    """[..., 2n], first the values, then the gates -> [..., n]. activation: one of `ACTIVATIONS`.

    The backward pass writes the gradient of a contiguous `wide` over its elements, so nothing else may need
    them afterwards. Autograd raises an error in a second backward pass, and in the backward pass of another
    function that has saved `wide`.
    """
    return _GatedActivation.apply(wide, activation)


@first_order
class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wide: Tensor, activation: str) -> Tensor:
        wide = wide.contiguous()
        ctx.save_for_backward(wide)
        ctx.activation = activation
        return gated_activation_op(wide, activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        wide = ctx.saved_tensors[0].detach()
        gated_activation_backward_op(grad.contiguous(), wide, ctx.activation)
        increment_version(wide)
        return wide, None


@operator("gated_activation")
def gated_activation_op(wide: Tensor, activation: str) -> Tensor:
    """Launches the kernel of the forward pass; `wide` is contiguous."""
    out = _output(wide)
    _launch("gated_activation_kernel", out.shape, activation)(wide, out)
    return out


@gated_activation_op.register_fake
def _(wide: Tensor, activation: str) -> Tensor:
    return _output(wide)


@operator("gated_activation_backward", mutates_args=("wide",))
def gated_activation_backward_op(grad: Tensor, wide: Tensor, activation: str) -> None:
    """Overwrites `wide` with its gradient, from the contiguous gradient of the output."""
    _launch("gated_activation_backward_kernel", grad.shape, activation)(grad, wide)


@gated_activation_backward_op.register_fake
def _(grad: Tensor, wide: Tensor, activation: str) -> None:
    return None


@lru_cache(maxsize=1024)
def _launch(kernel: str, shape: torch.Size, activation: str) -> Launch:
    """shape: of the output."""
    width = shape[-1]
    grid = (prod(shape[:-1]), -(-width // BLOCK))
    return Launch(f"triton_kernels.{kernel}", grid, OPTIONS, width=width, ACTIVATION=activation, BLOCK=BLOCK)


def _output(wide: Tensor) -> Tensor:
    return wide.new_empty((*wide.shape[:-1], wide.shape[-1] // 2))
