"""Norms of gradients, and the norm over the whole model.

An fp32 sum of squares over a large tensor is inaccurate (relative error 4e-3 for 50 M elements on a CPU). So
squares are summed in fp32 within chunks, and in fp64 over the chunks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.kernels.norms import fused_norms
from megatron.kernels.selection import uses_kernels
from megatron.optimizer.flat_group import FlatGroup

NORM_CHUNK = 4096
"""Elements whose squares are summed in fp32."""


def accurate_norm(values: Tensor) -> Tensor:
    """2-norm of an fp32 tensor as an fp64 scalar, relative error about 1e-8. Reads the tensor once."""
    flat = values.reshape(-1)
    whole = flat.numel() // NORM_CHUNK * NORM_CHUNK
    square = torch.linalg.vector_norm(flat[whole:]).double().square()
    if whole:
        chunks = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_CHUNK), dim=1)
        square = square + chunks.double().square().sum()
    return square.sqrt()


def gradient_norms(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The norm of each gradient, fp64, on `device`."""
    if not gradients:
        return torch.zeros(0, dtype=torch.float64, device=device)
    if uses_kernels(gradients[0]):
        return fused_norms(gradients)
    return torch.stack([accurate_norm(gradient) for gradient in gradients])


@torch.no_grad()
def record_norms(flats: Sequence[FlatGroup]) -> None:
    """Adds the norms of this rank's full gradients to `FlatGroup.reduced_grad_norms`. Called before the
    gradients are reduced."""
    parameters = [parameter for flat in flats for parameter in flat.parameters]
    if not parameters:
        return
    norms = gradient_norms([p.main_grad.reshape(-1) for p in parameters], parameters[0].device)
    for flat, part in zip(flats, norms.split([len(flat.parameters) for flat in flats]), strict=True):
        flat.add_grad_norms(part)
