"""The split backward pass has the bits of a single pass. Tests when weight-gradient passes run, and what is
kept for them."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, linear
from megatron.mpu.mesh import Axis
from megatron.mpu.weight_gradient import DeferredGradients, accumulate


def two_layers(deferred, dtype=torch.float32):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        ColumnParallelLinear(6, 8, Axis("tp"), init_std=1.0, deferred=deferred),
        torch.nn.GELU(),
        RowParallelLinear(8, 6, Axis("tp"), init_std=1.0, deferred=deferred, bias=False),
    )
    for parameter in layers.parameters():
        torch.nn.init.normal_(parameter)
    return layers.to(dtype)


def inputs(dtype, count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 2, 6, generator=generator).to(dtype).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_sums_have_the_bits_of_a_single_pass(dtype, recomputes):
    def run(layers, x):
        return checkpoint(layers, x, use_reentrant=False) if recomputes else layers(x)

    plain, expected = two_layers(None, dtype), inputs(dtype)
    for x in expected:
        run(plain, x).square().sum().backward()
    deferred = DeferredGradients()
    split, found = two_layers(deferred, dtype), inputs(dtype)
    passes = []
    for x in found:
        run(split, x).square().sum().backward()
        passes.append(deferred.take())
    assert split[0].weight.grad is None and split[2].weight.grad is None
    assert [len(one) for one in passes] == [2, 2, 2] and not deferred.take()
    for one in passes:
        accumulate(one)
    for x, y in zip(expected, found, strict=True):
        assert torch.equal(x.grad, y.grad)
    for (name, one), other in zip(plain.named_parameters(), split.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_hooks_of_a_weight_run_in_its_own_pass_once():
    deferred = DeferredGradients()
    layers, calls = two_layers(deferred), []
    for name, parameter in layers.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    layers(inputs(torch.float32)[0]).sum().backward()
    assert calls == ["0.bias"]
    accumulate(deferred.take())
    assert calls == ["0.bias", "2.weight", "0.weight"]


def test_what_is_kept_between_the_passes_and_freed_after_them():
    deferred = DeferredGradients()
    layers = two_layers(deferred)
    (received, *_) = inputs(torch.float32)
    # The first matrix gets the result of a function, as in a transformer layer.
    output = layers(received.exp().tanh())
    output.sum().backward()
    stage_input = weakref.ref(received)
    del received, output
    of_micro_batch = deferred.take()
    assert len(of_micro_batch) == 2 and stage_input() is None
    references = [weakref.ref(x) for _, gradient in of_micro_batch for x in gradient.args]
    accumulate(of_micro_batch)
    assert not of_micro_batch and not any(reference() is not None for reference in references)


def test_an_input_without_gradient_and_an_evaluation():
    deferred = DeferredGradients()
    layers = two_layers(deferred)
    x = torch.ones(5, 2, 6)
    with torch.no_grad():
        expected = layers(x)
    assert not deferred.take()
    assert torch.equal(layers(x), expected)
    layers(x).sum().backward()
    accumulate(deferred.take())
    assert layers[0].weight.grad.abs().sum() > 0


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.names.append(str(func.overloadpacket))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("bias", [False, True])
def test_every_way_to_multiply_runs_one_product_also_for_a_transposed_batch_of_one(bias):
    """A batched product would round differently. Then evaluation and training, or two schedules, would
    differ."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 32, 32, generator=generator).transpose(0, 1).contiguous()
    assert x.stride() == (32, 1024, 1)
    weight = torch.randn(48, 32, generator=generator).requires_grad_()
    shift = torch.randn(48, generator=generator) if bias else None
    outputs, names = [], []
    for grad_enabled, deferred in [(True, None), (True, DeferredGradients()), (False, None)]:
        with torch.set_grad_enabled(grad_enabled), Products() as products:
            outputs.append(linear(x, weight, shift, deferred))
        names += [products.names]
    assert names == [["aten.addmm" if bias else "aten.mm"]] * 3
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
