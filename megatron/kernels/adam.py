"""Operator `megatron::adamw`: a step of AdamW in one pass over memory, from the sum of the scaled gradients
to the weights in the run's precision.

An element costs 4 bytes for its gradient, 8 for the fp32 weight, 16 for the moments and 2 for the rounded
weight: 30 bytes. The formulas are those of `torch.optim.AdamW(fused=True)`. Every operation is rounded as
IEEE 754 specifies, without fused multiply-add. So the result does not depend on an element's place.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from megatron.kernels.operators import Launch, operator

BLOCK = 2048
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


def fused_adamw(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rounded: Tensor | None,
    *,
    factor: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Updates `master` and its moments from gradient * factor, and copies `master` to `rounded`, if given.

    All tensors are flat and contiguous, and fp32 except `rounded`. step: number of this update, from 1.
    """
    correction1, correction2 = (1.0 - beta**step for beta in betas)
    adamw_op(
        master,
        gradient,
        exp_avg,
        exp_avg_sq,
        rounded,
        float(factor),
        1.0 - lr * weight_decay,
        lr / correction1,
        1.0 - betas[0],
        float(betas[1]),
        1.0 - betas[1],
        correction2**0.5,
        float(eps),
    )


@operator("adamw", mutates_args=("master", "exp_avg", "exp_avg_sq", "rounded"))
def adamw_op(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rounded: Tensor | None,
    factor: float,
    decay: float,
    step_size: float,
    weight1: float,
    beta2: float,
    weight2: float,
    correction: float,
    eps: float,
) -> None:
    """Launches the kernel, which documents the numbers."""
    numbers = (factor, decay, step_size, weight1, beta2, weight2, correction, eps)
    _launch(master.numel())(master, gradient, exp_avg, exp_avg_sq, rounded, *numbers)


@adamw_op.register_fake
def _(*_arguments: Tensor | float | None) -> None:
    return None


@lru_cache
def _launch(length: int) -> Launch:
    grid = (-(-length // BLOCK), 1)
    return Launch("triton_kernels.adamw_kernel", grid, OPTIONS, length=length, BLOCK=BLOCK)
