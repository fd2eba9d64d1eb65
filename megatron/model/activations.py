"""MLP activations without one name in PyTorch. All others are functions of `torch.nn.functional`."""

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """Returns GELU in its tanh form, which Megatron-LM, GPT-2 and BLOOM use."""
    return F.gelu(x, approximate="tanh")


def identity(x: Tensor) -> Tensor:
    """Returns `x`: the gate of a bilinear MLP has no activation (--glu-activation liglu)."""
    return x
