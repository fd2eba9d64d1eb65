"""The interface that evaluations use of a model: log-probabilities of given tokens, and logits of the next
token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.logit_chunks import own_tokens
from megatron.mpu.mesh import Axis

# Maximum number of tokens whose logits are stored at a time.
_HEAD_TOKENS = 1024


class Scores(NamedTuple):
    """For each target token, its log-probability (fp32) and whether it is the most likely token."""

    log_probs: Tensor
    is_greedy: Tensor


class LanguageModel(Protocol):
    """A model in one process, or a model that is distributed over ranks."""

    @property
    def generation_batch_size(self) -> int:
        """Number of texts to generate at a time. Their keys and values fit in memory."""

    def score(self, tokens: Tensor, targets: Tensor, document_ids: Tensor | None = None) -> Scores:
        """Returns the scores of `targets` [batch, seq], where targets[:, i] follows tokens[:, :i + 1].
        document_ids: [batch, seq], see `MicroBatch`."""

    def next_token_logits(self, texts: Sequence[list[int]]) -> Tensor:
        """Returns the fp32 logits [texts, vocab_size], without padding, of the token after each text. The
        call is fast if each text is the text at the same index in the previous call plus one token."""


def score(logits: Tensor, targets: Tensor, tp_group: Axis, vocab_size: int) -> Scores:
    """Returns the scores from this rank's columns of the logits [..., padded_vocab / TP]. All TP ranks get
    equal scores.

    vocab_size: number of tokens without padding. Among equally likely tokens, the smallest id counts as the
    most likely.
    """
    losses = vocab_parallel_cross_entropy(logits, targets, tp_group, vocab_size)
    return Scores(-losses, _argmax(logits, tp_group, vocab_size) == targets)


def score_in_parts(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, tp_group: Axis, vocab_size: int
) -> Scores:
    """Computes `score` of head(hidden) in parts, because the logits of a long text may not fit in memory.

    hidden: [batch, seq, hidden]. targets: [batch, seq]. head: returns this rank's logits; it computes each
    position independently.
    """
    width = max(_HEAD_TOKENS // len(hidden), 1)
    parts = [
        score(head(x), y, tp_group, vocab_size)
        for x, y in zip(hidden.split(width, dim=1), targets.split(width, dim=1), strict=True)
    ]
    return Scores(*(torch.cat(values, dim=1) for values in zip(*parts, strict=True)))


def _argmax(logits: Tensor, tp_group: Axis, vocab_size: int) -> Tensor:
    tokens = own_tokens(logits.shape[-1], tp_group, vocab_size)
    if not tokens:
        largest = torch.full(logits.shape[:-1], -torch.inf, device=logits.device)
        index = torch.full_like(largest, vocab_size, dtype=torch.int64)
    else:
        own, index = logits[..., : len(tokens)].max(-1)
        largest, index = own.float(), index + tokens.start
    if tp_group.size > 1:
        own = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group.group)
        index = index.masked_fill(own < largest, vocab_size)
        dist.all_reduce(index, op=dist.ReduceOp.MIN, group=tp_group.group)
    return index
