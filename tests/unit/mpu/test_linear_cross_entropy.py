"""Compares the fused head and loss, one chunk of logits at a time, with the definition of its gradients."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.memory import FULL, MIB, TARGET_MIB, make_steps, peak_mib
from megatron.config.registries import GPUS
from megatron.mpu import logit_chunks, weight_gradient
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from megatron.mpu.mesh import Axis
from megatron.mpu.parameters import mark_main_grad, set_main_grad
from tests.support.tracked_memory import TrackedMemory

ONE = Axis("tp")
BATCH, SEQ, HIDDEN, ROWS = 3, 17, 24, 96
GENERATOR = torch.Generator().manual_seed(8)
# Largest relative errors of losses and gradients, as norms.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
UPSTREAM = {
    "sum": torch.tensor(2.5).expand(BATCH, SEQ),
    "mean": torch.full((BATCH, SEQ), 1 / (BATCH * SEQ)),
}


@pytest.fixture
def small_chunks(monkeypatch):
    """Makes several chunks, row blocks and parts of a product. The last of each is incomplete."""
    monkeypatch.setattr(logit_chunks, "CPU_CHUNK_TOKENS", {2: 11, 4: 11})
    monkeypatch.setattr(logit_chunks, "CPU_WORK_BYTES", 3 * 4 * ROWS)
    monkeypatch.setattr(logit_chunks, "CPU_PRODUCT_BYTES", 13 * 2 * HIDDEN)


def make_inputs(dtype, vocab_size=ROWS):
    """Returns hidden states and labels that are not contiguous, and a weight."""
    hidden = torch.randn(SEQ, BATCH, HIDDEN, generator=GENERATOR).to(dtype).transpose(0, 1).requires_grad_()
    weight = torch.randn(ROWS, HIDDEN, generator=GENERATOR).mul(0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab_size, (SEQ, BATCH), generator=GENERATOR).t()


def reference(hidden, weight, labels, vocab_size, upstream, token_weights, z_loss_weight, cap=None):
    """Returns losses and both gradients in float64, from the definition."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = (hidden @ weight.t())[..., :vocab_size]
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_sum = logits.logsumexp(-1)
    losses = log_sum - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) + z_loss_weight * log_sum**2
    losses = losses if token_weights is None else losses * token_weights
    return losses.detach(), *torch.autograd.grad(losses, (hidden, weight), upstream.double())


def relative_error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("upstream", UPSTREAM)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("vocab_size", [ROWS, 70])
@pytest.mark.parametrize("options", ["bare", "weights", "z-loss", "capped"])
def test_losses_and_gradients_are_those_of_the_definition(dtype, upstream, vocab_size, options):
    hidden, weight, labels = make_inputs(dtype, vocab_size)
    token_weights = torch.rand(BATCH, SEQ, generator=GENERATOR).round(decimals=1)
    token_weights = token_weights if options == "weights" else None
    settings = {"z_loss_weight": 0.01 if options == "z-loss" else 0.0}
    cap = 2.0 if options == "capped" else None
    losses = vocab_parallel_linear_cross_entropy(
        hidden, weight, labels, ONE, vocab_size, token_weights=token_weights, softcapping=cap, **settings
    )
    assert losses.dtype == torch.float32 and losses.shape == labels.shape
    gradients = torch.autograd.grad(losses, (hidden, weight), UPSTREAM[upstream])
    assert [g.dtype for g in gradients] == [dtype, dtype]
    upstream = UPSTREAM[upstream]
    expected = reference(hidden, weight, labels, vocab_size, upstream, token_weights, *settings.values(), cap)
    for found, wanted in zip((losses, *gradients), expected, strict=True):
        assert relative_error(found, wanted) <= BOUNDS[dtype]
    assert gradients[1][vocab_size:].abs().sum() == 0


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("upstream", UPSTREAM)
def test_the_loss_of_a_sum_costs_three_matrix_products(upstream):
    hidden, weight, labels = make_inputs(torch.bfloat16)  # the counter knows mm, not fp32's addmm_
    with FlopCounterMode(display=False) as counter:
        losses = vocab_parallel_linear_cross_entropy(hidden, weight, labels, ONE, ROWS)
        losses.backward(UPSTREAM[upstream])
    assert counter.get_total_flops() == 3 * 2 * BATCH * SEQ * HIDDEN * ROWS


