"""The preflight's self-test of attention kernels: of PyTorch's causal attention, with and without a window.

Which kernel runs depends on the GPU, the versions of torch and cuDNN, and the shape. Some released versions
have cuDNN kernels that are wrong for some shapes (pytorch issues 193893 and 196678).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, current_flash_attention_impl

from megatron.config import Config
from megatron.errors import one_line
from megatron.kernels.windowed_attention import windowed_attention
from megatron.model.attention.choice import Implementation, training_attention
from megatron.model.attention.core_attention import causal_arguments, causal_attention
from megatron.model.layer_kinds import layer_kinds
from megatron.model.layer_list import PARAMETER_DTYPES

_MAX_ERROR = 8
"""Largest accepted error of a row, in units of the dtype's epsilon. PyTorch's CPU kernels reach 1.7 units."""
_TILE, _MAX_TILES = 128, 8
_HEADS_AT_ONCE = 8
"""Number of heads whose fp32 scores are in memory at a time."""
_SMALLEST_ROW = 1e-2
"""Smallest norm by which an error is divided: with one token the gradient of the query is 0."""


@dataclass(frozen=True)
class AttentionCase:
    """The causal attention of a rank: query [seq, 1, heads, head_dim], key and value [seq, 1, groups,
    head_dim]. window: number of keys that a query attends to; None for all. has_sink: whether there is a sink
    of 0."""

    seq: int
    heads: int
    groups: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None
    has_sink: bool = False


def attention_cases(config: Config) -> list[AttentionCase]:
    """Returns the cases of a run: the 16-bit attention that PyTorch computes for it, in training or in
    evaluation, with and without a window. A long sequence is shortened by whole tiles, and a window is at
    most half of the sequence. In a case with a sink and no window, the window is longer than the sequence."""
    model, parallel = config.model, config.parallel
    evaluation = config.with_settings({"model.attention_dropout": 0.0})
    kinds = {
        kind.window: (kind.of(model), training_attention(evaluation, kind.window))
        for kind in layer_kinds(model)
    }
    dtype = PARAMETER_DTYPES[config.precision.name]
    ranks, cp_size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    seq = model.seq_length // (2 * cp_size if cp_size > 1 else 1)
    seq = min(seq, _MAX_TILES * _TILE + seq % _TILE)
    found: list[AttentionCase] = []
    for window, (own, implementation) in kinds.items():
        heads = (own.num_attention_heads // ranks, max(own.query_groups // ranks, 1))
        plain = AttentionCase(seq, *heads, own.attention_head_dim, dtype)
        if implementation == Implementation.SDPA:
            found.append(plain)
        elif implementation == Implementation.FLASH_WINDOW:
            size = seq + 1 if window is None else max(min(window, seq // 2), 1)
            found.append(replace(plain, window=size, has_sink=own.softmax_type != "vanilla"))
    found = sorted(dict.fromkeys(found), key=lambda case: case.window or 0)  # first without a window
    return found if dtype != torch.float32 else []


def attention_problem(case: AttentionCase, device: torch.device | str) -> str | None:
    """Returns what is wrong with the results of PyTorch's kernel, or the error that it raises; None if the
    results are right."""
    try:
        errors = _errors(case, device)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # the device cannot be used at all
    except RuntimeError as error:  # from cuDNN
        return one_line(f"{type(error).__name__}: {' '.join(str(error).split())}")
    bound = _MAX_ERROR * torch.finfo(case.dtype).eps
    wrong = [f"{name} {error:.2g}" for name, error in errors.items() if not error <= bound]  # or NaN
    return f"relative error above {bound:.2g}: {', '.join(wrong)}" if wrong else None


def sdpa_backend(case: AttentionCase, device: torch.device | str) -> str:
    """Returns the name of the back end that PyTorch chooses for this case: a back end of
    scaled_dot_product_attention, or with a window the flash kernel."""
    if case.window is not None:
        return current_flash_attention_impl() or "FA2"
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return "scaled_dot_product_attention"
    query, key, value, _ = (x.requires_grad_() for x in _tensors(case, device))
    return SDPBackend(choose(**causal_arguments(query, key, value))).name


def _tensors(case: AttentionCase, device: torch.device | str) -> list[Tensor]:
    """Returns query, key, value and the gradient of the output. Their elements are normally distributed."""
    random = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(case.seq, 1, heads, case.head_dim, generator=random, device=device).to(case.dtype)
        for heads in (case.heads, case.groups, case.groups, case.heads)
    ]


def _errors(case: AttentionCase, device: torch.device | str) -> dict[str, float]:
    """Returns the largest relative error of a row of the output and of each gradient."""
    query, key, value, grad = _tensors(case, device)
    query, key, value = leaves = [x.requires_grad_() for x in (query, key, value)]
    scale = case.head_dim**-0.5
    if case.window is None:
        output = causal_attention(query, key, value, scale)
    else:
        sinks = query.new_zeros(case.heads) if case.has_sink else None
        output = windowed_attention(query, key, value, scale, case.window, sinks)
    found = (output.detach(), *torch.autograd.grad(output, leaves, grad))
    names = ("output", "gradient of the query", "gradient of the key", "gradient of the value")
    return dict(
        zip(names, map(_largest_error, found, _reference(query, key, value, grad, case)), strict=True)
    )


def _reference(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, case: AttentionCase
) -> tuple[Tensor, ...]:
    """Returns (output, gradient of query, of key, of value) of attention, computed from all scores in
    fp32."""
    seq, _, heads, head_dim = query.shape
    query, key, value = leaves = [x.detach().float().requires_grad_() for x in (query, key, value)]
    forbidden = torch.ones(seq, seq, dtype=torch.bool, device=query.device)
    forbidden = forbidden.triu(1) | forbidden.tril(-(case.window or seq))
    outputs = []
    for own in torch.arange(heads, device=query.device).split(_HEADS_AT_ONCE):
        group = own // (heads // key.shape[2])
        scores = torch.einsum("ibhd,jbhd->bhij", query[:, :, own], key[:, :, group]) * head_dim**-0.5
        scores = F.pad(scores.masked_fill(forbidden, -torch.inf), (0, int(case.has_sink)))  # a sink of 0
        weights = scores.softmax(-1)[..., :seq]
        output = torch.einsum("bhij,jbhd->ibhd", weights, value[:, :, group])
        output.backward(grad[:, :, own].float())
        outputs.append(output.detach())
    return torch.cat(outputs, dim=2), *(leaf.grad for leaf in leaves if leaf.grad is not None)


def _largest_error(found: Tensor, expected: Tensor) -> float:
    """Returns the largest relative error of a row, which is the vector of a token and a head. The error is
    divided by the row's norm or by the mean norm, whichever is larger, because the query's gradients of the
    first tokens are nearly 0."""
    sizes = expected.norm(dim=-1)
    usual = sizes.square().mean().sqrt().clamp(min=_SMALLEST_ROW)
    return ((found.float() - expected).norm(dim=-1) / sizes.maximum(usual)).max().item()
