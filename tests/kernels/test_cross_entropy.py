"""Compares the cross entropy of a chunk of logits in Triton's interpreter with PyTorch."""

from __future__ import annotations

import pytest
import torch

from megatron.kernels.cross_entropy import (
    BLOCK,
    logit_statistics_and_gradient_op,
    logit_statistics_op,
    write_logit_gradient_op,
)
from megatron.mpu import logit_chunks
from megatron.mpu.cross_entropy import vocab_parallel_linear_cross_entropy
from megatron.mpu.mesh import Axis

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}
# Name -> (columns, valid columns): less than a block, ragged blocks, full blocks, padding of more than a
# block.
SIZES = {
    "small": (96, 70),
    "ragged": (BLOCK + 5, BLOCK + 5),
    "full": (2 * BLOCK, 2 * BLOCK),
    "padded": (3 * BLOCK, BLOCK - 1),
    "one": (1, 1),
}


def logits_of(dtype, size, rows=5):
    """Returns logits with large differences, and targets. One row's target is on another rank."""
    columns, num_valid_columns = SIZES[size]
    generator = torch.Generator().manual_seed(columns)
    logits = (3 * torch.randn(rows, columns, generator=generator)).to(dtype)
    logits[1] += 40.0
    logits[2, -1] = 60.0  # padding in some cases
    targets = torch.randint(0, num_valid_columns, (rows,), generator=generator)
    targets[3] = -1
    return logits, targets, num_valid_columns


def reference(logits, targets, num_valid_columns, scale, z_loss_weight):
    """Returns (largest, sum, target's logit, gradient) in fp64."""
    x = logits.double()[:, :num_valid_columns]
    largest, log_sum = x.amax(-1), x.logsumexp(-1)
    own = targets >= 0
    target_logit = x.gather(-1, targets.clamp(min=0)[:, None])[:, 0] * own
    gradient = torch.zeros_like(logits, dtype=torch.float64)
    gradient[:, :num_valid_columns] = x.softmax(-1) * (1 + 2 * z_loss_weight * log_sum)[:, None]
    gradient[torch.arange(len(x)), targets.clamp(min=0)] -= own.double()
    return largest, (log_sum - largest).exp(), target_logit, scale * gradient


@pytest.mark.gate(rows=10)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scale,z_loss_weight", [(1.0, 0.0), (64.0, 0.01)])
def test_statistics_and_gradient_are_those_of_the_definition(size, dtype, scale, z_loss_weight):
    logits, targets, num_valid_columns = logits_of(dtype, size)
    *statistics, gradient = reference(logits, targets, num_valid_columns, scale, z_loss_weight)
    untouched = logits.clone()
    apart = logit_statistics_op(untouched, targets, num_valid_columns)
    assert torch.equal(untouched, logits)
    found = logit_statistics_and_gradient_op(logits, targets, num_valid_columns, scale, z_loss_weight)
    assert torch.equal(found, apart)
    for value, expected in zip(found, statistics, strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(
        logits.double(), gradient, rtol=TOLERANCE[dtype], atol=scale * TOLERANCE[dtype]
    )
    assert logits[:, num_valid_columns:].abs().sum() == 0
    write_logit_gradient_op(untouched, targets, found[0], found[1], num_valid_columns, scale, z_loss_weight)
    assert torch.equal(untouched, logits)


def test_a_rank_with_padding_only_has_no_sum():
    logits = torch.full((2, 100), 7.0)
    largest, exp_sum, target_logit = logit_statistics_op(logits, torch.tensor([-1, -1]), 0)
    assert exp_sum.tolist() == target_logit.tolist() == [0.0, 0.0]
    assert largest.isfinite().all() and (largest < -1e38).all()
    write_logit_gradient_op(logits, torch.tensor([-1, -1]), torch.ones(2), torch.ones(2), 0, 1.0, 0.0)
    assert logits.abs().sum() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_makes_its_row_nan(bad):
    logits = torch.zeros(2, 50)
    logits[1, 20] = bad
    found = logit_statistics_and_gradient_op(logits, torch.tensor([3, 3]), 50, 1.0, 0.0)
    assert (found[0] + found[1].log()).isfinite().tolist() == [True, False]
    assert logits.isfinite().all(dim=1).tolist() == [True, False]


@pytest.mark.gate(rows=4)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"z_loss_weight": 0.01, "softcapping": 2.0}])
def test_the_fused_loss_with_kernels_is_that_without(dtype, options, monkeypatch):
    """The logits have several chunks, and the vocabulary is padded."""
    monkeypatch.setattr(logit_chunks, "CPU_CHUNK_TOKENS", {2: 11, 4: 11})
    torch.manual_seed(1)
    hidden, weight = torch.randn(25, 24).to(dtype), torch.randn(96, 24).mul(0.5).to(dtype)
    labels = torch.randint(0, 70, (25,))
    results = []
    for with_kernels in (False, True):
        monkeypatch.setattr(logit_chunks, "uses_kernels", lambda _, answer=with_kernels: answer)
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        losses = vocab_parallel_linear_cross_entropy(*inputs, labels, Axis("tp"), 70, **options)
        results.append([losses.detach(), *torch.autograd.grad(losses.sum(), inputs)])
    for found, expected in zip(results[1], results[0], strict=True):
        assert (found - expected).norm() <= 2 * TOLERANCE[dtype] * expected.norm()


def test_outside_of_training_the_kernel_writes_no_gradient(monkeypatch):
    monkeypatch.setattr(logit_chunks, "uses_kernels", lambda _: True)
    hidden, weight, labels = torch.randn(5, 8), torch.randn(32, 8), torch.tensor([0, 31, 4, -1, 32])
    losses = vocab_parallel_linear_cross_entropy(hidden, weight, labels, Axis("tp"), 32)
    expected = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels.clamp(0, 31), reduction="none")
    torch.testing.assert_close(losses[:3], expected[:3])
    assert losses[3:].isnan().all()
