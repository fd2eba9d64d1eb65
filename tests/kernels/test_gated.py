"""Compares the kernels of a gated MLP's activation in Triton's interpreter with PyTorch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron.config.registries import GLU_ACTIVATIONS
from megatron.kernels.activation import GATED_BLOCK, gated_activation
from megatron.model import activations
from megatron.model.activations import gated_by
from megatron.mpu.recompute import recomputed

# Errors of sigmoids and exponentials in fp32, and of rounding to 16 bits.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.gate(rows=6)
@pytest.mark.parametrize("width", [5, GATED_BLOCK + 3])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gate", [*((name,) for name in GLU_ACTIVATIONS), ("quick_geglu", 3.0, 1.0)])
def test_output_and_gradient_are_those_of_the_reference(gate, dtype, width, monkeypatch):
    torch.manual_seed(5)
    wide, upstream = (4 * torch.randn(3, 2, 2 * width)).to(dtype), torch.randn(3, 2, width).to(dtype)
    wide[0, 0, -1], wide[1, 0, -1], wide[2, 0, -1] = -300.0, 300.0, 0.0
    wide[0, 1, 0], wide[0, 1, 1], wide[1, 1, -1] = 3.0, -3.0, 3.0  # the limit itself
    results = []
    for fused in (False, True):
        # In fp32 PyTorch's 1 + tanh(x) has no correct digit far from 0. The kernel's value is right.
        x = wide.clone() if fused else wide.double()
        monkeypatch.setattr(activations, "uses_kernels", lambda _, answer=fused: answer)
        y = gated_by(*gate)(x.requires_grad_())
        assert ("Activation" in y.grad_fn.name()) == fused
        results.append([y.detach(), *torch.autograd.grad(y, x, upstream.to(y.dtype))])
    for exact, found in zip(*results, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def passes_of(wide, run):
    """Returns the output, and the gradient of `wide`. `wide` is the output of a preceding operation, as in a
    layer."""
    leaf = wide.clone().requires_grad_()
    y = run(leaf * 1)
    y.backward(torch.ones_like(y))
    return [y.detach(), leaf.grad]


def test_an_output_that_is_recomputed_has_the_gradients_of_a_kept_one():
    """The kernel's backward pass overwrites its input. Fails if this happens before the output is recomputed
    from the input."""
    wide, weight = torch.randn(3, 2, 10), torch.randn(4, 5)
    results = []
    for enabled in (False, True):
        w = weight.clone().requires_grad_()

        def run(x, w=w, enabled=enabled):
            activation = partial(gated_activation, activation="swiglu")
            y = activation(x)
            with recomputed(activation, x, y, enabled):
                return F.linear(y, w)

        results.append([*passes_of(wide, run), w.grad])
    assert all(map(torch.equal, *results))


def test_recomputed_and_offloaded_inputs_have_the_gradients_of_kept_ones():
    wide = torch.randn(3, 2, 10)
    kept = passes_of(wide, lambda x: gated_activation(x, "swiglu"))

    def checkpointed(x):
        return checkpoint(lambda x: gated_activation(x * 1, "swiglu"), x, use_reentrant=False)

    def offloaded(x):
        with saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
            return gated_activation(x, "swiglu")

    def strided(x):
        return gated_activation(x.transpose(0, 1), "swiglu").transpose(0, 1)

    for run in (checkpointed, offloaded, strided):
        for expected, found in zip(kept, passes_of(wide, run), strict=True):
            assert torch.equal(expected, found)


def test_the_input_is_overwritten_and_who_needs_it_afterwards_gets_an_error():
    leaf = torch.randn(3, 10, requires_grad=True)
    wide = leaf * 1
    y = gated_activation(wide, "swiglu")
    (grad,) = torch.autograd.grad(y.sum(), wide, retain_graph=True)
    assert grad.data_ptr() == wide.data_ptr() and not grad.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    wide = leaf * 1
    y, square = gated_activation(wide, "swiglu"), wide * wide
    torch.autograd.grad(y.sum(), wide)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()
