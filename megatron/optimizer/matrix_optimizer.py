"""Optimizers that update the weight of a linear layer as a matrix, and all other parameters with Adam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.config import OptimizerConfig


class MatrixOptimizer(torch.optim.AdamW):
    """Updates groups with the key 'matrices' from a momentum of whole matrices, other groups with AdamW.

    A step has three parts. `update_momentum` and `step` are elementwise, so they run on a rank's part of the
    parameters. Between the two, `whole_matrices.WholeMatrices` applies `matrix_update` to whole matrices.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        config: OptimizerConfig,
        fused: bool,
        matrix_update: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> None:
        """matrix_update: momentum of a matrix [rows, columns], fp32 or `dtype` -> update, fp32. A step
        subtracts --lr times the update. dtype: `matrix_update` rounds its argument to this dtype first, so
        ranks exchange matrices in it."""
        betas = (config.adam_beta1, config.adam_beta2)
        settings: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": config.adam_eps, "weight_decay": 0.0}
        super().__init__(groups, fused=fused, foreach=not fused, **settings)
        self.matrix_update, self.matrix_dtype = matrix_update, dtype
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
