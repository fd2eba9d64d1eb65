"""Operators of a gated MLP's activation: value * activation(gate), with value and gate in one tensor.

Each element is read once and written once. The reference implementation is in `model.gpt_model.ParallelMLP`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.operators import first_order, operator

ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "reglu", "liglu")
"""The values of --glu-activation that the kernels compute."""
BLOCK = 1024
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def gated_activation(wide: Tensor, activation: str) -> Tensor:
    """[..., 2n], first the values, then the gates -> [..., n]. activation: one of `ACTIVATIONS`."""
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
        (wide,) = ctx.saved_tensors
        return gated_activation_backward_op(grad.contiguous(), wide, ctx.activation), None


@operator("gated_activation")
def gated_activation_op(wide: Tensor, activation: str) -> Tensor:
    """Launches the kernel of the forward pass; `wide` is contiguous."""
    from megatron.kernels.triton_kernels import gated_activation_kernel  # triton is optional

    out = _output(wide)
    width = out.shape[-1]
    if out.numel():
        grid = (out.numel() // width, -(-width // BLOCK))
        gated_activation_kernel[grid](wide, out, width, ACTIVATION=activation, BLOCK=BLOCK, **OPTIONS)
    return out


@gated_activation_op.register_fake
def _(wide: Tensor, activation: str) -> Tensor:
    return _output(wide)


@operator("gated_activation_backward")
def gated_activation_backward_op(grad: Tensor, wide: Tensor, activation: str) -> Tensor:
    """Returns the gradient of `wide` from the contiguous gradient of the output."""
    from megatron.kernels.triton_kernels import gated_activation_backward_kernel  # triton is optional

    grad_wide = torch.empty_like(wide)
    width = grad.shape[-1]
    if grad.numel():
        grid = (grad.numel() // width, -(-width // BLOCK))
        gated_activation_backward_kernel[grid](
            grad, wide, grad_wide, width, ACTIVATION=activation, BLOCK=BLOCK, **OPTIONS
        )
    return grad_wide


@gated_activation_backward_op.register_fake
def _(grad: Tensor, wide: Tensor, activation: str) -> Tensor:
    return torch.empty_like(wide)


def _output(wide: Tensor) -> Tensor:
    return wide.new_empty((*wide.shape[:-1], wide.shape[-1] // 2))
