"""MLP activations without one name in PyTorch. All others are functions of `torch.nn.functional`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.registries import GLU_ACTIVATIONS
from megatron.kernels.gated import ACTIVATIONS, gated_activation
from megatron.kernels.selection import uses_kernels


def gelu(x: Tensor) -> Tensor:
    """Returns GELU in its tanh form, which Megatron-LM, GPT-2 and BLOOM use."""
    return F.gelu(x, approximate="tanh")


def identity(x: Tensor) -> Tensor:
    """Returns `x`: the gate of a bilinear MLP has no activation (--glu-activation liglu)."""
    return x


def gated_by(name: str) -> Callable[[Tensor], Tensor]:
    """Returns the function value * activation(gate): [..., 2n], first the values, then the gates -> [..., n].
    With Triton it is one kernel. name: of the activation, a choice of --glu-activation."""
    activation: Callable[[Tensor], Tensor] = GLU_ACTIVATIONS.load(name)

    def gated(wide: Tensor) -> Tensor:
        if name in ACTIVATIONS and not torch.compiler.is_compiling() and uses_kernels(wide):
            return gated_activation(wide, name)
        value, gate = wide.chunk(2, dim=-1)
        return value * activation(gate)

    return gated
