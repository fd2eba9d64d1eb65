"""The MLP activations that PyTorch does not have under one name. All other activations are functions of
`torch.nn.functional`."""

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
    """Returns `x`. It is the gate's activation in a bilinear MLP (--glu-activation liglu)."""
    return x


def quick_gelu(x: Tensor) -> Tensor:
    """Returns x * sigmoid(1.702 x), the activation of the gate in gpt-oss MLPs."""
    return x * torch.sigmoid(1.702 * x)


def soft_capped(x: Tensor, cap: float | None) -> Tensor:
    """Returns cap * tanh(x / cap), computed in fp32 and rounded once, or `x` if `cap` is None."""
    return x if cap is None else ((x.float() / cap).tanh() * cap).to(x.dtype)


def gated(output: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Returns output [seq, batch, heads * n] * activation(gate). gate: [seq, batch, heads, n], or
    [seq, batch, heads, 1] for one gate per head. activation: sigmoid or softplus."""
    function = torch.sigmoid if activation == "sigmoid" else F.softplus
    return (output.unflatten(2, (gate.shape[2], -1)) * function(gate)).flatten(2)


def mlp_activation(model: ModelConfig) -> "Activation | Callable[[Tensor], Tensor]":
    """Returns the activation function between the two matrices of an MLP."""
    if model.glu_activation is None:
        return Activation(model.activation)
    return gated_by(model.glu_activation, model.activation_func_clamp_value, model.glu_linear_offset)


class Activation:
    """The activation of an MLP that is not gated. One Triton kernel computes it if Triton is used."""

    def __init__(self, name: str) -> None:
        """name: a choice of --activation."""
        self.name = name
        self.function: Callable[[Tensor], Tensor] = ACTIVATIONS.load(name)

    def in_kernel(self, x: Tensor) -> bool:
        """Returns whether a kernel computes with tensors like `x`."""
        return self.name in kernels.ACTIVATIONS and not torch.compiler.is_compiling() and uses_kernels(x)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns activation(x). bias: given only if `in_kernel` is true. It was added to `x` without
        autograd, so the backward pass of the kernel also computes the gradient of the bias."""
        return kernels.fused_activation(x, bias, self.name) if self.in_kernel(x) else self.function(x)


def linear_and_activation(
    linear: ColumnParallelLinear, activation: Callable[..., Tensor], hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns linear(hidden) and activation(linear(hidden)). The activation's kernel also computes the
    gradient of the linear layer's bias."""
    bias = linear.bias
    if bias is None or not isinstance(activation, Activation) or not activation.in_kernel(bias):
        wide = linear(hidden)
        return wide, activation(wide)
    wide = linear(hidden, bias_gradient=False)
    return wide, activation(wide, bias)


def gated_by(name: str, limit: float | None = None, offset: float = 0.0) -> Callable[[Tensor], Tensor]:
    """Returns the function (value + offset) * activation(gate) from [..., 2n] to [..., n]. The first n
    elements of the input are the values, the last n the gates. With Triton the function is one kernel. name:
    the activation of the gate, a choice of --glu-activation. limit: the value of
    --activation-func-clamp-value, or None."""
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
    """Returns the minimum of x and the limit. An element equal to the limit passes its gradient on, as
    torch's clamp does only up to version 2.13."""
    return torch.where(x > limit, limit, x)
