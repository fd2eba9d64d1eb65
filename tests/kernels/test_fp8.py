"""FP8 matrices and their products against plain PyTorch; kernels run in triton's interpreter."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron.config import Config
from megatron.errors import UserError
from megatron.kernels import fp8
from megatron.kernels.grouped_linear import Groups
from megatron.mpu import products as products_module
from megatron.mpu.deferred_gradients import DeferredGradients, accumulate
from megatron.mpu.grouped_linear import grouped_linear
from megatron.mpu.layers import linear
from megatron.mpu.mesh import ONE_RANK
from megatron.mpu.products import Fp8, Fp8Products
from tests.support.layouts import Row, config_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
ROUNDING = {E4M3: 2**-4, E5M2: 2**-3}
"""Largest relative error of a rounded value that is not subnormal."""


@pytest.fixture(params=["reference", "triton"])
def computes(request, monkeypatch):
    """Makes the reference or the kernels compute, and returns which."""
    monkeypatch.setattr(fp8, "uses_kernels", lambda _: request.param == "triton")
    return request.param


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values whose magnitudes differ by block, with a block of zeros and one of tiny values."""
    torch.manual_seed(sum(shape))
    x = torch.randn(shape) * torch.logspace(-4, 3, math.prod(shape)).view(shape)
    x.view(-1, shape[-1])[:128, :128] = 0.0
    x.view(-1, shape[-1])[-128:, -128:] *= 1e-30
    return x.to(dtype)


