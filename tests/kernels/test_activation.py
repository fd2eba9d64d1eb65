"""Compares the kernels of activations, and of the gradient of the bias before them, with PyTorch in Triton's
interpreter; and whole layers with fused kernels with layers without."""

from __future__ import annotations

import pytest
import torch

from megatron.arguments import parse_args
from megatron.config.registries import ACTIVATIONS, LAYER_ARRANGEMENTS
from megatron.kernels import activation, selection
from megatron.kernels.activation import BLOCK, fused_activation, gated_activation
from megatron.model.gpt_model import ParallelTransformerLayerPipe
from megatron.model.layer_context import LayerContext
from megatron.mpu.mesh import ONE_RANK
from megatron.mpu.parameters import initialize_parameters
from megatron.mpu.random import DropoutRNG
from tests.kernels.test_gated import TOLERANCE


@pytest.mark.gate(rows=4)
@pytest.mark.parametrize("shape", [(3, 2, 5), (9, 1, 300), (BLOCK + 1, 1)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_output_and_gradients_are_those_of_the_reference(activation, dtype, shape):
    torch.manual_seed(5)
    x, bias = (4 * torch.randn(shape)).to(dtype), torch.zeros(shape[-1], dtype=dtype, requires_grad=True)
    upstream = torch.randn(shape).to(dtype)
    exact = x.double().requires_grad_()
    expected = ACTIVATIONS.load(activation)(exact)
    (gradient,) = torch.autograd.grad(expected, exact, upstream.double())
    for with_bias in (True, False):
        leaf = x.clone().requires_grad_()
        y = fused_activation(leaf * 1, bias if with_bias else None, activation)
        found = torch.autograd.grad(y, (leaf, bias) if with_bias else leaf, upstream)
        for each, of_reference in zip((y, found[0]), (expected, gradient), strict=True):
            assert each.dtype == dtype
            torch.testing.assert_close(
                each.double(), of_reference, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )
    sums = found[0].double().flatten(0, -2).sum(0)
    (of_bias,) = torch.autograd.grad(fused_activation(x.clone(), bias, activation), bias, upstream)
    torch.testing.assert_close(of_bias.double(), sums, rtol=TOLERANCE[dtype], atol=4e-6 * len(x))


def test_another_number_of_rows_is_not_another_launch():
    """Experts have a different number of rows in each step. Fails if each number of rows makes a new
    launch."""
    launches = (activation._launch, activation._gated_launch)
    for each in launches:
        each.cache_clear()
    for rows in (3, 5, 70):
        x, wide = torch.randn(rows, 8, requires_grad=True), torch.randn(rows, 16, requires_grad=True)
        fused_activation(x * 1, None, "gelu").sum().backward()
        gated_activation(wide * 1, "swiglu").sum().backward()
    assert [each.cache_info().currsize for each in launches] == [2, 2]


FLAGS = (
    "--dry-run --vocab-size 100 --num-layers 1 --micro-batch-size 2 --lr 1 --global-batch-size 2 "
    "--seq-length 5 --train-iters 1 --max-position-embeddings 5 --hidden-size 24 --num-attention-heads 3 "
    "--attention-dropout 0 "
)
LAYERS = {
    **{name: f"--layer-arrangement {name}" for name in LAYER_ARRANGEMENTS},
    "residual after norm": "--apply-residual-connection-post-layernorm",
    "rms": "--normalization RMSNorm --position-embedding-type rotary --qk-layernorm --add-qkv-bias",
    "gated": "--glu-activation swiglu --disable-bias-linear",
}


@pytest.mark.gate(rows=6)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_with_kernels_has_the_gradients_of_a_layer_without(layer, dropout, monkeypatch):
    """The layers compute in fp32, with each value of --layer-arrangement."""
    config = parse_args(f"{FLAGS} --hidden-dropout {dropout} {LAYERS[layer]}".split(), {})
    torch.manual_seed(2)
    x, upstream = torch.randn(2, 5, 2, 24)
    results = []
    for kernels in (False, True):
        monkeypatch.setattr(selection, "_device_uses_kernels", lambda _, answer=kernels: answer)
        module = ParallelTransformerLayerPipe(LayerContext(config, ONE_RANK, DropoutRNG(1, (3, 4))), 3)
        initialize_parameters(module, 7, ())
        for parameter in module.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(9))
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        leaves = [leaf, *module.parameters()]
        names = ["input", *(name for name, _ in module.named_parameters())]
        gradients = torch.autograd.grad(y, leaves, upstream)
        results.append(dict(zip(["output", *names], (y.detach(), *gradients), strict=True)))
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=2e-5, atol=2e-5, msg=name)
