"""AdamW, with kernels in one pass over a flat partition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.kernels.adam import fused_adamw
from megatron.kernels.selection import uses_kernels


class AdamW(torch.optim.AdamW):
    """torch's AdamW, and `update_in_one_pass`. Both have one state: exp_avg, exp_avg_sq and step."""

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
        Returns False, and does nothing, if `step` has to update it."""
        if not uses_kernels(master):
            return False
        state = self.state[master]
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment not in state:
                state[moment] = torch.zeros_like(master, requires_grad=False)
        # On the host, where the bias corrections are computed. A checkpoint may have put it on the device.
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
