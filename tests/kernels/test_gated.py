"""The kernels of a gated MLP's activation against PyTorch, in triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from megatron.config.registries import GLU_ACTIVATIONS
from megatron.kernels.gated import BLOCK
from megatron.model import activations
from megatron.model.activations import gated_by

# Of values that are rounded once more than the reference's: sigmoids and exponentials differ in the last bit.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.gate(rows=6)
@pytest.mark.parametrize("width", [5, BLOCK + 3])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", GLU_ACTIVATIONS)
def test_output_and_gradient_are_those_of_the_reference(activation, dtype, width, monkeypatch):
    torch.manual_seed(5)
    wide, upstream = (4 * torch.randn(3, 2, 2 * width)).to(dtype), torch.randn(3, 2, width).to(dtype)
    wide[0, 0, -1], wide[1, 0, -1], wide[2, 0, -1] = -300.0, 300.0, 0.0
    results = []
    for fused in (False, True):
        x = wide.clone().requires_grad_()
        monkeypatch.setattr(activations, "uses_kernels", lambda _, answer=fused: answer)
        y = gated_by(activation)(x)
        assert ("GatedActivation" in y.grad_fn.name()) == fused
        results.append([y.detach(), *torch.autograd.grad(y, x, upstream)])
        assert y.dtype == dtype
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
