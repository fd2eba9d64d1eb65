"""Causal multi-head self-attention.

    hidden [s, b, h] -> fused projection [s, b, 3 h / TP] -> query, key, value [b, n / TP, s, d]
    softmax(query @ key.T * scale + bias) @ value [b, n / TP, s, d] -> output projection -> [s, b, h]

The heads are sharded over the tensor-parallel ranks (Megatron, arXiv 1909.08053, section 3): each rank
computes n / TP whole heads, and the output projection sums over the ranks.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ModelConfig
from megatron.model.position import AttentionMasks, RotaryEmbedding, positions_within_documents
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.layout import TPGroup
from megatron.mpu.random import DropoutRNG, dropout


class ParallelSelfAttention(nn.Module):
    """[seq, batch, hidden] -> [seq, batch, hidden].

    The rows of the fused projection are ordered (heads, 3, head_dim). So a contiguous slice of rows is a set
    of whole heads, and the same full weight serves every tensor-parallel degree.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        tp_group: TPGroup,
        dropout_rng: DropoutRNG,
        masks: AttentionMasks,
        rotary: RotaryEmbedding | None,
        reset_position_ids: bool,
        output_init_std: float,
        sequence_parallel: bool,
        recompute: bool,
    ) -> None:
        """`reset_position_ids`: rotary positions count from the start of each document. `sequence_parallel`:
        input and output are this rank's shard of the sequence. `recompute`: attention with dropout recomputes
        its scores in the backward pass."""
        super().__init__()
        self.head_dim = config.kv_channels
        self.scale = config.attention_scale
        self.heads = config.num_attention_heads // tp_group.size
        self.dropout_rate = config.attention_dropout
        self.dropout_place = f"{layer_index}.self_attention.attention_dropout"
        self.tp_group = tp_group
        self.dropout_rng = dropout_rng
        self.masks = masks
        self.rotary = rotary
        self.reset_position_ids = reset_position_ids
        self.recompute = recompute
        width = config.num_attention_heads * self.head_dim
        self.query_key_value = ColumnParallelLinear(
            config.hidden_size,
            3 * width,
            tp_group,
            init_std=config.matrix_init_std,
            lr_mult=config.matrix_lr_mult,
            sequence_parallel=sequence_parallel,
        )
        self.dense = RowParallelLinear(
            width,
            config.hidden_size,
            tp_group,
            init_std=output_init_std,
            lr_mult=config.matrix_lr_mult,
            sequence_parallel=sequence_parallel,
        )

    def forward(self, hidden: Tensor, document_ids: Tensor | None) -> Tensor:
        """hidden [seq, batch, hidden], document_ids [batch, seq] or None -> [seq, batch, hidden]."""
        projected = self.query_key_value(hidden)
        seq, batch, _ = projected.shape
        projected = projected.view(seq, batch, self.heads, 3, self.head_dim)
        query, key, value = projected.unbind(dim=3)
        if self.rotary is not None:
            positions = positions_within_documents(document_ids) if self.reset_position_ids else None
            query, key = self.rotary.rotate(query, key, positions)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [batch, heads, seq, dim]
        bias = self.masks.bias(seq, query.dtype, query.device, document_ids)
        if self.training and self.dropout_rate > 0:
            context = self._unfused_attention(query, key, value, bias)
        else:
            context = F.scaled_dot_product_attention(
                query, key, value, bias, is_causal=bias is None, scale=self.scale
            )
        context = context.permute(2, 0, 1, 3).reshape(seq, batch, self.heads * self.head_dim)
        return self.dense(context)

    @torch.compiler.disable  # dropout's masks are hashed in Python
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
