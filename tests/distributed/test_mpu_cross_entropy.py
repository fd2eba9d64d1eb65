from unittest import mock

import pytest
import torch

from megatron.mpu import logit_chunks
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from tests.support.pool import run_world
from tests.support.scatter import world_tp_group


def loss_and_gradient(logits, labels, upstream, vocab_size, overwrite):
    """Returns losses and gradients for this rank's columns of the logits."""
    tensor = world_tp_group()
    own = logits.chunk(tensor.size, -1)[tensor.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(own * 1, labels, tensor, vocab_size, overwrite_logits=overwrite)
    loss.backward(upstream)
    return loss.detach(), own.grad


def reference(logits, labels, vocab_size, upstream):
    logits = logits.detach().double().requires_grad_()
    used = logits[..., :vocab_size]
    loss = used.logsumexp(-1) - used.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    loss.backward(upstream.double())
    return loss.detach(), logits.grad


@pytest.mark.parametrize("size", [1, 2, 4])
# 512 needs no padding. With 500 the last rank has some padding. With 300 the last of four ranks has only
# padding.
@pytest.mark.gate(rows=3)
@pytest.mark.parametrize("vocab_size", [512, 500, 300])
def test_the_loss_over_a_sharded_vocabulary_equals_the_definition(vocab_size, size):
    generator = torch.Generator().manual_seed(3)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)):
        logits = (20 * torch.randn(3, 11, 512, generator=generator)).to(dtype)
        labels = torch.randint(0, vocab_size, (11, 3), generator=generator).t()
        upstream = torch.randn(11, 3, generator=generator).t()
        expected_loss, expected_grad = reference(logits, labels, vocab_size, upstream)
        results = run_world(
            size, loss_and_gradient, logits, labels, upstream, vocab_size, dtype == torch.float32
        )
        for loss, _ in results:
            torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=5e-6)
            assert torch.equal(loss, results[0][0])
        grad = torch.cat([grad for _, grad in results], -1)
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.double(), expected_grad, rtol=tolerance, atol=tolerance)
        assert grad[..., vocab_size:].abs().sum() == 0


# --- the loss fused with the head ---

HIDDEN, ROWS, TOKENS = 40, 512, 70


def fused_loss_and_gradients(hidden, weight, labels, upstream, token_weights, vocab_size, z_loss_weight):
    """Returns losses and gradients for this rank's rows of the weight, computed in several chunks. The
    gradient of `hidden` is summed over all ranks."""
    tensor = world_tp_group()
    own = weight.chunk(tensor.size)[tensor.rank].clone().requires_grad_()
    hidden = hidden.clone().requires_grad_()
    with mock.patch.object(logit_chunks, "CPU_CHUNK_TOKENS", {2: 32, 4: 32}):
        losses = vocab_parallel_linear_cross_entropy(
            hidden,
            own,
            labels,
            tensor,
            vocab_size,
            token_weights=token_weights,
            z_loss_weight=z_loss_weight,
        )
        losses.backward(upstream)
    return losses.detach(), hidden.grad, own.grad


def fused_cases(cases):
    return [fused_loss_and_gradients(*inputs) for inputs in cases]


def fused_over(size, cases):
    """Returns (losses, gradient of hidden, gradient of the full weight) of each case on `size` TP ranks."""
    found = []
    for of_ranks in zip(*run_world(size, fused_cases, cases), strict=True):
        for losses, grad_hidden, _ in of_ranks:
            assert torch.equal(losses, of_ranks[0][0]) and torch.equal(grad_hidden, of_ranks[0][1])
        found.append((*of_ranks[0][:2], torch.cat([grad_weight for _, _, grad_weight in of_ranks])))
    return found


def fused_reference(hidden, weight, labels, upstream, token_weights, vocab_size, z_loss_weight):
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = (hidden @ weight.t())[:, :vocab_size]
    log_sum = logits.logsumexp(-1)
    losses = log_sum - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) + z_loss_weight * log_sum**2
    losses = losses * token_weights
    losses.backward(upstream.double())
    return losses.detach(), hidden.grad, weight.grad


def error(found, expected):
    """Returns the largest relative error of losses and gradients, as norms."""
    pairs = zip(found, expected, strict=True)
    return max(((x.double() - y.double()).norm() / y.double().norm()).item() for x, y in pairs)


def fused_with_kernels(cases):
    """Runs the kernels in Triton's interpreter."""
    with mock.patch.object(logit_chunks, "uses_kernels", lambda _: True):
        return fused_cases(cases)


@pytest.mark.full
def test_with_kernels_the_fused_loss_of_sharded_and_padded_rows_is_the_same():
    """In one case the last of four ranks has only padding."""
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(5)
    hidden = 0.3 * torch.randn(TOKENS, HIDDEN, generator=generator)
    weight, labels = torch.randn(ROWS, HIDDEN, generator=generator), torch.arange(TOKENS)
    inputs = (hidden, weight, labels, torch.ones(TOKENS), torch.rand(TOKENS, generator=generator), 380, 0.01)
    (losses, grad_hidden, _), *others = (found[0] for found in run_world(4, fused_with_kernels, [inputs]))
    of_ranks = [grad_weight for _, _, grad_weight in others]
    assert all(torch.equal(losses, other[0]) and torch.equal(grad_hidden, other[1]) for other in others)
    expected = fused_reference(*inputs)
    assert error((losses, grad_hidden), expected[:2]) <= 1e-6
    assert error(of_ranks[:2], expected[2].chunk(4)[1:3]) <= 1e-6
    assert of_ranks[2].abs().sum() == 0


@pytest.mark.gate(rows=1)
@pytest.mark.parametrize("vocab_size", [512, 300])
def test_the_fused_loss_does_not_depend_on_how_the_vocabulary_is_sharded(vocab_size):
    generator = torch.Generator().manual_seed(4)
    hidden = 0.3 * torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(ROWS, HIDDEN, generator=generator)
    labels = torch.randint(0, vocab_size, (TOKENS,), generator=generator)
    token_weights = torch.rand(TOKENS, generator=generator)
    cases, bounds = [], []
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        for z_loss_weight in (0.0, 0.01):
            narrow = (hidden.to(dtype), weight.to(dtype), labels)
            cases.append((*narrow, torch.ones(TOKENS), token_weights, vocab_size, z_loss_weight))
            bounds.append(bound)
    expected = [fused_reference(*inputs) for inputs in cases]
    alone = fused_over(1, cases)
    for size in (1, 2, 4):
        for found, wanted, single, bound in zip(
            fused_over(size, cases), expected, alone, bounds, strict=True
        ):
            assert error(found, wanted) <= bound
            assert error(found, single) <= bound
            assert found[2][vocab_size:].abs().sum() == 0


def test_a_label_outside_the_vocabulary_makes_its_loss_nan_on_every_rank():
    hidden, weight, labels = torch.randn(4, 6), torch.randn(8, 6), torch.tensor([0, 5, 6, 9])
    ones, nan = torch.ones(4), [False, False, True, True]
    for loss, _ in run_world(2, loss_and_gradient, hidden @ weight.t(), labels, ones, 6, False):
        assert loss.isnan().tolist() == nan
    for losses, _, _ in run_world(2, fused_loss_and_gradients, hidden, weight, labels, ones, ones, 6, 0.0):
        assert losses.isnan().tolist() == nan
