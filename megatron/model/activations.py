"""Activations of the MLP that PyTorch does not have under one name. Others are `torch.nn.functional`'s."""

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, as Megatron, GPT-2 and BLOOM compute it."""
    return F.gelu(x, approximate="tanh")


def identity(x: Tensor) -> Tensor:
    """The gate of a bilinear MLP (--glu-activation liglu)."""
    return x
