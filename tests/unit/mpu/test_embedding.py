"""The gradient of a table of embeddings is summed in fp32, in a fixed order, into main_grad."""

import pytest
import torch
import torch.nn.functional as F

from megatron.mpu import embedding as module
from megatron.mpu.embedding import embedding

ROWS, HIDDEN = 37, 6


def table(dtype=torch.float32, main_grad=True):
    weight = torch.nn.Parameter(
        torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    )
    if main_grad:
        weight.main_grad = torch.ones(ROWS, HIDDEN)
        if dtype == torch.float32:
            weight.grad = weight.main_grad  # as the optimizer does
    return weight


def some(*shape, dtype=torch.float32):
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)


def ids_with_many_repeats(batch=3, seq=50):
    return torch.randint(0, 11, (batch, seq), generator=torch.Generator().manual_seed(3)) * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_thousands_of_small_gradients_of_one_token_add_up(dtype):
    weight, gradient = table(dtype), torch.full((1, 4096, HIDDEN), 1e-3).to(dtype)
    embedding(torch.full((1, 4096), 7), weight).backward(gradient)
    expected = torch.ones(ROWS, HIDDEN, dtype=torch.float64)
    expected[7] += 4096 * gradient[0, 0].double()
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-4, atol=0)
    assert dtype == torch.float32 or weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_summed_as_the_fp32_reference_sums_them(dtype):
    ids, gradient = ids_with_many_repeats(), some(3, 50, dtype=dtype)
    weight, reference = table(dtype), table(main_grad=False)
    embedding(ids, weight).backward(gradient)
    F.embedding(ids, reference).backward(gradient.float())
    assert torch.equal(weight.main_grad, 1.0 + reference.grad)


@pytest.mark.parametrize("work_bytes", [1, 4 * 150 * 4, 2**20])
def test_fp32_has_the_bits_of_pytorchs_own_whatever_the_work_space(monkeypatch, work_bytes):
    monkeypatch.setattr(module, "WORK_BYTES", work_bytes)
    ids, gradient = ids_with_many_repeats(), some(3, 50)
    weight, reference = table(), table()
    embedding(ids, weight).backward(gradient)
    F.embedding(ids, reference).backward(gradient)
    assert torch.equal(weight.main_grad, reference.main_grad)
    assert weight.grad is weight.main_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_positions_that_all_samples_share_are_summed_over_them_in_fp32(dtype):
    positions, gradient = torch.arange(5).unsqueeze(0), some(64, 5, dtype=dtype)
    weight = table(dtype)
    vectors = embedding(positions, weight, 64)
    assert torch.equal(vectors, weight.detach()[:5].expand(64, 5, HIDDEN))
    (vectors * torch.ones(64, 5, 1, dtype=dtype)).backward(gradient)
    expected = torch.ones(ROWS, HIDDEN, dtype=torch.float64)
    expected[:5] += gradient.double().sum(0)
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_an_optimizer_autograd_gets_the_gradient(dtype):
    ids, gradient = ids_with_many_repeats(), some(3, 50, dtype=dtype)
    weight = table(dtype, main_grad=False)
    embedding(ids, weight).backward(gradient)
    expected = torch.zeros(ROWS, HIDDEN, dtype=torch.float64)
    expected.index_add_(0, ids.reshape(-1), gradient.double().reshape(-1, HIDDEN))
    assert weight.grad.dtype == dtype
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(weight.grad.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_bad_gradient_reaches_its_own_row_only():
    ids, gradient = torch.tensor([[3, 5, 3]]), some(1, 3)
    gradient[0, 0, 0] = torch.nan
    weight = table()
    embedding(ids, weight).backward(gradient)
    assert weight.main_grad.isnan().nonzero().tolist() == [[3, 0]]


def test_no_tokens_give_no_gradient():
    weight = table()
    embedding(torch.zeros(2, 0, dtype=torch.int64), weight).sum().backward()
    assert torch.equal(weight.main_grad, torch.ones(ROWS, HIDDEN))


def test_no_temporary_of_the_size_of_the_table_is_allocated(monkeypatch):
    """The table has 64 MiB, and the batch has 8 tokens."""
    weight = torch.nn.Parameter(torch.zeros(2**15, 512, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(2**15, 512)
    vectors = embedding(torch.arange(8).unsqueeze(0), weight)
    with torch.profiler.profile(profile_memory=True) as profile:
        vectors.backward(torch.ones_like(vectors))
    allocated = [event.cpu_memory_usage for event in profile.events()]
    assert 0 < max(allocated) < 2**20
