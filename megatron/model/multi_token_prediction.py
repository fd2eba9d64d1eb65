"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): layers that predict later tokens.

The main model predicts the token t[i+1] from the tokens up to t[i]. Layer k of --mtp-num-layers predicts
t[i+k+1]:

    x      = eh_proj([enorm(Emb(t[i+k])); hnorm(h[k-1])])       [.., 2 hidden] -> [.., hidden]
    h[k]   = final_layernorm(transformer_layer(x))              h[0]: the head's input of the main model
    loss   = scaling factor / layers x sum over k of CrossEntropy(head(h[k]), t[i+k+1])

Embedding and head belong to the main model. As in Megatron-LM and transformers, h[0] and each h[k] that the
next layer reads are outputs of a final norm. eh_proj has no bias. The inner transformer layer has the kind of
the main model's last one.

The layers stand at the end of the layer list, on the last stage. `GPTModelPipe.loss` runs them in training.
They take their tokens from the labels: t[i+k] is labels[i+k-1]. The loss mask is shifted together with the
labels, and the last k positions, which have no label at layer k, do not count. As in the main model,
attention is limited to documents and rotary positions restart (--reset-attention-mask, --reset-position-ids).
As in Megatron-LM with these flags, the label of a document's last positions is a token of the next document.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.layer_context import LayerContext, LayerIO, join_layer_io, split_layer_io
from megatron.model.layer_kinds import LayerDescription, Role
from megatron.model.norm import new_norm
from megatron.model.residual import ResidualAddition
from megatron.mpu.context_parallel import shard_sequence
from megatron.mpu.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.mpu.mappings import gather_from_tensor_region, scatter_to_sequence_region
from megatron.mpu.parameters import mark_sequence_parallel_grads


class MultiTokenPredictionPipe(nn.Module):
    """One layer of multi-token prediction. It maps the head's input of the layer before it
    [batch, seq / CP, hidden] (with document ids if the transformer layer needs them) to its own input of the
    head."""

    def __init__(
        self,
        context: LayerContext,
        layer_index: int,
        transformer_layer: Callable[[LayerContext, int], nn.Module],
    ) -> None:
        """layer_index: the layer's index in the layer list. transformer_layer: the class of transformer
        layers."""
        super().__init__()
        config, model = context.config, context.config.model
        of_layer = context.of_layer(layer_index)
        self.enorm, self.hnorm = new_norm(config), new_norm(config)
        self.eh_proj = ColumnParallelLinear(
            2 * model.hidden_size,
            model.hidden_size,
            context.tp_group,
            init_std=model.matrix_init_std,
            lr_mult=model.matrix_lr_mult,
            bias=False,
            sequence_parallel=context.sequence_parallel,
            deferred=context.deferred,
            overlap_chunks=config.parallel.overlap_chunks,
            fp8=of_layer.fp8,
        )
        self.transformer_layer = transformer_layer(context, layer_index)
        self.final_layernorm = new_norm(config)
        self.tp_group, self.cp_group = context.tp_group, context.cp_group
        self.sequence_parallel = context.sequence_parallel
        self.multiplier = context.embedding_multiplier
        self.fp32_residual = config.precision.fp32_residual_connection
        self.dropout = ResidualAddition(context, f"{layer_index}.embedding.dropout")
        if context.sequence_parallel:
            mark_sequence_parallel_grads(self.enorm)
            mark_sequence_parallel_grads(self.hnorm)

    def forward(self, layer_io: LayerIO, tokens: Tensor, embedding: VocabParallelEmbedding) -> Tensor:
        """Returns the normalized output of this prediction layer, [batch, seq, hidden], the input of the LM
        head. tokens: int64 [batch, seq]; tokens[:, i] is the token whose embedding is read at position i."""
        hidden, document_ids = split_layer_io(layer_io)
        hidden = hidden.transpose(0, 1).contiguous()
        vectors = embedding(shard_sequence(tokens, self.cp_group))
        if self.sequence_parallel:
            hidden = scatter_to_sequence_region(hidden, self.tp_group)
        else:
            vectors = vectors.transpose(0, 1).contiguous()
        if self.multiplier != 1.0:
            vectors = vectors * self.multiplier
        vectors = self.dropout(vectors, None, None)
        x = self.eh_proj(torch.cat((self.enorm(vectors), self.hnorm(hidden)), dim=-1))
        x = gather_from_tensor_region(x, self.tp_group)
        if self.sequence_parallel:
            x = scatter_to_sequence_region(x, self.tp_group)
        x, _ = split_layer_io(
            self.transformer_layer(join_layer_io(x.float() if self.fp32_residual else x, document_ids))
        )
        if self.sequence_parallel:
            x = gather_from_tensor_region(x, self.tp_group, dim=0)
        return self.final_layernorm(x.transpose(0, 1).contiguous())

    @classmethod
    def describe(cls, *_: Any) -> LayerDescription:
        return LayerDescription(cls.__name__, Role.MULTI_TOKEN)


def shifted(values: Tensor, places: int) -> Tensor:
    """Returns values[:, i + places] at each position i of values [batch, seq]; 0 after the end."""
    return F.pad(values[:, places:], (0, min(places, values.shape[1])))
