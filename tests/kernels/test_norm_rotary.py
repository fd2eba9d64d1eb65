"""Compares the kernel that normalizes and rotates heads of queries and keys in Triton's interpreter with
PyTorch in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron.arguments import parse_args
from megatron.model import norm, position
from megatron.model.gpt_model import ParallelSelfAttention
from megatron.model.layer_context import LayerContext
from megatron.mpu.mesh import ONE_RANK
from megatron.mpu.random import DropoutRNG
from tests.kernels.test_rotary import FLAGS, LAYERS

# Largest error relative to the largest element: one rounding.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 4e-3}
NORMS = {
    "RMSNorm": "--normalization RMSNorm",
    "LayerNorm": "--normalization LayerNorm",
    "1p": "--normalization LayerNorm --apply-layernorm-1p",
}


@pytest.mark.gate(rows=4)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layer,kind,documents", itertools.product(LAYERS, NORMS, (False, True)))
def test_heads_and_gradients_are_those_of_the_reference(layer, kind, documents, dtype, monkeypatch):
    """The input has two blocks of tokens."""
    flags = f"{FLAGS}{LAYERS[layer]} --qk-layernorm {NORMS[kind]}" + " --reset-position-ids" * documents
    attention = ParallelSelfAttention(LayerContext(parse_args(flags.split(), {}), ONE_RANK, DropoutRNG(1)), 3)
    torch.manual_seed(4)
    norms = [*attention.q_layernorm.parameters(), *attention.k_layernorm.parameters()]
    for parameter in norms:
        torch.nn.init.normal_(parameter)
    attention.to(dtype)
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]]) if documents else None
    projected = torch.randn(6, 2, attention.query_key_value.bias.shape[0]).to(dtype)
    monkeypatch.setattr(norm, "uses_kernels", lambda _: False)
    upstream = None
    results = []
    for kernels in (True, False):
        monkeypatch.setattr(position, "uses_kernels", lambda _, answer=kernels: answer)
        x = projected.clone().requires_grad_() * 1
        if not kernels:
            attention.double()
            x = x.double()
        parts = [part for part in attention._split(x, ids) if part.numel()]  # maybe with a gate
        assert ("SplitAndRotate" in parts[0].grad_fn.name()) == kernels
        upstream = upstream or [torch.randn(part.shape).to(dtype) for part in parts]
        gradients = torch.autograd.grad(
            parts, [x, *norms], [grad.to(x.dtype) for grad in upstream], retain_graph=True
        )
        results.append([*(part.detach() for part in parts), *gradients])
        if kernels:
            assert gradients[0].data_ptr() == x.data_ptr()  # written in place
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(parts, x, upstream)
    for found, exact in zip(*results, strict=True):
        assert found.dtype == dtype
        tolerance = TOLERANCE[dtype] * exact.abs().max().item()
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=tolerance)
