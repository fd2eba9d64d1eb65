"""Compares the linear layer of experts with one F.linear per expert. Kernels run in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron.kernels import grouped_linear as kernels
from megatron.kernels.grouped_linear import Groups
from megatron.mpu.grouped_linear import grouped_linear
from megatron.mpu.parameters import mark_main_grad, set_main_grad
from megatron.mpu.weight_gradient import DeferredGradients, accumulate

IMPLEMENTATIONS = {"mm": torch.float32, "grouped_mm": torch.bfloat16, "triton": torch.bfloat16}
"""Implementation -> a dtype that it computes with."""
# Largest errors, relative to the largest value: sums in a different order, and rounding to 16 bits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# Name -> (rows of each expert, n_in, n_out): no rows at all; experts without rows; several tiles of rows,
# columns and inner length; whole tiles; lengths that are not multiples of a tile; more experts than a
# block has.
CASES = {
    "no rows": ((0, 0, 0), 16, 24),
    "empty experts": ((0, 3, 0, 40, 0), 16, 24),
    "several tiles": ((130, 0, 7), 72, 136),
    "whole tiles": ((128, 0, 64), 64, 128),
    "unaligned": ((1, 7, 33), 5, 9),
    "one expert": ((5,), 8, 1),
    "many experts": ((1, *[0] * 14, 2, 3), 8, 8),
}
ROWS = [
    (implementation, dtype, case)
    for case in CASES
    for implementation, dtypes in (
        ("mm", TOLERANCE),
        ("grouped_mm", (torch.bfloat16, torch.float16)),
        ("triton", (torch.bfloat16, torch.float16)),
    )
    for dtype in dtypes
]


def choose(implementation, monkeypatch):
    monkeypatch.setattr(kernels, "uses_kernels", lambda _: implementation == "triton")
    monkeypatch.setattr(kernels, "_has_grouped_mm", lambda *_: implementation == "grouped_mm")


def leaves_of(case, dtype, with_bias):
    """Returns input, weight and bias. The input is a view whose rows are not contiguous."""
    torch.manual_seed(5)
    counts, n_in, n_out = CASES[case]
    x = torch.randn(n_in, sum(counts)).to(dtype).t().requires_grad_()
    weight = torch.randn(len(counts), n_out, n_in).to(dtype).requires_grad_()
    return x, weight, torch.randn(len(counts), n_out).to(dtype).requires_grad_() if with_bias else None


def expected_of(case, leaves, upstreams):
    """Returns the output, and the gradients' sums over the backward passes, in fp64, by expert."""
    exact = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    x, weight, bias = exact
    parts = x.split(CASES[case][0])
    y = torch.cat(
        [F.linear(part, weight[e], None if bias is None else bias[e]) for e, part in enumerate(parts)]
    )
    for upstream in upstreams:
        y.backward(upstream.double(), retain_graph=True)
    return [y.detach(), *(leaf.grad for leaf in exact if leaf is not None)]


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(("implementation", "dtype", "case"), ROWS)
def test_outputs_and_gradients_are_those_of_one_linear_layer_per_expert(
    implementation, dtype, case, with_bias, monkeypatch
):
    """Gradients are summed over two backward passes, the first with an expanded gradient. The weight's
    gradient is computed at once or deferred. Only kernels add it to `main_grad`, and only if the optimizer
    has set `main_grad`. The first deferred gradient overwrites NaN."""
    choose(implementation, monkeypatch)
    groups = Groups(CASES[case][0])
    leaves = leaves_of(case, dtype, with_bias)
    size = (len(leaves[0]), leaves[1].shape[1])
    upstreams = [torch.ones(1, 1).to(dtype).expand(size), torch.randn(size).to(dtype)]
    expected = expected_of(case, leaves, upstreams)
    before = torch.randn(leaves[1].shape)
    for deferred, has_main_grad in ((None, with_bias), (DeferredGradients(), not with_bias)):
        x, weight, bias = (None if leaf is None else leaf.detach().requires_grad_() for leaf in leaves)
        overwrites = deferred is not None
        if has_main_grad:
            set_main_grad(weight, torch.full_like(before, torch.nan) if overwrites else before.clone())
            mark_main_grad(weight, is_defined=not overwrites)
        for upstream in upstreams:
            y = grouped_linear(x, weight, bias, groups, deferred)
            y.backward(upstream)
            if deferred is not None:
                accumulate(deferred.take())
        adds = has_main_grad and implementation == "triton"
        assert (weight.grad is None) == adds
        total = weight.main_grad - (0.0 if overwrites else before) if adds else weight.grad
        found = [y.detach(), x.grad, total, *([] if bias is None else [bias.grad])]
        for value, exact in zip(found, expected, strict=True):
            assert value.dtype == (torch.float32 if value is total and adds else dtype)
            largest = exact.abs().max() if exact.numel() else 0.0
            torch.testing.assert_close(
                value.double(), exact, rtol=0.0, atol=TOLERANCE[dtype] * float(largest)
            )
        without_rows = torch.tensor(groups.counts) == 0
        assert not total[without_rows].any()  # `main_grad` keeps its bits
        if bias is not None:
            assert not bias.grad[without_rows].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_recomputed_and_ungraphed_layers_have_the_values_of_the_layer(implementation, monkeypatch):
    choose(implementation, monkeypatch)
    dtype = IMPLEMENTATIONS[implementation]
    x, weight, bias = leaves_of("empty experts", dtype, with_bias=False)
    groups = Groups(CASES["empty experts"][0])
    assert kernels.implementation(x.contiguous(), weight) == implementation

    def layer(x):
        return grouped_linear(x * 1, weight, bias, groups)

    y = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    expected = torch.autograd.grad(y.square().sum(), (x, weight))
    found = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), (x, weight))
    for value, exact in zip(found, expected, strict=True):
        assert torch.equal(value, exact)


