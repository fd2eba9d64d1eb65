"""QK-clip: scales the weights of queries and keys, so that attention logits stay below a threshold.

QK-clip is a part of MuonClip (Kimi K2, arXiv 2507.20534, section 2.1). A logit is a score, query @ key.T *
scale + bias. Let m be the largest logit of a head in the global batch, t the threshold, and eta = min(1, t /
m). After the optimizer's update, weights are scaled as in Megatron-LM's `clip_qk`:

    rows of the query's weight                    x eta^alpha
    rows of the key's weight                      x eta^(1 - alpha)
    latent attention: rows of the rotated query   x eta        (all heads share the rotated key)

Heads that share a key use the largest logit of their group. Biases are unchanged. The layers for multi-token
prediction are scaled, too, unlike in Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config import Config
from megatron.model.position import AttentionMasks
from megatron.mpu.compilation import not_compiled
from megatron.mpu.mesh import Mesh
from megatron.mpu.parameters import spec_of
from megatron.mpu.step_metrics import StepMetrics

_SCORES_AT_ONCE, _QUERIES_AT_ONCE = 2**26, 1024
"""Limits of a block of queries: number of scores (each takes at most 6 bytes), and number of queries."""


def records_logits(config: Config) -> bool:
    """Returns whether a run needs the largest logits of its training steps (for QK-clip or as a metric)."""
    return config.optimizer.qk_clip or config.logging.log_max_attention_logit


class LargestLogits(nn.Module):
    """Stores the largest logit of each of this rank's heads since `reset`. A recomputed pass does not change
    it."""

    largest: Tensor
    """The largest logits, fp32 [heads / TP]; -inf before the first pass."""

    def __init__(self, heads: int, masks: AttentionMasks, scale: float) -> None:
        super().__init__()
        self.masks, self.scale = masks, scale
        self.register_buffer("largest", torch.full((heads,), -torch.inf), persistent=False)

    def _apply(self, fn: Callable, recurse: bool = True) -> LargestLogits:
        """Overrides torch's method, which `to` calls, so that the logits stay fp32 in a 16-bit model."""
        super()._apply(fn, recurse)
        self.largest = self.largest.float()
        return self

    def reset(self) -> None:
        """Sets the largest logits to -inf."""
        self.largest.fill_(-torch.inf)

    @not_compiled  # this method writes to a buffer
    @torch.no_grad()
    def record(
        self, query: Tensor, key: Tensor, document_ids: Tensor | None, chunks: Sequence[range]
    ) -> None:
        """Computes the logits of a micro-batch, a block of queries at a time, and updates the largest ones.

        query: [queries, batch, heads, head_dim]. key: [seq, batch, groups, head_dim]. chunks: positions of
        the queries in the sequence; chunks of equal length. document_ids: [batch, seq] or None."""
        _, batch, groups, _ = key.shape
        size = max(_SCORES_AT_ONCE // (batch * query.shape[2] * len(key)), 1)
        size, masks = min(size, _QUERIES_AT_ONCE), self.masks
        is_plain = masks.slopes is None and not masks.within_documents and masks.window_of(len(key)) is None
        for chunk, own in zip(chunks, query.chunk(len(chunks)), strict=True):
            for first in range(0, len(chunk), size):
                rows, block = chunk[first : first + size], own[first : first + size]
                keys = key[: rows.stop].permute(1, 2, 3, 0)  # [batch, groups, head_dim, keys]
                block = block.unflatten(2, (groups, -1)).permute(1, 2, 3, 0, 4)
                scores = torch.matmul(block.flatten(2, 3), keys).view(batch, -1, len(rows), rows.stop)
                if is_plain:  # needs no fp32 copy of the scores
                    later = torch.ones(len(rows), len(rows), dtype=torch.bool, device=query.device).triu_(1)
                    scores[..., rows.start :].masked_fill_(later, -torch.inf)
                    logits = scores.amax((0, 2, 3)).float() * self.scale
                else:
                    bias = masks.bias_of_rows(rows, torch.float32, query.device, document_ids)
                    logits = torch.add(bias, scores, alpha=self.scale).amax((0, 2, 3))
                self.largest.copy_(self.largest.maximum(logits))


class Rows(Enum):
    """The result that consecutive rows of a weight compute."""

    QUERY = "a query, whose product with a key is a part of the logit"
    KEY = "a key"
    QUERY_OF_SHARED_KEY = "a query for a key whose weight is not scaled"
    OTHER = "no part of a logit"


LogitWeight = tuple[nn.Parameter, tuple[tuple[int, Rows], ...]]
"""A weight, and pairs (number of rows, what these rows compute) for its consecutive rows. The pairs describe
one group of heads, and repeat for each group."""


def fused_weight(weight: nn.Parameter, has_gate: bool) -> LogitWeight:
    """Returns the `LogitWeight` of the fused weight of queries, keys and values. has_gate: whether the weight
    also has the rows of gates."""
    kinds = (Rows.QUERY, *[Rows.OTHER] * has_gate, Rows.KEY, Rows.OTHER)
    return weight, tuple(zip(spec_of(weight).matrix_rows, kinds, strict=True))


class _Attention(Protocol):
    core_attention: Any

    def logit_weights(self) -> Sequence[LogitWeight]:
        """Returns the weights that compute queries and keys."""


class QKClip:
    """A `StateRule` that returns the factors of the weights' rows, and records the largest logit as a
    metric."""

    def __init__(self, module: nn.Module, mesh: Mesh, config: Config, metrics: StepMetrics) -> None:
        """module: the module with this rank's pipeline stages."""
        found = [child for child in module.modules() if hasattr(child, "logit_weights")]
        self._attentions = [cast(_Attention, child) for child in found]
        self._mesh, self._metrics, self._options = mesh, metrics, config.optimizer

    def _logits(self) -> Iterator[LargestLogits]:
        return (attention.core_attention.largest_logits for attention in self._attentions)

    def begin_step(self) -> None:
        """Resets the largest logits, so that passes outside of a step (such as measurements) have no
        effect."""
        for logits in self._logits():
            logits.reset()

    @torch.no_grad()
    def end_step(self) -> dict[nn.Parameter, Tensor]:
        """Returns the factors of all rows of each full weight, fp32 [rows]. It is collective over the ranks
        with this rank's pipeline rank."""
        if not self._attentions:
            return {}
        tp, own = self._mesh.tp, [logits.largest for logits in self._logits()]  # each [heads / TP]
        largest = torch.cat([each.new_full((tp.size, len(each)), -torch.inf).flatten() for each in own])
        of_layers = largest.split([tp.size * len(each) for each in own])
        for of_layer, each in zip(of_layers, own, strict=True):
            of_layer.view(tp.size, -1)[tp.rank] = each
        if self._mesh.stage.size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._mesh.stage.group)
        self._metrics.record("max attention logit", largest.amax(), "max")
        if not self._options.qk_clip:
            return {}
        return {
            weight: self._factors(of_heads, parts, spec_of(weight).global_shape[0])
            for attention, of_heads in zip(self._attentions, of_layers, strict=True)
            for weight, parts in attention.logit_weights()
        }

    def _factors(self, largest: Tensor, parts: Sequence[tuple[int, Rows]], rows: int) -> Tensor:
        """Returns the factor of each row of a weight, [rows]. largest: the largest logits of all heads of a
        layer."""
        threshold, alpha = self._options.qk_clip_threshold, self._options.qk_clip_alpha
        powers = {
            Rows.QUERY: alpha,
            Rows.KEY: 1.0 - alpha,
            Rows.QUERY_OF_SHARED_KEY: 1.0,
            Rows.OTHER: 0.0,
        }
        largest = largest.view(rows // sum(count for count, _ in parts), -1).amax(1)
        eta = torch.where(largest > threshold, threshold / largest, 1.0)
        return torch.cat([(eta ** powers[of])[:, None].expand(-1, count) for count, of in parts], 1).flatten()