def test_gradients_that_differ_between_tokens_are_refused():
    losses = vocab_parallel_linear_cross_entropy(*make_inputs(torch.float32), ONE, ROWS)
    with pytest.raises(RuntimeError, match="multiply them by token_weights"):
        losses.backward(torch.rand(BATCH, SEQ))


def test_the_uniform_gradient_of_a_sum_is_recognized_by_its_strides():
    """The tensors are on the meta device and have no values. Fails if the check reads the values of the
    gradient."""
    hidden, weight, labels = (x.detach().to("meta") for x in make_inputs(torch.bfloat16))
    token_weights = torch.rand(BATCH, SEQ, device="meta")
    losses = vocab_parallel_linear_cross_entropy(
        hidden.requires_grad_(), weight.requires_grad_(), labels, ONE, ROWS, token_weights=token_weights
    )
    (losses.sum() * 3).backward()
    assert weight.grad.shape == weight.shape


def test_the_full_logits_of_a_large_vocabulary_are_never_allocated():
    """For a micro-batch of 8 x 2048 tokens, a vocabulary of 250368 over 4 ranks, and hidden size 2048 in
    bf16, the fp32 logits would have 3.82 GiB."""
    tokens, _, width = FULL
    steps = make_steps(FULL, torch.bfloat16, torch.device("meta"))
    gradient = 2 * tokens * width / MIB
    assert peak_mib(steps["fused"], torch.device("meta")) - gradient <= TARGET_MIB
    assert peak_mib(steps["plain"], torch.device("meta")) > 5000


@pytest.mark.parametrize(
    "columns, on_gpu, on_cpu",
    [
        (62_720, 4096, 1024),
        (128_256, 4096, 512),
        (500_000, 1024, 128),
        (2_000_000, 256, 33),
        (8_000_000, 67, 8),
        (10**9, 1, 1),
    ],
)
def test_a_chunk_has_whole_tiles_of_tokens_unless_one_is_too_large(columns, on_gpu, on_cpu):
    for is_cpu, tokens in ((False, on_gpu), (True, on_cpu)):
        assert logit_chunks.chunk_sizes(8192, columns, 14336, 2, on_cpu=is_cpu).tokens == tokens
        assert logit_chunks.chunk_sizes(100, 512, 64, 2, on_cpu=is_cpu).tokens == 100


@pytest.mark.parametrize("gpu", GPUS)
def test_the_gradient_of_the_head_takes_a_tenth_of_the_time_of_the_products(gpu):
    """Compares the times of the gradient's memory traffic and of the products on each kind of GPU, at the
    rates of the data sheets."""
    device = GPUS.load(gpu)
    products = 6 * logit_chunks.chunk_sizes(8192, 128_256, 4096, 2, on_cpu=False).tokens
    assert 8 / device.bandwidth <= 0.105 * products / device.peak_flops["fp16"]


