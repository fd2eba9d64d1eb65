"""Elementwise optimizers: AdamW, which updates a flat partition in one pass if a kernel runs, and Lion."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import OptimizerConfig
from megatron.kernels.optimizer import fused_adamw
from megatron.kernels.selection import uses_kernels


class AdamW(torch.optim.AdamW):
    """torch's AdamW with the additional method `update_in_one_pass`. Both ways of updating share the state
    exp_avg, exp_avg_sq and step."""

    @torch.no_grad()
    def update_in_one_pass(
        self,
        group: dict[str, Any],
        master: nn.Parameter,
        gradient: Tensor,
        factor: float,
        rounded: Tensor | None,
    ) -> bool:
        """Updates the flat fp32 parameter of a group from gradient * factor, and copies it to `rounded`.
        Returns False, without any effect, if the group has to be updated by `step`."""
        if not uses_kernels(master):
            return False
        state = self.state[master]
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment not in state:
                state[moment] = torch.zeros_like(master, requires_grad=False)
        # The step is kept on the host, where the bias corrections are computed. A checkpoint may have put it
        # on the device.
        state["step"] = state["step"].cpu() + 1 if "step" in state else torch.tensor(1.0)
        fused_adamw(
            master.detach(),
            gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
            rounded,
            factor=factor,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=int(state["step"]),
        )
        return True


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675). It keeps one moment, 'exp_avg': a running mean of the gradients with decay
    rate beta2."""

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float]) -> None:
        """betas: decay rates of the momentum that the update uses, and of the momentum that is stored."""
        super().__init__(groups, {"lr": 0.0, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
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
    """Returns a Lion optimizer. fused: has no effect, because PyTorch has no fused Lion."""
    return Lion(groups, (config.lion_beta1, config.lion_beta2))
