"""Norms of gradients, and the gradient norm of the whole model.

An fp32 sum of squares over a large tensor is inaccurate: the relative error is 4e-3 for 50 M elements on a
CPU. Therefore squares are summed in fp32 within chunks, and the chunks' sums are added in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.kernels.optimizer import fused_norms
from megatron.kernels.selection import uses_kernels
from megatron.mpu.mesh import Mesh
from megatron.mpu.world import gather_from_all_ranks
from megatron.optimizer.flat_group import FlatGroup
from megatron.text_table import first_few

NORM_CHUNK = 4096
"""Number of elements in a chunk."""


def accurate_norm(values: Tensor) -> Tensor:
    """Returns the 2-norm of an fp32 tensor as an fp64 scalar. Its relative error is about 1e-8."""
    flat = values.reshape(-1)
    whole = flat.numel() // NORM_CHUNK * NORM_CHUNK
    square = torch.linalg.vector_norm(flat[whole:]).double().square()
    if whole:
        chunks = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_CHUNK), dim=1)
        square = square + chunks.double().square().sum()
    return square.sqrt()


def gradient_norms(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the norm of each gradient, fp64, on `device`."""
    if not gradients:
        return torch.zeros(0, dtype=torch.float64, device=device)
    if uses_kernels(gradients[0]):
        return fused_norms(gradients)
    return torch.stack([accurate_norm(gradient) for gradient in gradients])


@torch.no_grad()
def record_norms(flats: Sequence[FlatGroup]) -> None:
    """Adds the norms of this rank's full gradients, before their reduction, to
    `FlatGroup.reduced_grad_norms`."""
    parameters = [parameter for flat in flats for parameter in flat.parameters]
    if not parameters:
        return
    norms = gradient_norms(
        [flat.full_grad(p) for flat in flats for p in flat.parameters], parameters[0].device
    )
    for flat, part in zip(flats, norms.split([len(flat.parameters) for flat in flats]), strict=True):
        flat.reduced_grad_norms += part


_SHOWN_RANKS = 4


def where_not_finite(bad: Sequence[str], mesh: Mesh, loss: Tensor | None) -> str:
    """Returns one text for all ranks that names the first ranks whose parameters are `bad`. It is a
    collective.

    bad: names of this rank's parameters with a gradient that is not finite. loss: this rank's loss, or None
    if it has none.
    """
    report = f"rank {mesh.rank} ({mesh.place}): {first_few(bad, limit=1)}" if bad else None
    if report and loss is not None and not loss.isfinite():
        report += f", with a loss of {loss.item()}"
    culprits = [r for r in gather_from_all_ranks(report) if r]
    hidden = len(culprits) - _SHOWN_RANKS
    where = "; ".join(culprits[:_SHOWN_RANKS]) or "only in the sum over ranks, which overflowed fp32"
    return where + (f"; and on {hidden} more ranks" if hidden > 0 else "")