def test_unaligned_addresses_and_widths_use_the_loop(monkeypatch):
    choose("grouped_mm", monkeypatch)
    x, matrices = torch.zeros(9, 8).bfloat16(), torch.zeros(2, 4, 8).bfloat16()
    assert kernels.implementation(x, matrices) == "grouped_mm"
    assert kernels.implementation(x.view(-1)[4:68].view(8, 8), matrices) == "mm"
    assert kernels.implementation(torch.zeros(9, 12).bfloat16(), matrices) == "mm"
    assert kernels.implementation(x[:0], matrices) == "mm"
    assert kernels.implementation(x.float(), matrices.float()) == "mm"


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_far_apart_in_memory_are_found(transposed, monkeypatch):
    """The last expert's matrix begins more than 2^31 elements after the first expert's. Fails if an offset
    overflows 32 bits."""
    choose("triton", monkeypatch)
    groups = Groups((*[0] * 2**16, 3))
    x, matrix = torch.randn(3, 256).bfloat16(), torch.randn(128, 256).bfloat16()
    matrices = torch.empty(2**16 + 1, 128, 256, dtype=torch.bfloat16)  # pages without a value get no memory
    matrices[-1] = matrix
    if transposed:
        matrices, matrix = matrices.view(-1, 256, 128), matrix.view(256, 128).t()
    found = kernels.multiply_groups(x, matrices, None, groups, transposed)
    torch.testing.assert_close(found, F.linear(x, matrix), rtol=0.0, atol=TOLERANCE[torch.bfloat16] * 64)


def test_groups_that_do_not_have_all_rows_are_an_error():
    weight = torch.zeros(2, 3, 4)
    for counts in ((1, 1), (3,), (1, 1, 1)):
        with pytest.raises(ValueError, match="3 rows of 2 experts"):
            grouped_linear(torch.zeros(3, 4), weight, None, Groups(counts))
