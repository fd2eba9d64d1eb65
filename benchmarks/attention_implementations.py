"""The implementations that compute the same attention: this repository's Triton kernels, and PyTorch's
`scaled_dot_product_attention` (SDPA) and FlexAttention. Attention dropout is left out: the masks of PyTorch's
kernels depend on rank and kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from megatron.kernels.attention import AttentionMask, flash_attention
from megatron.model.position import AttentionMasks, alibi_slopes, document_ids_of

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query [seq, 1, heads, head_dim], key and value [seq, 1, groups, head_dim] -> the shape of query."""
KINDS = ("causal", "causal, heads share keys", "window", "documents", "ALiBi")


def implementations(kind: str, seq: int, heads: int, device: torch.device) -> dict[str, Attend]:
    """Returns the implementations of one of `KINDS`, by name. Windows and documents have seq / 4 tokens."""
    document_ids = None
    if kind == "documents":
        tokens = torch.ones(1, seq, dtype=torch.int64, device=device)
        tokens[:, :: seq // 4] = 0
        document_ids = document_ids_of(tokens, 0)
    masks = AttentionMasks(
        alibi_slopes(heads) if kind == "ALiBi" else None,
        within_documents=document_ids is not None,
        window=seq // 4 if kind == "window" else None,
    )
    return {
        "triton": partial(_triton, masks, document_ids),
        "SDPA": partial(_sdpa, masks, document_ids),
        "Flex": _flex(masks, document_ids, seq, device),
    }


def _triton(
    masks: AttentionMasks, document_ids: Tensor | None, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    ranges = masks.ranges(len(query), 1, query.device, document_ids)
    return flash_attention(
        query, key, value, query.shape[-1] ** -0.5, AttentionMask(masks.slopes_on(query.device), *ranges)
    )


def _sdpa(
    masks: AttentionMasks, document_ids: Tensor | None, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    bias = masks.bias(len(query), query.dtype, query.device, document_ids)
    heads_first = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    shares = key.shape[2] < query.shape[2]
    output = F.scaled_dot_product_attention(*heads_first, bias, is_causal=bias is None, enable_gqa=shares)
    return output.permute(2, 0, 1, 3)


def _flex(masks: AttentionMasks, document_ids: Tensor | None, seq: int, device: torch.device) -> Attend:
    """FlexAttention, compiled on a GPU. Compiled code has no window or document of its own, so both kinds use
    the first token of each query."""
    first_keys, _ = masks.ranges(seq, 1, device, document_ids)
    slopes = masks.slopes_on(device)

    def allowed(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        causal = column <= row
        return causal if first_keys is None else causal & (column >= first_keys[0, row])

    def biased(score: Tensor, _batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score if slopes is None else score + slopes[head] * (column - row)

    block_mask = create_block_mask(allowed, None, None, seq, seq, device)
    function = flex_attention if device.type == "cpu" else torch.compile(flex_attention, dynamic=False)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads_first = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        shares = key.shape[2] < query.shape[2]
        score_mod = None if slopes is None else biased
        output = function(*heads_first, score_mod=score_mod, block_mask=block_mask, enable_gqa=shares)
        return output.permute(2, 0, 1, 3)

    return attend
