"""Operators for the cross entropy of a chunk of logits. The gradient overwrites the logits.

With one tensor-parallel rank, one launch computes losses and gradient. It reads each row once to find its
largest logit and its sum, and a second time to write the gradient; rows that fit in the cache are then read
from the cache. With several ranks, the ranks exchange three numbers per row between two launches.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from megatron.kernels.operators import Launch, operator

BLOCK = 4096
OPTIONS = {"num_warps": 8}


@operator("logit_statistics")
def logit_statistics_op(logits: Tensor, targets: Tensor, num_valid_columns: int) -> Tensor:
    """Returns fp32 [3, rows]: each row's largest logit, sum(exp(logit - largest)), and the logit of its
    target.

    logits: [rows, columns], contiguous, fp32, bf16 or fp16. Only the first `num_valid_columns` columns count.
    targets: int64 [rows]; -1 if the target is on a different rank. The target's logit is then 0.
    """
    return _statistics(logits, targets, num_valid_columns, 0.0, 0.0, with_gradient=False)


@operator("logit_statistics_and_gradient", mutates_args=("logits",))
def logit_statistics_and_gradient_op(
    logits: Tensor, targets: Tensor, num_valid_columns: int, gradient_scale: float, z_loss_weight: float
) -> Tensor:
    """Runs `logit_statistics_op`, and then `write_logit_gradient_op` with its results, in one launch."""
    return _statistics(logits, targets, num_valid_columns, gradient_scale, z_loss_weight, with_gradient=True)


def _statistics(logits: Tensor, targets: Tensor, *settings: float, with_gradient: bool) -> Tensor:
    found = logits.new_empty(3, len(logits), dtype=torch.float32)
    launch = _launch("logit_statistics_kernel", logits.shape, settings, WITH_GRADIENT=with_gradient)
    launch(logits, targets, found)
    return found


@lru_cache(maxsize=1024)
def _launch(
    kernel: str,
    shape: torch.Size,
    settings: tuple[float, ...],
    **constants: bool,
) -> Launch:
    """Returns the launch of a kernel. shape: the shape of the logits. settings: see
    `triton_kernels._write_gradient`. constants: the kernel's constants besides the size of its blocks."""
    rows, columns = shape
    return Launch(
        f"triton_kernels.{kernel}",
        (rows, 1),
        OPTIONS,
        columns=columns,
        settings=settings,
        BLOCK=BLOCK,
        **constants,
    )


@operator("write_logit_gradient", mutates_args=("logits",))
def write_logit_gradient_op(
    logits: Tensor,
    targets: Tensor,
    largest: Tensor,
    exp_sums: Tensor,
    num_valid_columns: int,
    gradient_scale: float,
    z_loss_weight: float,
) -> None:
    """Sets logits = gradient_scale * (softmax * (1 + 2 * z_loss_weight * log(Z)) - [target]). The columns
    from `num_valid_columns` on become zero.

    largest, exp_sums: fp32 [rows], over the full vocabulary; log(Z) = largest + log(exp_sums). For the other
    arguments see `logit_statistics_op`.
    """
    settings = (num_valid_columns, gradient_scale, z_loss_weight)
    _launch("write_gradient_kernel", logits.shape, settings)(logits, targets, largest, exp_sums)
