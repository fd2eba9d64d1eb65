"""The GEMM accumulates weight gradients into the fp32 sums. CPUs have no such GEMM, so an fp32 product
replaces it in these tests. Its results differ from a tensor core's only by the order of summation."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.mpu import layers, weight_gradient
from tests.distributed.parity import assert_near, one_process
from tests.support.layouts import Row, train_layout
from tests.support.pool import run_world

STEPS = 5
CHUNKS = {"parallel": {"sequence_parallel": True, "tp_comm_overlap": True}}
# Number of TP ranks -> rows of the LM head on a rank: 101 tokens and padding. No layer's matrix has as many
# rows.
HEAD_ROWS = {1: 104, 2: 56}
# (Layout, further flags, transformer layers per rank.)
ROWS = [
    (Row(dp=2, zero=1, precision="bf16"), {"parallel": {"ddp_bucket_size": 1}}, 4),
    (Row(tp=2, pp=2, micro_batch=2, recompute=True, precision="bf16", positions="alibi"), {}, 2),
    (Row(tp=2, micro_batch=2, precision="bf16"), CHUNKS, 4),
    (
        Row(pp=2, dp=2, zero=1, precision="bf16"),
        {"parallel": {"pipeline_schedule": "zero-bubble", "ddp_bucket_size": 1}},
        2,
    ),
    (Row(precision="fp16"), {}, 4),
    (Row(dp=2, zero=2, precision="bf16"), {}, 0),
]


@contextmanager
def products_that_add():
    """Returns a context in which GEMMs accumulate weight gradients. It yields the list of the accumulated
    gradients' shapes."""
    shapes = []

    def add(total, a, b, factor=1.0, beta=1.0):
        shapes.append(tuple(total.shape))
        total.copy_(factor * (a.float() @ b.float()) + (beta * total if beta else 0.0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            weight_gradient, "supports_fused_accumulation", lambda tensor: tensor.dtype != torch.float32
        )
        patch.setattr(weight_gradient, "add_product", add)
        yield shapes


def train_adding(row, changes):
    """Returns (losses and grad norms, number of layer-weight gradients that the GEMM accumulated in place,
    the number for the LM head)."""
    with products_that_add() as shapes:
        history = train_layout(row, STEPS, **changes)
    of_head = [rows == HEAD_ROWS[row.tp] for rows, _ in shapes]
    return history, of_head.count(False), of_head.count(True)


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("row, changes, layers", ROWS, ids=str)
def test_training_follows_the_fp32_loss(row, changes, layers):
    reference = one_process(row, STEPS)
    micro_batches = 8 // (row.dp * row.micro_batch)
    ranks = run_world(row.world_size, train_adding, row, changes)
    for rank, (history, added, added_of_head) in enumerate(ranks):
        assert_near(history, reference, row.precision)
        assert added == 4 * layers * micro_batches * STEPS
        last_stage = rank >= row.world_size - row.world_size // row.pp
        assert added_of_head == micro_batches * STEPS * last_stage


def weights_added_when_compiled(row, changes):
    """Returns the shapes of the weights whose gradients a compiled layer accumulates in the GEMM in a step.
    dynamo decides what is compiled; the inductor backend would only take longer."""
    torch._dynamo.reset()
    original = torch.compile
    with products_that_add() as shapes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(original, backend="eager"))
        train_layout(row, 1, **changes)
    return set(shapes)


@pytest.mark.full
@pytest.mark.parametrize(
    "row, parallel",
    [
        # Column-parallel layers over several ranks, and products in chunks, are not compiled.
        (Row(tp=2, micro_batch=8, precision="bf16"), {}),
        (Row(micro_batch=8, precision="bf16"), {}),
        (Row(tp=2, micro_batch=8, precision="bf16"), CHUNKS["parallel"]),
        (Row(pp=2, micro_batch=4, precision="bf16"), {"pipeline_schedule": "zero-bubble"}),
    ],
    ids=str,
)
def test_products_of_compiled_layers_add(row, parallel):
    changes = {"parallel": parallel, "training": {"compile": True}, "model": {"num_layers": 2}}
    size = row.tp
    expected = {(96 // size, 32), (128 // size, 32), (32, 32 // size), (32, 128 // size)}
    for added in run_world(row.world_size, weights_added_when_compiled, row, changes):
        assert added - {(HEAD_ROWS[size], 32)} == expected


def test_recomputation_ends_before_the_last_product(monkeypatch):
    """Nothing after the last product's input is saved for the backward pass, so only the first product is
    recomputed."""
    monkeypatch.setattr(layers, "fuses_accumulation", lambda weight: True)
    first, second = (torch.nn.Parameter(torch.randn(8, 8)) for _ in range(2))
    x, products = torch.randn(5, 8, requires_grad=True), []
    original = layers.F.linear
    monkeypatch.setattr(layers.F, "linear", lambda *args: products.append(args[1]) or original(*args))
    y = checkpoint(
        lambda x: layers.linear(layers.linear(x, first, None), second, None),
        x,
        use_reentrant=False,
        preserve_rng_state=False,
    )
    expected = torch.autograd.grad((x @ first.t() @ second.t()).sum(), (x, first, second))
    y.sum().backward()
    assert [weight is first for weight in products] == [True, False, True]
    for tensor, gradient in zip((x, first, second), expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


def test_the_sum_is_that_of_unrounded_products(monkeypatch):
    for module in (layers, weight_gradient):
        monkeypatch.setattr(module, "fuses_accumulation", lambda weight: hasattr(weight, "main_grad"))
    monkeypatch.setattr(
        weight_gradient, "add_product", lambda total, a, b, beta: total.add_(a.double() @ b.double())
    )
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(6, 8).bfloat16())
    weight.main_grad, hooked = torch.zeros(6, 8), []
    weight.register_post_accumulate_grad_hook(lambda parameter: hooked.append(parameter.grad))
    bias = torch.nn.Parameter(torch.randn(6).bfloat16())
    expected = torch.zeros(6, 8, dtype=torch.float64)
    for _ in range(3):
        x, grad = torch.randn(5, 2, 8).bfloat16().requires_grad_(), torch.randn(5, 2, 6).bfloat16()
        y = layers.linear(x, weight, bias)
        assert torch.equal(y, torch.nn.functional.linear(x, weight, bias))
        y.backward(grad)
        expected += grad.flatten(0, 1).double().t() @ x.detach().flatten(0, 1).double()
        assert torch.equal(x.grad, grad.matmul(weight))
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-6, atol=1e-6)
    assert hooked == [None] * 3 and weight.grad is None
