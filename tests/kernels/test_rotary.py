"""The kernel that splits a projection and rotates its heads, in Triton's interpreter, is bitwise equal to its
reference, forward and backward."""

from __future__ import annotations

import pytest
import torch

from megatron.arguments import parse_args
from megatron.model import position
from megatron.model.gpt_model import ParallelSelfAttention
from megatron.model.layer_context import LayerContext
from megatron.mpu.mesh import ONE_RANK
from megatron.mpu.random import DropoutRNG

FLAGS = (
    "--dry-run --attention-dropout 0 --vocab-size 100 --num-layers 1 --micro-batch-size 1 --lr 1 "
    "--global-batch-size 1 --seq-length 6 --train-iters 1 --max-position-embeddings 6 "
    "--position-embedding-type rotary "
)
# Heads of size 16, and padded heads of size 24: one group, several tiles of heads, and a group per head.
LAYERS = {
    "grouped": "--hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2",
    "own keys": "--hidden-size 160 --num-attention-heads 10",
    "a part is rotated": "--hidden-size 72 --num-attention-heads 3 --rotary-percent 0.5",
    "interleaved": "--hidden-size 48 --num-attention-heads 2 --rotary-interleaved",
    "gates": "--hidden-size 96 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--attention-output-gate --rotary-percent 0.5",
    "one group": "--hidden-size 96 --num-attention-heads 4 --group-query-attention --num-query-groups 1",
}


@pytest.mark.gate(rows=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("documents", [False, True])
def test_query_key_and_value_and_the_gradient_are_those_of_the_reference(
    layer, dtype, documents, monkeypatch
):
    flags = FLAGS + LAYERS[layer] + (" --reset-position-ids" if documents else "")
    attention = ParallelSelfAttention(LayerContext(parse_args(flags.split(), {}), ONE_RANK, DropoutRNG(1)), 3)
    torch.manual_seed(4)
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]]) if documents else None
    projected = torch.randn(6, 2, attention.query_key_value.bias.shape[0]).to(dtype)
    upstream = None
    results = []
    for kernels in (False, True):
        monkeypatch.setattr(position, "uses_kernels", lambda _, answer=kernels: answer)
        x = projected.clone().requires_grad_()
        parts = [part for part in attention._split(x, ids) if part.numel()]  # maybe with a gate
        upstream = upstream or [torch.randn(part.shape).to(dtype) for part in parts]
        results.append([*(part.detach() for part in parts), *torch.autograd.grad(parts, x, upstream)])
        assert not kernels or all(part.is_contiguous() for part in parts)
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)
    assert not torch.equal(results[0][0].flatten(), projected[..., : results[0][0][0, 0].numel()].flatten())
