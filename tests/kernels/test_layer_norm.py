"""Compares the kernels of norms after residual additions in Triton's interpreter with PyTorch."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.config.registries import NORMALIZATIONS
from megatron.kernels import layer_norm
from megatron.model import norm as norms
from megatron.model.norm import MixedFusedLayerNorm, RMSNorm, add_and_norm, in_kernel, norm_with_input
from megatron.mpu import random
from megatron.mpu.mesh import Axis
from megatron.mpu.random import DropoutMask, DropoutRNG

# Errors of sums over rows in fp32, and of rounding to 16 bits.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
NORMS = {name: NORMALIZATIONS.load(name) for name in NORMALIZATIONS}


def new_norm(kind, width, zero_centered, dtype):
    norm = NORMS[kind](width, 1e-5, zero_centered=zero_centered)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    return norm.to(dtype)


def passes(norm, inputs, mask, monkeypatch, fused, upstream):
    """Returns sum and norm, and the gradients of x, bias, residual and the parameters."""
    monkeypatch.setattr(norms, "uses_kernels", lambda _: fused)
    monkeypatch.setattr(random, "uses_kernels", lambda _: False)
    inputs = [None if tensor is None else tensor.clone().requires_grad_() for tensor in inputs]
    x, bias, residual = inputs
    if x is None:
        total, normed = norm_with_input(norm, residual)
    else:
        total, normed = add_and_norm(norm, x, residual, mask, bias)
    assert ("AddNorm" in normed.grad_fn.name()) == fused
    leaves = [*(tensor for tensor in inputs if tensor is not None), *norm.parameters()]
    found = (total, normed)
    of_total, of_normed = (gradient.to(y.dtype) for gradient, y in zip(upstream, found, strict=True))
    return [y.detach() for y in found], torch.autograd.grad(found, leaves, (of_total, of_normed))


CASES = {
    # Name -> (dtypes of x, bias and residual, dropout probability).
    "norm": (None, None, 0, 0.0),
    "sum": (0, None, 0, 0.0),
    "bias": (0, 0, 0, 0.0),
    "dropout": (0, 0, 0, 0.3),
    "fp32 residual": (0, 0, torch.float32, 0.3),
    "fp32 residual, no dropout": (0, None, torch.float32, 0.0),
}


@pytest.mark.gate(rows=5)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind,zero_centered,case", itertools.product(NORMS, (False, True), CASES))
def test_a_fused_norm_has_the_gradients_of_the_reference(kind, zero_centered, case, dtype, monkeypatch):
    """The input has two blocks of rows and a padded width."""
    torch.manual_seed(3)
    shape = (5, 2, 45)
    *dtypes, p = CASES[case]
    shapes = (shape, shape[-1:], shape)
    inputs = [
        None if each is None else (3 * torch.randn(size)).to(each or dtype)
        for each, size in zip(dtypes, shapes, strict=True)
    ]
    upstream = torch.randn(2, *shape)
    norm = new_norm(kind, shape[-1], zero_centered, dtype)
    mask = DropoutMask(p, DropoutRNG(1, (5, 6)), "4.mlp", 1, None, Axis("tp")) if p else None
    results = [passes(norm, inputs, mask, monkeypatch, fused, upstream) for fused in (False, True)]
    (total, normed), gradients = results[0]
    (found_total, found_normed), found = results[1]
    assert torch.equal(found_total, total)
    compared = zip((normed, *gradients), (found_normed, *found), strict=True)
    for expected, each in compared:
        assert each.dtype == expected.dtype
        scale = expected.float().abs().max().item()
        torch.testing.assert_close(each, expected, rtol=0, atol=TOLERANCE[dtype] * scale)


def test_the_dropout_of_a_wide_norm_has_its_own_kernel_in_the_backward_pass(monkeypatch):
    torch.manual_seed(3)
    shape = (3, 2, layer_norm.MAX_DROPOUT_WIDTH + 4)
    inputs, upstream = [torch.randn(size) for size in (shape, shape[-1:], shape)], torch.randn(2, *shape)
    norm = new_norm("LayerNorm", shape[-1], False, torch.float32)
    mask = DropoutMask(0.3, DropoutRNG(1, (5, 6)), "4.mlp", 1, None, Axis("tp"))
    expected, found = (passes(norm, inputs, mask, monkeypatch, fused, upstream) for fused in (False, True))
    for tensors, others in zip(expected, found, strict=True):
        torch.testing.assert_close(others, tensors, rtol=1e-4, atol=1e-5)


def test_the_sum_alone_or_the_norm_alone_has_its_gradient(monkeypatch):
    """With --apply-residual-connection-post-layernorm only the norm uses the sum."""
    monkeypatch.setattr(norms, "uses_kernels", lambda _: True)
    x, residual = torch.randn(2, 3, 7, requires_grad=True).unbind()
    norm = new_norm("LayerNorm", 7, False, torch.float32)
    total, normed = add_and_norm(norm, x, residual, None, None)
    (only_norm,) = torch.autograd.grad(normed.sum(), x, retain_graph=True)
    (both,) = torch.autograd.grad(normed.sum() + total.sum(), x, retain_graph=True)
    (only_sum,) = torch.autograd.grad(total.sum(), x)
    torch.testing.assert_close(only_norm + 1, both)
    torch.testing.assert_close(only_sum, torch.ones(3, 7))


def test_wide_norms_and_apex_stay_out_of_the_kernel(monkeypatch):
    monkeypatch.setattr(norms, "uses_kernels", lambda _: True)
    x = torch.zeros(1)
    with torch.device("meta"):
        assert in_kernel(RMSNorm(8192, 1e-5), x) and not in_kernel(RMSNorm(8193, 1e-5), x)
        assert not in_kernel(MixedFusedLayerNorm(8, 1e-5, use_apex=True), x)
    assert not in_kernel(torch.nn.Identity(), x)
