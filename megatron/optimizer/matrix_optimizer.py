"""Optimizers that update the weight of a linear layer as a matrix, and all other parameters with AdamW.

Muon (kellerjordan.github.io/posts/muon) updates a matrix by its orthogonalized momentum. A Newton-Schulz
iteration replaces the singular values of the momentum with values near 1. Published recipes scale the update
differently: see `SCALE_MODES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.config import OptimizerConfig
from megatron.optimizer.adam import AdamW


@dataclass(frozen=True)
class MatrixUpdate:
    """An optimizer's update of a matrix [rows, columns]. It subtracts --lr x scale x direction.

    direction: a function that maps the momentum of the matrix, fp32 or `dtype`, to a tensor of equal shape
    and any float dtype. dtype: `direction` first rounds its argument to this dtype, so ranks exchange
    matrices in this dtype. scale: a function (rows, columns) -> factor.
    """

    direction: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    scale: Callable[[int, int], float] = lambda rows, columns: 1.0

    def apply(self, weight: Tensor, rows: Sequence[int]) -> Tensor:
        """Returns the updates (scale x direction) of the matrices that are fused in `weight` [rows, columns],
        fp32. rows: `ParameterSpec.matrix_rows`. A stack of weights has one more dimension at the front."""
        if weight.dim() == 3:
            return torch.stack([self.apply(matrix, rows) for matrix in weight])
        columns, sizes = weight.shape[1], list(rows)
        parts = weight.view(-1, sum(rows), columns).split(sizes, 1)
        matrices = (part.reshape(-1, columns) for part in parts)
        # All directions are computed before the update is allocated, because the products need memory for
        # their results.
        scaled = [(self.direction(matrix), self.scale(*matrix.shape)) for matrix in matrices]
        update = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        for place, (direction, scale) in zip(
            update.view(-1, sum(rows), columns).split(sizes, 1), scaled, strict=True
        ):
            place.copy_(direction.reshape(place.shape)).mul_(scale)
        return update


class MatrixOptimizer(AdamW):
    """Updates groups with the key 'matrices' from a momentum of whole matrices, and all other groups with
    AdamW.

    A step has three parts. The parts `update_momentum` and `step` are elementwise, so they run on a rank's
    part of the parameters. Between these parts, `whole_matrices.WholeMatrices` replaces the momentum of whole
    matrices with their `matrix_update`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        config: OptimizerConfig,
        fused: bool,
        matrix_update: MatrixUpdate,
    ) -> None:
        betas = (config.adam_beta1, config.adam_beta2)
        settings: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": config.adam_eps, "weight_decay": 0.0}
        super().__init__(groups, fused=fused, foreach=not fused, **settings)
        self.matrix_update = matrix_update
        self._momentum, self._nesterov = config.muon_momentum, config.muon_use_nesterov

    def _matrices(self) -> list[tuple[dict[str, Any], Tensor, Tensor]]:
        """Returns (group, parameter, gradient) for each parameter of groups with the key 'matrices' that has
        a gradient."""
        return [
            (group, parameter, parameter.grad)
            for group in self.param_groups
            if group.get("matrices")
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    @torch.no_grad()
    def update_momentum(self) -> None:
        """Adds the gradients of matrices to their momentum, and overwrites the gradients with the
        momentum, or with Nesterov momentum."""
        for _, parameter, gradient in self._matrices():
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momentum = state["momentum_buffer"].lerp_(gradient, 1.0 - self._momentum)
            if self._nesterov:
                gradient.lerp_(momentum, self._momentum)
            else:
                gradient.copy_(momentum)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Updates all parameters with a gradient. The gradients of matrices must already be replaced by their
        updates."""
        for group, parameter, update in self._matrices():
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
            parameter.grad = None  # AdamW would update it, too
        super().step()


# Coefficients and smallest norm of Keller Jordan's implementation and of torch.optim.Muon.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

SCALE_MODES: Mapping[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: max(rows, columns) ** 0.5,
    "unit_rms_norm": lambda rows, columns: (rows / columns) ** 0.5,
    "shape_scaling": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}
"""The value of --muon-scale-mode -> the scale of the update of a matrix [rows, columns]."""


def newton_schulz(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Returns the matrix [rows, columns] with its singular values replaced by values near 1, computed in
    `dtype`."""
    a, b, c = _COEFFICIENTS
    x = matrix.to(dtype)
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:  # products of the shorter side are cheaper
        x = x.T
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def make_muon(groups: list[dict[str, Any]], config: OptimizerConfig, fused: bool) -> MatrixOptimizer:
    """Returns Muon, which updates the parameters that are not matrices of linear layers with AdamW."""
    in_fp32 = all(parameter.dtype == torch.float32 for group in groups for parameter in group["params"])
    dtype = _DTYPES[config.muon_matmul_dtype or ("fp32" if in_fp32 else "bf16")]
    scale_of_mode = SCALE_MODES[config.muon_scale_mode]

    def direction(matrix: Tensor) -> Tensor:
        return newton_schulz(matrix, config.muon_num_ns_steps, dtype)

    def scale(rows: int, columns: int) -> float:
        return config.muon_extra_scale_factor * scale_of_mode(rows, columns)

    return MatrixOptimizer(groups, config, fused, MatrixUpdate(direction, dtype, scale))
