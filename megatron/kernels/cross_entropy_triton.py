"""The kernels of `megatron.kernels.cross_entropy`: one row of logits per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
OPTIONS = {"num_warps": 8}


@triton.jit
def logit_statistics_kernel(
    logits,
    targets,
    found,
    rows,
    columns,
    num_valid_columns,
    gradient_scale,
    z_loss_weight,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """found[:, row] = largest logit, sum(exp(logit - largest)), logit of the target; then the gradient."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * columns
    # Each lane has its own largest value and sum; they are combined at the end. Finite: no lane gives NaN.
    largest = tl.full([BLOCK], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_valid_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < num_valid_columns, other=-float("inf")).to(tl.float32)
        new_largest = tl.maximum(largest, x)
        total = total * tl.exp(largest - new_largest) + tl.exp(x - new_largest)
        largest = new_largest
    row_largest = tl.max(largest, 0)
    exp_sum = tl.sum(total * tl.exp(largest - row_largest), 0)
    target = tl.load(targets + row)
    target_logit = tl.load(logits + target, mask=target >= 0, other=0.0).to(tl.float32)
    tl.store(found + row, row_largest)
    tl.store(found + rows + row, exp_sum)
    tl.store(found + 2 * rows + row, target_logit)
    if WITH_GRADIENT:
        _write_gradient(
            logits,
            target,
            row_largest,
            exp_sum,
            columns,
            num_valid_columns,
            gradient_scale,
            z_loss_weight,
            BLOCK,
        )


@triton.jit
def write_gradient_kernel(
    logits,
    targets,
    largest,
    exp_sums,
    columns,
    num_valid_columns,
    gradient_scale,
    z_loss_weight,
    BLOCK: tl.constexpr,
):
    """The gradient of a row from the numbers of the full vocabulary."""
    row = tl.program_id(0)
    _write_gradient(
        logits + row.to(tl.int64) * columns,
        tl.load(targets + row),
        tl.load(largest + row),
        tl.load(exp_sums + row),
        columns,
        num_valid_columns,
        gradient_scale,
        z_loss_weight,
        BLOCK,
    )


@triton.jit
def _write_gradient(
    logits,
    target,
    largest,
    exp_sum,
    columns,
    num_valid_columns,
    gradient_scale,
    z_loss_weight,
    BLOCK: tl.constexpr,
):
    factor = gradient_scale / exp_sum * (1.0 + 2.0 * z_loss_weight * (largest + tl.log(exp_sum)))
    # No thread may overwrite the target's logit before all have read it.
    tl.debug_barrier()
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < num_valid_columns, other=-float("inf")).to(tl.float32)
        gradient = tl.exp(x - largest) * factor - tl.where(column == target, gradient_scale, 0.0)
        tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < columns)


def launch_statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    found: torch.Tensor,
    num_valid_columns: int,
    gradient_scale: float,
    z_loss_weight: float,
    with_gradient: bool,
) -> None:
    """Fills `found`, and with_gradient overwrites `logits`; see `megatron::logit_statistics`."""
    rows, columns = logits.shape
    if rows:
        logit_statistics_kernel[(rows,)](
            logits,
            targets,
            found,
            rows,
            columns,
            num_valid_columns,
            gradient_scale,
            z_loss_weight,
            WITH_GRADIENT=with_gradient,
            BLOCK=BLOCK,
            **OPTIONS,
        )


def launch_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    largest: torch.Tensor,
    exp_sums: torch.Tensor,
    num_valid_columns: int,
    gradient_scale: float,
    z_loss_weight: float,
) -> None:
    """Overwrites `logits`; see `megatron::write_logit_gradient`."""
    rows, columns = logits.shape
    if rows:
        write_gradient_kernel[(rows,)](
            logits,
            targets,
            largest,
            exp_sums,
            columns,
            num_valid_columns,
            gradient_scale,
            z_loss_weight,
            BLOCK=BLOCK,
            **OPTIONS,
        )
