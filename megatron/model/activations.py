"""MLP activations without one name in PyTorch. All others are functions of `torch.nn.functional`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import ModelConfig
from megatron.config.registries import ACTIVATIONS, GLU_ACTIVATIONS
from megatron.kernels import activation as kernels
from megatron.kernels.selection import uses_kernels
from megatron.mpu.layers import ColumnParallelLinear


def gelu(x: Tensor) -> Tensor:
    """Returns GELU in its tanh form, which Megatron-LM, GPT-2 and BLOOM use."""
    return F.gelu(x, approximate="tanh")


def identity(x: Tensor) -> Tensor:
    """Returns `x`: the gate of a bilinear MLP has no activation (--glu-activation liglu)."""
    return x


def quick_gelu(x: Tensor) -> Tensor:
    """Returns x * sigmoid(1.702 x), the activation of the gate in gpt-oss."""
    return x * torch.sigmoid(1.702 * x)


def soft_capped(x: Tensor, cap: float | None) -> Tensor:
    """Returns cap * tanh(x / cap), computed in fp32 and rounded once; None: `x`."""
    return x if cap is None else ((x.float() / cap).tanh() * cap).to(x.dtype)


def gated(output: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Returns output [seq, batch, heads * n] * activation(gate). gate: [seq, batch, heads, n], or with one
    element per head. activation: sigmoid or softplus."""
    function = torch.sigmoid if activation == "sigmoid" else F.softplus
    return (output.unflatten(2, (gate.shape[2], -1)) * function(gate)).flatten(2)


def mlp_activation(model: ModelConfig) -> "Activation | Callable[[Tensor], Tensor]":
    """Returns the function between the two matrices of an MLP."""
    if model.glu_activation is None:
        return Activation(model.activation)
    return gated_by(model.glu_activation, model.activation_func_clamp_value, model.glu_linear_offset)


class Activation:
    """The activation of an MLP that is not gated, with Triton in one kernel."""

    def __init__(self, name: str) -> None:
        """name: a choice of --activation."""
        self.name = name
        self.function: Callable[[Tensor], Tensor] = ACTIVATIONS.load(name)

    def in_kernel(self, x: Tensor) -> bool:
        """Returns whether a kernel computes with tensors like `x`."""
        return self.name in kernels.ACTIVATIONS and not torch.compiler.is_compiling() and uses_kernels(x)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns activation(x). bias: only with `in_kernel`; it was added to `x` without autograd, and the
        backward pass of the kernel also computes its gradient."""
        return kernels.fused_activation(x, bias, self.name) if self.in_kernel(x) else self.function(x)


def linear_and_activation(
    linear: ColumnParallelLinear, activation: Callable[..., Tensor], hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns linear(hidden), and its activation. The activation's kernel also computes the gradient of the
    bias."""
    bias = linear.bias
    if bias is None or not isinstance(activation, Activation) or not activation.in_kernel(bias):
        wide = linear(hidden)
        return wide, activation(wide)
    wide = linear(hidden, bias_gradient=False)
    return wide, activation(wide, bias)


def gated_by(name: str, limit: float | None = None, offset: float = 0.0) -> Callable[[Tensor], Tensor]:
    """Returns the function (value + offset) * activation(gate): [..., 2n], first the values, then the gates
    -> [..., n]. With Triton it is one kernel. name: of the activation, a choice of --glu-activation. limit:
    see --activation-func-clamp-value."""
    activation: Callable[[Tensor], Tensor] = GLU_ACTIVATIONS.load(name)

    def gate(wide: Tensor) -> Tensor:
        if name in kernels.GATED_ACTIVATIONS and not torch.compiler.is_compiling() and uses_kernels(wide):
            return kernels.gated_activation(wide, name, limit, offset)
        value, gate = wide.chunk(2, dim=-1)
        if limit is not None:
            value, gate = _at_most(-_at_most(-value, limit), limit), _at_most(gate, limit)
        return (value + offset if offset else value) * activation(gate)

    return gate


def _at_most(x: Tensor, limit: float) -> Tensor:
    """Returns the minimum of x and the limit. At the limit it passes the gradient, as torch's clamp does only
    up to version 2.13."""
    return torch.where(x > limit, limit, x)