def test_given_logits_in_fp32_are_not_copied_and_16_bit_ones_once():
    for dtype, copies in ((torch.float32, 0), (torch.bfloat16, 1)):
        logits = torch.randn(64, 4096).to(dtype).requires_grad_() * 1
        with TrackedMemory() as tracked:
            losses = vocab_parallel_cross_entropy(logits, torch.arange(64), ONE, 4000, overwrite_logits=True)
        assert losses.shape == (64,)
        assert copies * 4 * logits.numel() <= tracked.peak <= (copies + 0.05) * 4 * logits.numel()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_weights_gradient_goes_to_main_grad_in_fp32(dtype):
    hidden, weight, labels = make_inputs(dtype)
    main_grad = torch.full((ROWS, HIDDEN), torch.nan)
    set_main_grad(weight, main_grad)
    mark_main_grad(weight, is_defined=False)
    expected = torch.zeros(ROWS, HIDDEN, dtype=torch.float64)
    for factor in (1.0, 0.5, 64.0):
        losses = vocab_parallel_linear_cross_entropy(hidden, weight, labels, ONE, ROWS, loss_gradient=factor)
        (losses.sum() * factor).backward()
        upstream = torch.full(labels.shape, factor)
        expected += reference(hidden, weight, labels, ROWS, upstream, None, 0.0)[2]
    assert weight.grad is None
    assert relative_error(main_grad, expected) <= BOUNDS[dtype]
    if dtype != torch.float32:
        assert not torch.equal(main_grad, main_grad.to(dtype).float())


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("options", ["sum", "weights"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_that_add_to_the_sum_round_nothing(monkeypatch, dtype, options):
    """One product per chunk replaces the rounded parts. Both sums come from equal gradients of the logits,
    rounded to 16 bits. The test's fp32 product stands for the device's product."""
    errors, added = [], []

    def add(total, a, b, factor=1.0, beta=1.0):
        added.append(total)
        total.copy_(factor * (a.float() @ b.float()) + (beta * total if beta else 0.0))

    monkeypatch.setattr(weight_gradient, "add_product", add)
    hidden, weight, labels = make_inputs(dtype)
    token_weights = torch.full((BATCH, SEQ), 0.125) if options == "weights" else None
    for adds in (False, True):
        monkeypatch.setattr(
            weight_gradient, "supports_fused_accumulation", lambda tensor, answer=adds: answer
        )
        upstream = UPSTREAM["sum"]
        set_main_grad(weight, torch.full((ROWS, HIDDEN), torch.nan))
        mark_main_grad(weight, is_defined=False)
        losses = vocab_parallel_linear_cross_entropy(
            hidden,
            weight,
            labels,
            ONE,
            ROWS,
            token_weights=token_weights,
            loss_gradient=2.5,
        )
        losses.backward(upstream)
        expected = reference(hidden, weight, labels, ROWS, upstream, token_weights, 0.0)[2]
        errors.append(relative_error(weight.main_grad, expected))
    assert len(added) == -(-BATCH * SEQ // 11)
    assert errors[1] < errors[0] <= BOUNDS[dtype]


def test_no_second_gradient_of_the_head_is_allocated():
    """The sizes are BLOOM's last stage at TP 4, where main_grad alone has 3.35 GiB. The gradient of hidden is
    not counted."""
    tokens, rows, width = 2048, 62_720, 14_336
    steps = make_steps((tokens, rows, width), torch.bfloat16, torch.device("meta"))
    gradient = 2 * tokens * width / MIB
    assert peak_mib(steps["fused"], torch.device("meta")) - gradient <= 0.6 * 1024


def test_a_gradient_that_differs_from_the_one_given_in_advance_is_refused():
    for gradient in (2.0, torch.rand(BATCH, SEQ)):
        hidden, weight, labels = make_inputs(torch.float32)
        set_main_grad(weight, torch.zeros(ROWS, HIDDEN))
        losses = vocab_parallel_linear_cross_entropy(hidden, weight, labels, ONE, ROWS, loss_gradient=4.0)
        with pytest.raises(RuntimeError, match="expected 4, the loss_gradient"):
            losses.backward(torch.ones(BATCH, SEQ) * gradient)


@pytest.mark.usefixtures("small_chunks")
def test_without_gradients_only_losses_are_computed():
    hidden, weight, labels = make_inputs(torch.bfloat16)
    expected = vocab_parallel_linear_cross_entropy(hidden, weight, labels, ONE, ROWS)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        losses = vocab_parallel_linear_cross_entropy(hidden, weight, labels, ONE, ROWS)
    assert torch.equal(losses, expected) and not losses.requires_grad
    assert counter.get_total_flops() == 2 * BATCH * SEQ * HIDDEN * ROWS


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("frozen", [0, 1])
def test_of_two_gradients_one_may_be_left_out(frozen):
    inputs = make_inputs(torch.float32)
    both = torch.autograd.grad(vocab_parallel_linear_cross_entropy(*inputs, ONE, ROWS).sum(), inputs[:2])
    inputs[frozen].requires_grad_(False)
    vocab_parallel_linear_cross_entropy(*inputs, ONE, ROWS).sum().backward()
    assert inputs[frozen].grad is None
    assert torch.equal(inputs[1 - frozen].grad, both[1 - frozen])


def test_the_fused_loss_equals_the_loss_of_the_logits():
    hidden, weight, labels = make_inputs(torch.float32, 70)
    losses = vocab_parallel_linear_cross_entropy(hidden, weight, labels, ONE, 70)
    logits = (hidden @ weight.t()).detach()
    torch.testing.assert_close(losses, vocab_parallel_cross_entropy(logits, labels, ONE, 70))


def main_grad_of(hidden, weight):
    """Returns the gradient of the weight if every token has the label 0."""
    labels, main_grad = torch.zeros(len(hidden), dtype=torch.int64), torch.zeros(weight.shape)
    inputs = hidden.half().requires_grad_(), weight.half().requires_grad_()
    set_main_grad(inputs[1], main_grad)
    vocab_parallel_linear_cross_entropy(*inputs, labels, ONE, ROWS).sum().backward()
    return main_grad


def test_fp16_holds_the_gradient_of_one_label_for_all_and_of_many_small_probabilities():
    expected = torch.full((ROWS, 8), 2048 * 100 / ROWS)
    expected[0] -= 2048 * 100
    found = main_grad_of(torch.full((2048, 8), 100.0), torch.zeros(ROWS, 8))
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0.0)
    # One large logit leaves all other logits a probability of exp(-18), a quarter of fp16's smallest number.
    weight = torch.zeros(ROWS, 1)
    weight[0] = 18.0
    expected = torch.full((ROWS - 1, 1), 4 * math.exp(-18))
    torch.testing.assert_close(main_grad_of(torch.ones(4, 1), weight)[1:], expected, rtol=0.1, atol=0.0)


@pytest.mark.parametrize("adds", [False, True])
def test_fp16_holds_the_gradient_of_one_token_with_the_weight_of_all(monkeypatch, adds):
    """--eod-mask-loss may leave one token of a sample. Large hidden states times the sequence length would
    overflow."""
    monkeypatch.setattr(weight_gradient, "supports_fused_accumulation", lambda tensor: adds)
    monkeypatch.setattr(
        weight_gradient,
        "add_product",
        lambda total, a, b, factor, beta: total.mul_(beta).add_(a.float() @ b.float(), alpha=factor),
    )
    hidden, weight = (40 * torch.randn(4096, 8)).half().requires_grad_(), torch.zeros(ROWS, 8).half()
    main_grad, token_weights = torch.zeros(ROWS, 8), torch.eye(4096)[7]
    set_main_grad(weight, main_grad)
    vocab_parallel_linear_cross_entropy(
        hidden,
        weight.requires_grad_(),
        torch.zeros(4096, dtype=torch.int64),
        ONE,
        ROWS,
        token_weights=token_weights,
    )
    expected = torch.outer(torch.full((ROWS,), 1 / ROWS) - torch.eye(ROWS)[0], hidden[7].detach().float())
    torch.testing.assert_close(main_grad, expected, rtol=2e-3, atol=1e-5)


def test_no_tokens_have_no_loss_and_gradients_of_zero():
    hidden, weight, labels = (x[:0] if i != 1 else x for i, x in enumerate(make_inputs(torch.float32)))
    hidden = hidden.detach().requires_grad_()
    losses = vocab_parallel_linear_cross_entropy(hidden, weight, labels, ONE, ROWS)
    losses.sum().backward()
    assert losses.shape == labels.shape and weight.grad.abs().sum() == 0 == hidden.grad.numel()


def test_other_precisions_are_refused():
    with pytest.raises(ValueError, match="float64"):
        vocab_parallel_linear_cross_entropy(*make_inputs(torch.float64), ONE, ROWS)


def test_a_label_outside_the_vocabulary_makes_its_loss_nan():
    hidden, weight = torch.randn(5, HIDDEN), torch.randn(8, HIDDEN)
    losses = vocab_parallel_linear_cross_entropy(hidden, weight, torch.tensor([0, 6, 7, -1, 5]), ONE, 6)
    assert losses.isnan().tolist() == [False, True, True, True, False]


def test_masked_tokens_alone_leave_gradients_of_zero():
    hidden, weight, labels = make_inputs(torch.bfloat16)
    losses = vocab_parallel_linear_cross_entropy(
        hidden, weight, labels, ONE, ROWS, token_weights=torch.zeros(BATCH, SEQ)
    )
    losses.sum().backward()
    assert losses.abs().sum() == hidden.grad.abs().sum() == weight.grad.abs().sum() == 0


def test_a_second_backward_pass_is_refused():
    losses = vocab_parallel_linear_cross_entropy(*make_inputs(torch.float32), ONE, ROWS).sum()
    losses.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        losses.backward()


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda h, w, y: (h[..., 1:], w, y), "expected"),
        (lambda h, w, y: (h, w, y[1:]), "expected"),
        (lambda h, w, y: (h, w.half(), y), "one dtype"),
    ],
)
def test_shapes_that_do_not_match_are_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        vocab_parallel_linear_cross_entropy(*change(*make_inputs(torch.float32)), ONE, ROWS)
