"""PyTorch's flash kernels compute attention with a window. CPUs lack these kernels, so their definition
replaces them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.kernels import windowed_attention
from megatron.model.attention import core_attention
from megatron.model.attention.choice import Implementation
from megatron.model.attention.self_test import AttentionCase, attention_problem
from tests.unit.model.test_attention_choice import Ranks, outputs_and_gradients, training_attention

Tensors = tuple[Tensor, ...]


def scores_of(query: Tensor, key: Tensor, scale: float, left: int) -> Tensor:
    """Computes FlashAttention's definition: query i attends to the keys from i + keys - queries - left on,
    and to no key after i + keys - queries. All tensors are [batch, heads, seq, head_dim]."""
    row = torch.arange(query.shape[2])[:, None] + key.shape[2] - query.shape[2]
    column = torch.arange(key.shape[2])
    scores = query @ key.transpose(2, 3) * scale
    return scores.masked_fill((column < row - left) | (column > row), -math.inf)


def heads_first(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Converts [batch, seq, heads, head_dim] to [batch, heads, seq, head_dim], with a copy of the keys per
    query head."""
    copies = query.shape[2] // key.shape[2]
    return [x.transpose(1, 2) for x in (query, *(x.repeat_interleave(copies, 2) for x in (key, value)))]


@pytest.fixture
def flash_kernels() -> Iterator[list[int]]:
    """Registers the definition for CPUs, with the kernels' arguments. Yields the list of the calls'
    windows."""
    windows: list[int] = []

    def forward(*arguments: object, **options: float) -> Tensors:
        query, key, value, first_q, first_k, max_q, max_k, dropout, causal, _ = arguments
        assert (first_q, first_k, max_q, max_k) == (None, None, query.shape[1], key.shape[1])
        assert (dropout, causal, options["window_size_right"]) == (0.0, True, 0)
        windows.append(options["window_size_left"] + 1)
        q, k, v = heads_first(query, key, value)
        scores = scores_of(q, k, options["scale"], options["window_size_left"])
        some = torch.zeros(2, dtype=torch.int64)
        return (scores.softmax(-1) @ v).transpose(1, 2), scores.float().logsumexp(-1), some[0], some[1], some

    def backward(*arguments: object, **options: float) -> Tensors:
        grad, query, key, value, out, log_sums, first_q, first_k, max_q, max_k, dropout, causal, *_ = (
            arguments
        )
        assert (max_q, max_k, dropout, causal) == (query.shape[1], key.shape[1], 0.0, True)
        assert (options["window_size_right"], log_sums.dtype) == (0, torch.float32)
        q, k, v = heads_first(query, key, value)
        of_out, scale = grad.transpose(1, 2), options["scale"]
        scores = scores_of(q, k, scale, options["window_size_left"])
        weights = (scores - log_sums.unsqueeze(-1)).exp().to(q.dtype)  # with the sinks, if there are any
        error = (weights @ v).transpose(1, 2) - out  # with sinks the output is rounded twice
        assert error.abs().max() <= 4 * torch.finfo(out.dtype).eps * out.abs().max()
        of_weights = of_out @ v.transpose(2, 3)
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
        gradients = of_scores @ k, of_scores.transpose(2, 3) @ q, weights.transpose(2, 3) @ of_out
        return tuple(
            of_heads.transpose(1, 2).unflatten(2, (x.shape[2], -1)).sum(3)
            for of_heads, x in zip(gradients, (query, key, value), strict=True)
        )

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield windows
    library._destroy()


@pytest.mark.parametrize(
    ("variant", "window"),
    [
        ("--window-size 6", 6),
        ("--window-size 6 --softmax-type learnable", 6),
        ("--softmax-type learnable", 21),  # longer than the sequence, so it hides no key
        ("--softmax-type off-by-one", 21),
    ],
)
@pytest.mark.parametrize("cp_size", [1, 2])
def test_windows_and_sinks_by_the_flash_kernel_are_dense_attention(
    cp_size: int, variant: str, window: int, flash_kernels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two query heads share a key head, and a micro-batch has two samples. With context parallelism the
    queries are two chunks of the sequence."""
    flags = f"--attention-dropout 0 {variant}"
    attention = training_attention(flags)
    expected = outputs_and_gradients(attention, None, 1)
    assert not flash_kernels
    monkeypatch.setattr(core_attention, "implementation_for", lambda *_: Implementation.FLASH_WINDOW)
    ranks = Ranks(flags, cp_size, monkeypatch) if cp_size > 1 else attention
    found = outputs_and_gradients(ranks, None, 1)
    assert flash_kernels == [window] * (1 if cp_size == 1 else 2 * cp_size)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_self_test_finds_a_window_of_a_different_size(
    flash_kernels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = AttentionCase(64, 4, 2, 16, torch.bfloat16, window=16)
    for good in (case, replace(case, has_sink=True), replace(case, window=65, has_sink=True)):
        assert attention_problem(good, "cpu") is None
    flash_kernels.clear()
    assert attention_problem(case, "cpu") is None
    options = windowed_attention._options
    monkeypatch.setattr(windowed_attention, "_options", lambda scale, window: options(scale, window + 1))
    assert "output" in (attention_problem(case, "cpu") or "")
    assert flash_kernels == [16, 17]
