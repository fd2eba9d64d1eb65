"""Lion (arXiv:2302.06675): the sign of a momentum as the update, with decoupled weight decay."""

from __future__ import annotations

from typing import Any

import torch

from megatron.config import OptimizerConfig


class Lion(torch.optim.Optimizer):
    """Keeps one moment, 'exp_avg': a running mean of the gradients with decay rate beta2."""

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float]) -> None:
        """betas: decay rates of the momentum in the update, and of the momentum that is kept."""
        super().__init__(groups, {"lr": 0.0, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Updates the parameters that have a gradient."""
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                update = state["exp_avg"].lerp(parameter.grad, 1.0 - beta1).sign_()
                parameter.mul_(1.0 - lr * group["weight_decay"]).add_(update, alpha=-lr)
                state["exp_avg"].lerp_(parameter.grad, 1.0 - beta2)


def make_lion(groups: list[dict[str, Any]], config: OptimizerConfig, fused: bool) -> torch.optim.Optimizer:
    """Returns Lion. fused: unused, since PyTorch has no fused Lion."""
    return Lion(groups, (config.lion_beta1, config.lion_beta2))
