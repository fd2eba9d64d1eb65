"""Optimizers that update the weight of a linear layer as a matrix, and all other parameters with Adam."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.config import OptimizerConfig
from megatron.optimizer.adam import AdamW


def _no_scale(rows: int, columns: int) -> float:
    return 1.0


@dataclass(frozen=True)
class MatrixUpdate:
    """How an optimizer updates a matrix [rows, columns]: it subtracts --lr x scale x direction.

    direction: momentum of the matrix, fp32 or `dtype` -> tensor of its shape, of any float dtype. dtype:
    `direction` rounds its argument to this dtype first, so ranks exchange matrices in it. scale: (rows,
    columns) -> factor.
    """

    direction: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    scale: Callable[[int, int], float] = _no_scale

    def apply(self, weight: Tensor, rows: Sequence[int]) -> Tensor:
        """Returns the updates (scale x direction) of the matrices that are fused in `weight` [rows, columns],
        fp32. rows: `ParameterSpec.matrix_rows`. A stack of weights has one more dimension."""
        if weight.dim() == 3:
            return torch.stack([self.apply(matrix, rows) for matrix in weight])
        columns, sizes = weight.shape[1], list(rows)
        parts = weight.view(-1, sum(rows), columns).split(sizes, 1)
        matrices = (part.reshape(-1, columns) for part in parts)
        # All directions first: the products need memory for their results, before the update exists.
        scaled = [(self.direction(matrix), self.scale(*matrix.shape)) for matrix in matrices]
        update = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        for place, (direction, scale) in zip(
            update.view(-1, sum(rows), columns).split(sizes, 1), scaled, strict=True
        ):
            place.copy_(direction.reshape(place.shape)).mul_(scale)
        return update


class MatrixOptimizer(AdamW):
    """Updates groups with the key 'matrices' from a momentum of whole matrices, other groups with AdamW.

    A step has three parts. `update_momentum` and `step` are elementwise, so they run on a rank's part of the
    parameters. Between the two, `whole_matrices.WholeMatrices` replaces the momentum of whole matrices by
    their `matrix_update`.
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
        """Returns (group, parameter, its gradient) of each parameter of matrices with a gradient."""
        return [
            (group, parameter, parameter.grad)
            for group in self.param_groups
            if group.get("matrices")
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    @torch.no_grad()
    def update_momentum(self) -> None:
        """Adds the gradients of matrices to their momentum, and replaces them by the momentum."""
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
        """Updates all parameters with a gradient; the gradients of matrices are their updates."""
        for group, parameter, update in self._matrices():
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
            parameter.grad = None  # AdamW updates the parameters that have a gradient
        super().step()
