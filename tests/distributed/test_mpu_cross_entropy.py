import pytest
import torch
import torch.distributed as dist

from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.layout import ParallelLayout
from tests.distributed.pool import run_world


def loss_and_gradient(logits, labels, upstream, vocab_size, overwrite):
    """Of this rank's columns of the logits."""
    size = dist.get_world_size()
    tensor = ParallelLayout.create(size, size, 1, dist.get_rank()).make_tensor_group()
    own = logits.chunk(size, -1)[tensor.rank].clone().requires_grad_()
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
# 512: no padding; 500: the last rank has some; 300: of four ranks, the last has nothing else.
@pytest.mark.parametrize("vocab_size", [512, 500, 300])
def test_the_loss_over_a_cut_vocabulary_is_that_of_the_definition(vocab_size, size):
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


def test_a_label_outside_the_vocabulary_makes_its_loss_nan_on_every_rank():
    logits, labels = torch.randn(4, 8), torch.tensor([0, 5, 6, 9])
    for loss, _ in run_world(2, loss_and_gradient, logits, labels, torch.ones(4), 6, False):
        assert loss.isnan().tolist() == [False, False, True, True]
