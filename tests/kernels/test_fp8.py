"""Compares FP8 matrices and their products with plain PyTorch. Kernels run in Triton's interpreter."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.kernel_cases import Inputs, fp8_case
from benchmarks.kernel_speed import SMALL, largest_error
from megatron.config import Config
from megatron.errors import UserError
from megatron.kernels import fp8
from megatron.kernels.grouped_linear import Groups
from megatron.model.gpt_model import pipeline_layers
from megatron.model.layer_context import LayerContext
from megatron.mpu import products as products_module
from megatron.mpu.grouped_linear import grouped_linear
from megatron.mpu.layers import linear
from megatron.mpu.mesh import ONE_RANK, Mesh
from megatron.mpu.products import Fp8, Fp8Products
from megatron.mpu.random import DropoutRNG
from megatron.mpu.weight_gradient import DeferredGradients, accumulate
from tests.support.layouts import Row, config_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
ROUNDING = {E4M3: 2**-4, E5M2: 2**-3}
"""Largest relative error of a rounded value that is not subnormal."""


@pytest.fixture(params=["reference", "triton"])
def computes(request, monkeypatch):
    """Selects the reference or the kernels for the test, and returns which."""
    monkeypatch.setattr(fp8, "uses_kernels", lambda _: request.param == "triton")
    return request.param


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Returns values whose magnitudes differ by block, with a block of zeros and a block of tiny values."""
    torch.manual_seed(sum(shape))
    x = torch.randn(shape) * torch.logspace(-4, 3, math.prod(shape)).view(shape)
    x.view(-1, shape[-1])[:128, :128] = 0.0
    x.view(-1, shape[-1])[-128:, -128:] *= 1e-30
    return x.to(dtype)


def expected_values(x: torch.Tensor, dtype: torch.dtype, rows: int, whole: bool) -> torch.Tensor:
    """Quantizes and dequantizes literally by the definition. rows: number of rows of a block."""
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
    """The second copy of a matrix has the transposed values. 130 rows do not fill their last tile."""
    x, matrices = tensor(130, 384), tensor(2, 256, 384)
    amax = (lambda t: t.float().abs().amax().view(1)) if whole else (lambda t: None)
    rows = fp8.quantize_rows(x, dtype, amax(x))
    found = fp8.dequantized(rows, is_matrix=False)
    assert torch.equal(found.double(), expected_values(x, dtype, 1, whole))
    if not whole:
        block = x.float().unflatten(1, (-1, 128))
        floor = block.abs().amax(-1, keepdim=True) * 2**-14  # at least the spacing of subnormal codes
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
    """The check multiplies blocks of different magnitudes, so that exchanged scales are found."""
    right = fp8._multiply_reference

    def wrong(x, matrix, bias):
        return right(x._replace(scales=x.scales.flip(0)), matrix, bias, None, torch.bfloat16)

    def good(x, matrix, bias):
        return right(x, matrix, bias, None, torch.bfloat16)

    def without_bias(x, matrix, bias):
        return right(x, matrix, None, None, torch.bfloat16)

    torchs = fp8._scaled_mm
    for replacement, runs in ((wrong, (False, False)), (good, (True, True)), (without_bias, (True, False))):
        monkeypatch.setattr(fp8, "_scaled_mm", replacement)
        fp8._has_scaled_mm.cache_clear()
        assert (
            tuple(fp8._has_scaled_mm(torch.device("cpu"), E4M3, False, bias) for bias in (False, True))
            == runs
        )
    monkeypatch.setattr(fp8, "_scaled_mm", torchs)
    fp8._has_scaled_mm.cache_clear()
    assert not fp8._has_scaled_mm(torch.device("cpu"), E4M3, False, False)
    fp8._has_scaled_mm.cache_clear()


@pytest.mark.parametrize("counts", [(), (7, 0)])
def test_the_benchmark_compares_kernels_with_the_reference(counts, monkeypatch):
    case = fp8_case(Inputs(SMALL, torch.bfloat16, torch.device("cpu"), torch.bfloat16), counts)
    results = []
    for uses_kernels in (True, False):
        monkeypatch.setattr(fp8, "uses_kernels", lambda _, uses=uses_kernels: uses)
        results.append(case.work())
    assert largest_error(*results) < 1e-3


def settings(**precision: Any) -> Config:
    return config_of(Row(precision="bf16"), precision={"bf16": True, "fp8_min_size": 0, **precision})


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


def test_a_shard_that_is_no_whole_number_of_blocks_is_rejected():
    with pytest.raises(ValueError, match=r"\[576, 2304\]: expected multiples of 128"):
        Fp8Products(Fp8(settings(fp8_recipe="blockwise"), ONE_RANK), torch.empty(576, 2304))


def test_layers_and_matrices_in_bf16_have_plain_products():
    """The limit is 170. A matrix counts by its global shape, on each layout: [768, 256] as 192 and [512, 256]
    as 171, so both compute in FP8, and [256, 256] as 128. Layers are chosen by their number in the model."""
    found: dict[int, list[list[str]]] = {}
    sizes: dict[str, Any] = {"hidden_size": 256, "kv_channels": 64, "ffn_hidden_size": 512}
    for size in (1, 2):
        mesh = Mesh(size, 1, 1)
        config = config_of(
            Row(tp=size, precision="fp8"),
            model={**sizes, "first_last_layers_bf16": True},
            precision={"fp8_min_size": 170},
        )
        context = LayerContext(config, mesh, DropoutRNG(1), fp8=Fp8.of(config, mesh))
        layers = [layer.build() for layer in pipeline_layers(context, 101, None)[3:7]]
        found[size] = [
            [
                name
                for name, part in layer.named_modules()
                if isinstance(getattr(part, "products", 0), Fp8Products)
            ]
            for layer in layers
        ]
    with_fp8 = ["self_attention.query_key_value", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]
    assert found[1] == found[2] == [[], with_fp8, with_fp8, []]


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