def expected_values(x: torch.Tensor, dtype: torch.dtype, rows: int, whole: bool) -> torch.Tensor:
    """Quantizes and dequantizes in the words of the definition. rows: of a block."""
    x = x.double()
    blocks = x.view(-1, rows, x.shape[-1] // 128, 128) if rows > 1 else x.view(-1, 1, x.shape[-1] // 128, 128)
    amax = blocks.abs().amax((1, 3), keepdim=True) if not whole else blocks.abs().amax()
    exponent = torch.ceil(torch.log2(torch.where(amax > 0, amax, 1e-38) / LARGEST[dtype])).clamp(min=-126)
    scale = 2.0**exponent
    codes = (blocks / scale).float().to(dtype)
    return (codes.double() * scale).view(x.shape)


@pytest.mark.parametrize("whole", [False, True], ids=["blockwise", "tensorwise"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rows_and_matrices_are_quantized_by_their_definition(dtype, whole, computes):
    """The second copy of a matrix has the transposed values; 130 rows are no whole tile."""
    x, matrices = tensor(130, 384), tensor(2, 256, 384)
    amax = (lambda t: t.float().abs().amax().view(1)) if whole else (lambda t: None)
    rows = fp8.quantize_rows(x, dtype, amax(x))
    found = fp8.dequantized(rows, is_matrix=False)
    assert torch.equal(found.double(), expected_values(x, dtype, 1, whole))
    if not whole:
        block = x.float().unflatten(1, (-1, 128))
        floor = block.abs().amax(-1, keepdim=True) * 2**-14  # the spacing of subnormal codes, and more
        assert ((found.view_as(block) - block).abs() <= ROUNDING[dtype] * block.abs() + floor).all()
    for memory in (matrices.shape, matrices[0].shape):
        into = fp8.empty_matrices(memory, dtype, whole)
        fp8.quantize_matrices(
            matrices.view(-1, *memory[-2:])[0] if len(memory) == 2 else matrices, into, amax(matrices)
        )
        values = fp8.dequantized(into[0], is_matrix=True)
        exact = expected_values(matrices, dtype, 128, whole)
        assert torch.equal(values.double(), exact if len(memory) == 3 else exact[0])
        assert torch.equal(fp8.dequantized(into[1], is_matrix=True), values.transpose(-1, -2))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite_stay_so(bad, computes):
    x, matrix = tensor(3, 256), tensor(128, 256)
    x[1, 200] = bad
    into = fp8.empty_matrices(matrix.shape, E4M3, whole=False)
    fp8.quantize_matrices(matrix, into)
    y = fp8.multiply(fp8.quantize_rows(x, E4M3), into[0], None, None, torch.bfloat16)
    assert y[[0, 2]].isfinite().all()
    assert not y[1].isfinite().any()


@pytest.mark.parametrize("whole", [False, True], ids=["blockwise", "tensorwise"])
@pytest.mark.parametrize("counts", [None, (1, 0, 130), (0, 0, 0)], ids=str)
def test_products_are_products_of_the_values(counts, whole, computes):
    experts = () if counts is None else (len(counts),)
    x, bias = torch.randn(5 if counts is None else sum(counts), 384).bfloat16(), torch.randn(*experts, 256)
    matrices = torch.randn(*experts, 256, 384)
    amax = torch.full((1,), 5.0) if whole else None
    rows, into = fp8.quantize_rows(x, E5M2, amax), fp8.empty_matrices(matrices.shape, E4M3, whole)
    fp8.quantize_matrices(matrices, into, amax)
    left = fp8.dequantized(rows, is_matrix=False).double()
    right = fp8.dequantized(into[0], is_matrix=True).double()
    for with_bias in (False, True):
        added = bias.double() if with_bias else torch.zeros_like(bias).double()
        groups = None if counts is None else Groups(counts)
        if groups is None:
            exact = F.linear(left, right, added)
        else:
            parts = left.split(counts)
            exact = torch.cat([F.linear(part, right[e], added[e]) for e, part in enumerate(parts)])
        y = fp8.multiply(rows, into[0], bias if with_bias else None, groups, torch.float32)
        torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_wrong_scaled_mm_is_not_used(monkeypatch, caplog):
    """The probe multiplies blocks of different magnitudes, so that exchanged scales are found."""
    right = fp8._multiply_reference

    def wrong(x, x_scales, matrix, scales, bias):
        return right(
            fp8.Quantized(x, x_scales.flip(0)), fp8.Quantized(matrix, scales), bias, None, torch.bfloat16
        )

    def good(x, x_scales, matrix, scales, bias):
        return right(fp8.Quantized(x, x_scales), fp8.Quantized(matrix, scales), bias, None, torch.bfloat16)

    for replacement, runs in ((wrong, False), (good, True), (fp8._scaled_mm, False)):
        monkeypatch.setattr(fp8, "_scaled_mm", replacement)
        fp8._has_scaled_mm.cache_clear()
        assert fp8._has_scaled_mm(torch.device("cpu"), E4M3, False) is runs
    fp8._has_scaled_mm.cache_clear()


def settings(**precision: str) -> Config:
    return config_of(Row(precision="bf16"), precision={"bf16": True, **precision})


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
@pytest.mark.parametrize("deferred", [None, DeferredGradients()], ids=["at once", "deferred"])
def test_a_linear_layer_has_fp8_products_and_an_exact_weight_gradient(recipe, form, deferred):
    whole = recipe == "tensorwise"
    layers_fp8 = Fp8(settings(fp8_recipe=recipe, fp8_format=form), ONE_RANK)
    x, weight = (tensor(*shape, dtype=torch.float32).requires_grad_() for shape in ((7, 2, 256), (384, 256)))
    bias, grad = torch.randn(384, requires_grad=True), torch.randn(7, 2, 384)
    gradient_format = E4M3 if form == "e4m3" else E5M2
    products = Fp8Products(layers_fp8, weight)
    y = linear(x, weight, bias, deferred, products=products)
    y.backward(grad)
    if deferred is not None:
        accumulate(deferred.take())
    values = expected_values(weight.detach(), E4M3, 128, whole)
    flat, rows = x.detach().view(-1, 256), grad.view(-1, 384)
    exact = F.linear(expected_values(flat, E4M3, 1, whole), values, bias.detach().double())
    torch.testing.assert_close(y.detach().view(-1, 384).double(), exact, rtol=1e-5, atol=1e-4)
    exact = expected_values(rows, gradient_format, 1, whole) @ values
    torch.testing.assert_close(x.grad.view(-1, 256).double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(weight.grad, rows.t() @ flat)
    torch.testing.assert_close(bias.grad, rows.sum(0))


def test_weights_are_quantized_once_until_they_change():
    layers_fp8 = Fp8(settings(fp8_recipe="blockwise"), ONE_RANK)
    weight, x = torch.randn(128, 128, requires_grad=True), torch.randn(4, 128, requires_grad=True)
    products = Fp8Products(layers_fp8, weight)
    first = linear(x, weight, None, products=products)
    with torch.no_grad():
        weight.mul_(2.0)
        assert torch.equal(linear(x, weight, None, products=products), first)
        layers_fp8.weights_changed()
        assert torch.equal(linear(x, weight, None, products=products), 2 * first)
    assert sum(copy.nbytes for copy in layers_fp8.copies) == 2 * weight.numel() + 2 * 4 * 4


def test_a_gpu_without_fp8_is_rejected_at_the_start(monkeypatch):
    monkeypatch.setattr(
        products_module, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda")
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    config = settings(fp8_recipe="blockwise")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(UserError, match="--fp8-recipe blockwise on NVIDIA A100.*Remove --fp8-format"):
        Fp8(config, ONE_RANK)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert Fp8(config, ONE_RANK).keeps_weights


def test_experts_have_the_products_of_their_own_layers():
    layers_fp8 = Fp8(settings(fp8_recipe="blockwise", fp8_format="hybrid"), ONE_RANK)
    counts = (3, 0, 130)
    x, weight = torch.randn(133, 256, requires_grad=True), torch.randn(3, 128, 256, requires_grad=True)
    grad = torch.randn(133, 128)
    y = grouped_linear(x, weight, None, Groups(counts), products=Fp8Products(layers_fp8, weight))
    found = torch.autograd.grad(y, (x, weight), grad)
    outputs, gradients = [], []
    for part, matrix, upstream in zip(x.split(counts), weight, grad.split(counts), strict=True):
        alone, matrix = part.detach().requires_grad_(), matrix.detach().requires_grad_()
        outputs.append(linear(alone, matrix, None, products=Fp8Products(layers_fp8, matrix)))
        gradients.append(torch.autograd.grad(outputs[-1], (alone, matrix), upstream))
    torch.testing.assert_close(y, torch.cat(outputs))
    torch.testing.assert_close(found[0], torch.cat([of_x for of_x, _ in gradients]))
    torch.testing.assert_close(found[1], torch.stack([of_weight for _, of_weight in gradients]))
