"""The dropout kernels in Triton's interpreter are bitwise equal to their PyTorch reference, except for the
gradient of the bias, which is a sum in a different order."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron.kernels.dropout import KernelMask, fused_dropout_add, shard_offsets
from megatron.mpu import random
from megatron.mpu.compiled_operators import compiled_dropout_add
from megatron.mpu.mesh import Axis
from megatron.mpu.random import DropoutMask, DropoutRNG, Part, dropout, keep_mask

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SAMPLES = (7, 2**33 + 5, 123_456)
# Name -> (shape, batch_dim) of [seq, batch, hidden], [batch, seq, hidden] and [batch, heads, seq, seq]:
# ragged sizes, and tiles that are exactly full.
SHAPES = {
    "hidden": ((3, 3, 515), 1),
    "full tiles": ((4, 1, 512), 1),
    "two blocks of rows": ((9, 1, 257), 1),
    "embedding": ((3, 5, 130), 0),
    "scores": ((2, 2, 3, 9), 0),
    "one element": ((1, 1, 1), 1),
}


def run_both(x, bias, residual, p, batch_dim, shard_dim=None, tp_group=None):
    """Returns the results of the reference and of the kernel: [output, gradient of x, of bias, of
    residual]."""
    tp_group = tp_group or Axis("tp")
    dropout_rng = DropoutRNG(11, SAMPLES[: x.shape[batch_dim]])
    keys = torch.tensor(dropout_rng.sample_keys("4.mlp"))
    offsets = shard_offsets(x.shape, batch_dim, shard_dim, tp_group.rank, tp_group.size)
    assert offsets is not None

    def reference(x, bias, residual):
        x = x if bias is None else x + bias
        y = dropout(x, p, dropout_rng, "4.mlp", batch_dim=batch_dim, shard_dim=shard_dim, tp_group=tp_group)
        return y if residual is None else residual + y

    def kernel(x, bias, residual):
        return fused_dropout_add(x, bias, residual, KernelMask(keys, p, offsets))

    results = []
    for function in (reference, kernel):
        inputs = [None if t is None else t.clone().requires_grad_() for t in (x, bias, residual)]
        output = function(*inputs)
        output.backward(
            torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output.dtype)
        )
        results.append([output.detach(), *(None if t is None else t.grad for t in inputs)])
    return results


class Additions(TorchFunctionMode):
    """Counts the additions of activations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        is_addition = function is torch.Tensor.add and args[0].is_floating_point()
        self.count += is_addition
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_residual_are_added_in_the_same_launch(monkeypatch, dtype, drops):
    """Compares `mpu.random.dropout_add` with the kernel and without it: its results and its additions."""
    x, residual = torch.randn(2, 3, 2, 33).to(dtype)
    bias, gradient = torch.randn(33).to(dtype), torch.randn(3, 2, 33).to(dtype)
    results = []
    for kernels in (False, True):
        monkeypatch.setattr(random, "uses_kernels", lambda tensor, answer=kernels: answer)
        inputs = [tensor.clone().requires_grad_() for tensor in (x, residual, bias)]
        mask = DropoutMask(0.3, DropoutRNG(11, SAMPLES[:2]), "4.mlp", 1, None, Axis("tp"))
        with Additions() as additions:
            output = random.dropout_add(*inputs[:2], mask if drops else None, inputs[2])
        output.backward(gradient)
        results.append([output.detach(), *(tensor.grad for tensor in inputs)])
        assert additions.count == (0 if kernels else 2)
    assert_equal(results, of_bias=3)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("part", [None, Part(0, (range(3), range(15, 18)), 18)], ids=["whole", "part"])
