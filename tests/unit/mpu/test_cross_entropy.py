import pytest
import torch
import torch.nn.functional as F

from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.mesh import Axis

ONE = Axis("tp")


def reference(logits, labels, vocab_size, upstream):
    """Returns loss and gradient in float64, from the definition."""
    logits = logits.detach().double().requires_grad_()
    used = logits[..., :vocab_size]
    loss = used.exp().sum(-1).log() - used.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    loss.backward(upstream.double())
    return loss.detach(), logits.grad


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("vocab_size", [96, 80, 1])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)]
)
def test_loss_and_gradient_are_those_of_the_definition(dtype, tolerance, vocab_size, overwrite):
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(4, 7, 96, generator=generator)).to(dtype).requires_grad_()
    # Neither labels nor upstream gradient are contiguous, and the gradient is not constant.
    labels = torch.randint(0, vocab_size, (7, 4), generator=generator).t()
    upstream = torch.randn(7, 4, generator=generator).t()
    expected_loss, expected_grad = reference(logits, labels, vocab_size, upstream)

    given = logits * 1
    loss = vocab_parallel_cross_entropy(given, labels, ONE, vocab_size, overwrite_logits=overwrite)
    assert overwrite or torch.equal(given, logits)
    assert loss.dtype == torch.float32 and loss.shape == labels.shape
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=2e-6)
    loss.backward(upstream)
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad.double(), expected_grad, rtol=tolerance, atol=tolerance)
    assert logits.grad[..., vocab_size:].abs().sum() == 0


def test_logits_may_be_non_contiguous():
    logits, labels = torch.randn(5, 3, 40).transpose(0, 1), torch.randint(0, 33, (3, 5))
    loss = vocab_parallel_cross_entropy(logits, labels, ONE, 33, overwrite_logits=True)
    expected, _ = reference(logits, labels, 33, torch.ones(3, 5))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)


def test_large_logits_lose_no_precision():
    logits = torch.tensor([[10000.0, 10001.0, 9990.0], [-10000.0, -10001.0, -9990.0]])
    labels = torch.tensor([0, 2])
    loss = vocab_parallel_cross_entropy(logits, labels, ONE, 3)
    expected = F.cross_entropy(logits.double(), labels, reduction="none")
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)


def test_padding_with_the_largest_logits_does_not_change_the_loss():
    logits = torch.cat([torch.randn(4, 10) - 200, torch.full((4, 6), 50.0)], -1)
    labels = torch.tensor([0, 3, 9, 5])
    loss = vocab_parallel_cross_entropy(logits, labels, ONE, 10)
    torch.testing.assert_close(loss, F.cross_entropy(logits[:, :10], labels, reduction="none"))


def test_a_label_outside_the_vocabulary_makes_its_loss_nan():
    loss = vocab_parallel_cross_entropy(torch.randn(5, 8), torch.tensor([0, 6, 7, -1, 5]), ONE, 6)
    assert loss.isnan().tolist() == [False, True, True, True, False]


def test_a_second_backward_pass_is_refused():
    logits = torch.randn(5, 8, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.arange(5), ONE, 8).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()
