"""The embedding's gradient in Triton's interpreter is bitwise equal to its PyTorch reference."""

from __future__ import annotations

import pytest
import torch

from megatron.kernels.embedding import fused_add_rows
from megatron.mpu.embedding import _add_rows

IDS = {
    "repeated": [3, 0, 3, 6, 3, 0, 5],
    "one id": [4] * 9,
    "each once": [6, 0, 1],
    "one token": [2],
    "none": [],
}


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("dtype,width", [(torch.float32, 5), (torch.bfloat16, 515), (torch.float16, 512)])
def test_the_sum_is_that_of_the_reference(dtype, width, ids):
    torch.manual_seed(2)
    places = torch.tensor(IDS[ids], dtype=torch.int64)
    rows = torch.randn(len(places), width).to(dtype)
    expected = torch.randn(7, width)
    found = expected.clone()
    _add_rows(expected, places, rows)
    fused_add_rows(found, places, rows)
    assert torch.equal(found, expected)


def test_rows_of_equal_ids_are_summed_in_order():
    """Sums of these values in a different order would differ."""
    rows = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    total = torch.zeros(2, 1)
    fused_add_rows(total, torch.tensor([1, 1, 1, 1]), rows)
    assert total.flatten().tolist() == [0.0, 1.0]