def test_a_compiled_layer_has_the_bits_of_an_eager_one(monkeypatch, part, kernels):
    """The operator is part of a graph whose only inputs are tensors, so one graph serves all layers."""
    monkeypatch.setattr(random, "uses_kernels", lambda _: kernels)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x, bias = torch.randn(6, 2, 33).bfloat16(), torch.randn(33).bfloat16()
    residual, gradient = torch.randn(6, 2, 33), torch.randn(6, 2, 33)
    settings = {"batch_dim": 1, "part": part}

    @partial(torch.compile, backend="aot_eager", dynamic=False)
    def compiled(x, residual, bias, keys):
        return compiled_dropout_add(x, residual, 0.3, keys, bias=bias, **settings)

    for salt in ("4.mlp", "5.mlp"):
        rng, results = DropoutRNG(11, SAMPLES[:2]), []
        for is_compiled in (False, True):
            inputs = [tensor.clone().requires_grad_() for tensor in (x, residual, bias)]
            if is_compiled:
                output = compiled(*inputs, rng.device_keys(salt, x.device))
            else:
                mask = DropoutMask(0.3, rng, salt, 1, None, Axis("tp"), part)
                output = random.dropout_add(*inputs[:2], mask, inputs[2])
            output.backward(gradient)
            results.append([output.detach(), *(tensor.grad for tensor in inputs)])
        assert_equal(results, of_bias=3)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def assert_equal(results, of_bias=2):
    """Compares the results of two runs bitwise. of_bias: index of the gradient of the bias, which is compared
    to rounding."""
    for index, (expected, found) in enumerate(zip(*results, strict=True)):
        assert (expected is None) == (found is None)
        if expected is not None:
            assert found.dtype == expected.dtype
            if index == of_bias:
                torch.testing.assert_close(found, expected)
            else:
                assert torch.equal(found, expected)


@pytest.mark.gate(rows=7)
@pytest.mark.parametrize(
    "shape,has_bias,has_residual,dtype", itertools.product(SHAPES, (True, False), (True, False), DTYPES)
)
def test_output_and_gradients_are_those_of_the_reference(shape, has_bias, has_residual, dtype):
    size, batch_dim = SHAPES[shape]
    torch.manual_seed(3)
    x = torch.randn(size).to(dtype)
    bias = torch.randn(size[-1]).to(dtype) if has_bias else None
    residual = torch.randn(size).to(dtype) if has_residual else None
    assert_equal(run_both(x, bias, residual, 0.1, batch_dim))


def test_with_an_fp32_residual_the_sum_is_fp32_and_the_product_16_bit():
    torch.manual_seed(4)
    x, residual = torch.randn(3, 2, 70).bfloat16(), torch.randn(3, 2, 70)
    assert_equal(run_both(x, None, residual, 0.2, 1))


@pytest.mark.parametrize(
    "shape,batch_dim,shard_dim", [((4, 2, 65), 1, 0), ((2, 4, 3, 9), 0, 1), ((3, 2, 64), 1, -1)]
)
def test_shards_have_their_part_of_the_full_mask(shape, batch_dim, shard_dim):
    """The cases shard the sequence (sequence parallelism), the attention heads, and the last dimension over 2
    TP ranks."""
    ones, shard_dim = torch.ones(shape), shard_dim % len(shape)
    dropout_rng = DropoutRNG(11, SAMPLES[: shape[batch_dim]])
    keys = torch.tensor(dropout_rng.sample_keys("a"))
    parts = []
    for rank, part in enumerate(ones.chunk(2, dim=shard_dim)):
        offsets = shard_offsets(part.shape, batch_dim, shard_dim, rank, 2)
        parts.append(fused_dropout_add(part, None, None, KernelMask(keys, 0.4, offsets)))
    mask = keep_mask(ones, DropoutMask(0.4, dropout_rng, "a", batch_dim, None, Axis("tp")))
    assert torch.equal(torch.cat(parts, dim=shard_dim) != 0, mask.bool())


def test_a_shard_behind_another_dimension_is_refused():
    assert shard_offsets(torch.Size((2, 3, 4, 5)), 0, 2, 0, 2) is None


def test_a_strided_input_and_dropped_values_that_are_not_finite():
    x = torch.randn(5, 2, 40).transpose(0, 2)
    x[0, 0, 0], x[1, 1, 1] = float("nan"), float("inf")
    expected, found = run_both(x, None, None, 0.5, 1)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0, equal_nan=True)


def test_no_elements():
    assert fused_dropout_add(
        torch.ones(0, 2, 8),
        None,
        None,
        KernelMask(torch.tensor([1, 2]), 0.5, shard_offsets(torch.Size((0, 2, 8)), 1, None, 0, 1)),
    ).shape == (0, 2, 8)
