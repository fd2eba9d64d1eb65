"""Compares the norm kernels in Triton's interpreter with sums in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.kernels.optimizer import CHUNK, COPY_BLOCK, copy_gradient_op, fused_norms
from megatron.optimizer.gradient_norm import accurate_norm


def tensors(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator) * 10.0 ** (index - 3) for index, size in enumerate(sizes)]


def test_norms_of_ragged_tensors_are_exact_to_fp64_and_close_to_the_reference():
    """The tensors are views of one flat buffer at odd offsets, like the optimizer's gradients."""
    sizes = (1, CHUNK - 1, CHUNK, 0, CHUNK + 1, 3 * CHUNK + 17)
    parts = torch.cat(tensors(*sizes)).split(list(sizes))
    norms = fused_norms(parts)
    assert norms.dtype == torch.float64
    for part, norm in zip(parts, norms, strict=True):
        assert norm.item() == pytest.approx(math.sqrt(part.double().square().sum().item()), rel=1e-14)
        assert norm.item() == pytest.approx(accurate_norm(part).item(), rel=1e-7)


@pytest.mark.full
def test_a_tensor_with_more_chunks_than_a_block_of_the_second_kernel():
    from megatron.kernels.optimizer import BLOCK

    (values,) = tensors((BLOCK + 3) * CHUNK + 5)
    assert fused_norms([values]).item() == pytest.approx(values.double().norm().item(), rel=1e-13)


def test_a_norm_does_not_depend_on_the_other_tensors_or_on_the_place_in_memory():
    first, second = tensors(2 * CHUNK + 3, CHUNK)
    moved = torch.cat([torch.zeros(5), first])[5:]
    norms = fused_norms([second, moved, second[:0]])
    assert norms[1].item() == fused_norms([first]).item()
    assert norms[2].item() == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_bad_element_makes_its_norm_not_finite_and_no_other(bad):
    good, broken = tensors(CHUNK + 2, CHUNK + 2)
    broken[CHUNK + 1] = bad
    assert fused_norms([good, broken]).isfinite().tolist() == [True, False]


@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_copied_gradient_has_equal_values_and_a_bad_element_shows(dtype, bad):
    (values,) = tensors(COPY_BLOCK + 3)
    gradient = values.to(dtype)
    if bad is not None:
        gradient[COPY_BLOCK + 1] = bad
    total, norms = torch.zeros(2 * COPY_BLOCK), torch.zeros(2, dtype=torch.float64)
    copy_gradient_op(gradient, total[1 : COPY_BLOCK + 4], norms[1])
    torch.testing.assert_close(total[1 : COPY_BLOCK + 4], gradient.float(), rtol=0, atol=0, equal_nan=True)
    assert total[0] == 0.0 and total[COPY_BLOCK + 4 :].eq(0.0).all()
    assert norms.isfinite().tolist() == [True, bad is None]


def test_changed_values_at_the_same_address_are_read_again():
    (values,) = tensors(100)
    before = fused_norms([values]).item()
    values.mul_(2.0)
    assert fused_norms([values]).item() == pytest.approx(2 * before, rel=1e-15)
