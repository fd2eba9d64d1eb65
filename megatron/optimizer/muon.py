"""Muon (kellerjordan.github.io/posts/muon): the orthogonalized momentum of a matrix as its update.

A Newton-Schulz iteration replaces the singular values of the momentum by values near 1. Published recipes
scale the update in different ways, see `SCALE_MODES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.config import OptimizerConfig
from megatron.optimizer.matrix_optimizer import MatrixOptimizer, MatrixUpdate

# Coefficients and smallest norm of Keller Jordan's implementation and of torch.optim.Muon.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

SCALE_MODES: Mapping[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: max(rows, columns) ** 0.5,
    "unit_rms_norm": lambda rows, columns: (rows / columns) ** 0.5,
    "shape_scaling": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}
"""--muon-scale-mode -> scale of the update of a matrix [rows, columns]."""


def newton_schulz(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Returns the matrix [rows, columns] with singular values near 1, computed in `dtype`."""
    a, b, c = _COEFFICIENTS
    x = matrix.to(dtype)
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:  # the products of the shorter side are cheaper
        x = x.T
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def make_muon(groups: list[dict[str, Any]], config: OptimizerConfig, fused: bool) -> MatrixOptimizer:
    """Returns Muon, with Adam for the parameters that are not matrices of linear layers."""
    in_fp32 = all(parameter.dtype == torch.float32 for group in groups for parameter in group["params"])
    dtype = _DTYPES[config.muon_matmul_dtype or ("fp32" if in_fp32 else "bf16")]
    scale_of_mode = SCALE_MODES[config.muon_scale_mode]

    def direction(matrix: Tensor) -> Tensor:
        return newton_schulz(matrix, config.muon_num_ns_steps, dtype)

    def scale(rows: int, columns: int) -> float:
        return config.muon_extra_scale_factor * scale_of_mode(rows, columns)

    return MatrixOptimizer(groups, config, fused, MatrixUpdate(direction, dtype, scale))
