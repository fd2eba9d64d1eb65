"""The transformer layer: attention and MLP, each after a norm and inside a residual connection."""

from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import torch
from torch import Tensor, nn

from megatron.config import Config
from megatron.config.registries import POSITION_EMBEDDINGS
from megatron.model.attention import ParallelSelfAttention
from megatron.model.mlp import ParallelMLP
from megatron.model.norm import norm_arguments, norm_class
from megatron.model.position import AttentionMasks, PositionScheme, RotaryEmbedding
from megatron.mpu.layout import TPGroup
from megatron.mpu.parameters import mark_sequence_parallel_grad, spec_of
from megatron.mpu.random import DropoutRNG, dropout

# What a layer receives and returns, and what a stage sends to the next: hidden, or (hidden, document_ids).
LayerIO = Tensor | tuple[Tensor, Tensor]


def split_layer_io(layer_io: LayerIO) -> tuple[Tensor, Tensor | None]:
    """(hidden, document_ids or None) of a layer's input or output."""
    return (layer_io, None) if isinstance(layer_io, Tensor) else (layer_io[0], layer_io[1])


@dataclass(frozen=True)
class LayerContext:
    """What all layers of a stage share: the configuration, the TP group and the dropout RNG."""

    config: Config
    tp_group: TPGroup
    dropout_rng: DropoutRNG

    @property
    def positions(self) -> PositionScheme:
        """The components that --position-embedding-type uses."""
        return POSITION_EMBEDDINGS.load(self.config.model.position_embedding_type)

    @cached_property
    def masks(self) -> AttentionMasks:
        """Attention biases for this rank's heads."""
        slopes, all_slopes = None, self.positions.slopes
        if all_slopes is not None:
            heads = self.config.model.num_attention_heads // self.tp_group.size
            first = self.tp_group.rank * heads
            slopes = all_slopes(self.config.model.num_attention_heads)[first : first + heads]
        return AttentionMasks(slopes, within_documents=self.config.data.reset_attention_mask)

    @cached_property
    def rotary(self) -> RotaryEmbedding | None:
        """Rotary tables, or None with other position embeddings."""
        rotary = self.positions.rotary
        return None if rotary is None else rotary(self.config.model.kv_channels)

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations outside attention and MLP are sharded along the sequence (arXiv 2205.05198)."""
        return self.config.parallel.sequence_parallel and self.tp_group.size > 1

    @property
    def resets_rotary_positions(self) -> bool:
        """Whether rotary positions count from the start of each document."""
        return self.rotary is not None and self.config.data.reset_position_ids

    @property
    def layers_need_document_ids(self) -> bool:
        """Whether the transformer layers use document ids, which are then part of `LayerIO`."""
        return self.config.data.reset_attention_mask or self.resets_rotary_positions


class ParallelTransformerLayerPipe(nn.Module):
    """Pre-norm transformer layer: hidden [seq, batch, hidden] -> [seq, batch, hidden].

    With --sequence-parallel hidden is this rank's shard [seq / TP, batch, hidden]. document_ids, if any, are
    returned unchanged.

        x = x + dropout(attention(norm(x)))
        x = x + dropout(mlp(norm(x)))

    With --apply-residual-connection-post-layernorm the residual is norm(x) instead of x.
    """

    def __init__(self, context: LayerContext, layer_index: int) -> None:
        """`layer_index`: this layer's index in `pipeline_layers`. It is also part of its dropout's salt."""
        super().__init__()
        model = context.config.model
        # As in GPT-2: the variance of the residual stream does not grow with the number of layers.
        output_init_std = model.matrix_init_std / sqrt(2.0 * model.num_layers)
        norm = norm_class(context.config)
        self.input_layernorm = norm(*norm_arguments(context.config))
        self.self_attention = ParallelSelfAttention(
            model,
            layer_index,
            context.tp_group,
            context.dropout_rng,
            context.masks,
            context.rotary,
            context.resets_rotary_positions,
            output_init_std,
            context.sequence_parallel,
            context.config.training.recomputes_attention,
        )
        self.post_attention_layernorm = norm(*norm_arguments(context.config))
        self.mlp = ParallelMLP(model, context.tp_group, output_init_std, context.sequence_parallel)
        self.residual_after_norm = model.apply_residual_connection_post_layernorm
        self.dropout_rate = model.hidden_dropout
        self.layer_index = layer_index
        self.tp_group = context.tp_group
        self.dropout_rng = context.dropout_rng
        self.sequence_parallel = context.sequence_parallel
        if self.sequence_parallel:
            for parameter in self.parameters():
                if spec_of(parameter).shard_dim is None:
                    mark_sequence_parallel_grad(parameter)

    def forward(self, layer_io: LayerIO) -> LayerIO:
        hidden, document_ids = split_layer_io(layer_io)
        normed = self.input_layernorm(hidden)
        residual = normed if self.residual_after_norm else hidden
        hidden = residual + self._dropout(self.self_attention(normed, document_ids), "self_attention")
        normed = self.post_attention_layernorm(hidden)
        residual = normed if self.residual_after_norm else hidden
        hidden = residual + self._dropout(self.mlp(normed), "mlp")
        return hidden if document_ids is None else (hidden, document_ids)

    def _dropout(self, output: Tensor, block: str) -> Tensor:
        if not self.training or self.dropout_rate == 0:
            return output
        return self._drop(output, block)

    @torch.compiler.disable  # the masks are hashed in Python from the layer's index
    def _drop(self, output: Tensor, block: str) -> Tensor:
        place = f"{self.layer_index}.{block}.hidden_dropout"
        return dropout(
            output,
            self.dropout_rate,
            self.dropout_rng,
            place,
            batch_dim=1,
            shard_dim=0 if self.sequence_parallel else None,
            tp_group=self.tp_group,
        )
