"""Token and position embeddings, and the LM head that shares the token embedding's weight."""

import torch
from torch import Tensor, nn

from megatron.model.norm import norm_arguments, norm_class
from megatron.model.position import document_ids_of, positions_within_documents
from megatron.model.transformer import LayerContext, LayerIO
from megatron.mpu.embedding import embedding
from megatron.mpu.layers import VocabParallelEmbedding, parallel_logits
from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import ParameterSpec, new_parameter
from megatron.mpu.random import dropout


class PositionEmbedding(nn.Module):
    """Learned absolute positions: a table [max_positions, hidden], replicated over tensor-parallel ranks."""

    def __init__(self, max_positions: int, hidden_size: int, init_std: float) -> None:
        super().__init__()
        spec = ParameterSpec((max_positions, hidden_size), init_std=init_std)
        self.weight = new_parameter(spec, TPGroup())

    def forward(self, positions: Tensor, batch: int) -> Tensor:
        """positions [batch, seq], or [1, seq] for all samples -> [batch, seq, hidden]."""
        return embedding(positions, self.weight, batch)


class EmbeddingPipe(nn.Module):
    """tokens [batch, seq] int64 -> hidden [batch, seq, hidden], with document ids if the layers need them.

    The same class is the LM head on the last stage (`is_head`). It then holds the word embedding only: the
    position embedding would be a parameter without a gradient there.
    """

    def __init__(
        self,
        context: LayerContext,
        vocab_size: int,
        padded_vocab_size: int,
        eod: int | None,
        is_head: bool = False,
    ) -> None:
        """`vocab_size`: number of real tokens; the other rows of `padded_vocab_size` are padding. `eod`: the
        end-of-document token, needed by --reset-position-ids and --reset-attention-mask."""
        super().__init__()
        model = context.config.model
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size,
            model.hidden_size,
            context.tp_group,
            num_valid_rows=vocab_size,
            init_std=model.init_method_std,
        )
        self.logits_multiplier = model.logits_multiplier
        if is_head:
            return
        if model.embed_layernorm:
            self.word_embeddings.norm = norm_class(context.config)(*norm_arguments(context.config))
        self.absolute = context.positions.learned_table
        if self.absolute:
            self.position_embeddings = PositionEmbedding(
                model.max_position_embeddings, model.hidden_size, model.init_method_std
            )
        self.eod = eod
        self.reset_position_ids = context.config.data.reset_position_ids
        self.passes_document_ids = context.layers_need_document_ids
        self.fp32_residual = context.config.precision.fp32_residual_connection
        self.dropout_rate = model.hidden_dropout
        self.embed_norm = model.embed_layernorm
        self.multiplier = model.embedding_multiplier
        self.tp_group = context.tp_group
        self.dropout_rng = context.dropout_rng

    def forward(self, tokens: Tensor) -> LayerIO:
        document_ids = (
            document_ids_of(tokens, self.eod) if self.reset_position_ids or self.passes_document_ids else None
        )
        hidden = self.word_embeddings(tokens)
        if self.embed_norm:
            hidden = self.word_embeddings.norm(hidden)
        if self.absolute:
            if self.reset_position_ids:
                positions = positions_within_documents(document_ids)
            else:
                positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
            hidden = hidden + self.position_embeddings(positions, len(tokens))
        if self.multiplier != 1.0:
            hidden = hidden * self.multiplier
        if self.fp32_residual:
            hidden = hidden.float()
        if self.training and self.dropout_rate > 0:
            hidden = dropout(
                hidden,
                self.dropout_rate,
                self.dropout_rng,
                "embedding.dropout",
                batch_dim=0,
                tp_group=self.tp_group,
            )
        return (hidden, document_ids) if self.passes_document_ids else hidden

    def apply_logits_multiplier(self, hidden: Tensor) -> Tensor:
        """The head's input times the muP factor of the logits: cheaper than scaling the logits."""
        return hidden if self.logits_multiplier == 1.0 else hidden * self.logits_multiplier


def lm_head(embedding: EmbeddingPipe, hidden: Tensor) -> Tensor:
    """hidden [batch, seq, hidden] -> this rank's logits [batch, seq, padded_vocab / TP]."""
    words = embedding.word_embeddings
    return parallel_logits(embedding.apply_logits_multiplier(hidden), words.weight, words.tp_group)
