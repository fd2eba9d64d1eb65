"""The core of attention: scores, mask, softmax, dropout and the weighted sum of the values.

softmax(query @ key.T * scale + bias) @ value, for each sample and head
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.model.layer_context import LayerContext
from megatron.mpu.compilation import not_compiled
from megatron.mpu.random import dropout


class CoreAttention(nn.Module):
    """query, key, value [seq, batch, heads / TP, head_dim] -> [seq, batch, heads / TP * head_dim]. It has no
    parameters.

    Without dropout this is PyTorch's fused attention; with dropout, see `_attend_with_dropout`.
    """

    def __init__(self, context: LayerContext, layer_index: int) -> None:
        """`layer_index`: part of the dropout's salt."""
        super().__init__()
        self.scale = context.config.model.attention_scale
        self.dropout_rate = context.config.model.attention_dropout
        self.dropout_place = f"{layer_index}.self_attention.attention_dropout"
        self.recompute = context.config.training.recomputes_attention
        self.masks = context.masks
        self.tp_group = context.tp_group
        self.dropout_rng = context.dropout_rng

    def forward(self, query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None) -> Tensor:
        """document_ids: [batch, seq], or None if the mask does not depend on documents."""
        seq, batch, heads, head_dim = query.shape
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [batch, heads, seq, dim]
        bias = self.masks.bias(seq, query.dtype, query.device, document_ids)
        if self.training and self.dropout_rate > 0:
            output = self._unfused_attention(query, key, value, bias)
        else:
            output = F.scaled_dot_product_attention(
                query, key, value, bias, is_causal=bias is None, scale=self.scale
            )
        return output.permute(2, 0, 1, 3).reshape(seq, batch, heads * head_dim)

    @not_compiled  # dropout's masks are hashed in Python
    def _unfused_attention(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """`_attend_with_dropout`; with `recompute` no tensor of size [seq, seq] is kept for the backward pass
        (selective activation recomputation, arXiv 2205.05198, section 5)."""
        if not self.recompute:
            return self._attend_with_dropout(query, key, value, bias)
        samples = self.dropout_rng.samples

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with self.dropout_rng.use_samples(samples):
                return self._attend_with_dropout(query, key, value, bias)

        return checkpoint(attend, query, key, value, use_reentrant=False, preserve_rng_state=False)

    def _attend_with_dropout(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """Unfused attention, used with dropout. The dropout of a fused kernel depends on the rank and on the
        kernel, so the loss would depend on the layout. This dropout depends on sample, head and position."""
        seq = query.shape[2]
        scores = torch.matmul(query, key.transpose(2, 3)) * self.scale
        if bias is None:
            future = torch.ones(seq, seq, dtype=torch.bool, device=query.device).triu_(1)
            scores = scores.masked_fill(future, -math.inf)
        else:
            scores = scores + bias
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        weights = dropout(
            weights,
            self.dropout_rate,
            self.dropout_rng,
            self.dropout_place,
            batch_dim=0,
            shard_dim=1,
            tp_group=self.tp_group,
        )
        return torch.matmul(weights, value)
