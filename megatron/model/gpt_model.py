"""The GPT model, from token ids to logits. This file has the whole model; read it from top to bottom.

Shapes: b = batch, s = sequence, h = hidden, n = heads, g = groups of heads that share keys and values (g = n
without --group-query-attention), d = head dimension (kv_channels), V = padded vocabulary, L = transformer
layers. `pipeline_layers` is the model as an ordered list of layers:

    index        layer                                                  output
    0            _to_float16 (function)                                 [b, s]      token ids
    1            EmbeddingPipe: word and position embeddings, dropout   [b, s, h]
    2            to_sequence_first (function)                           [s, b, h]
    3 .. L+2     ParallelTransformerLayerPipe                           [s, b, h]
                     x = x + dropout(attention(norm(x)))                ParallelSelfAttention
                     x = x + dropout(mlp(norm(x)))                      ParallelMLP
                     or a different arrangement from residual.py (--layer-arrangement);
                     with --num-experts, mlp is an ExpertMLP (experts.py)
    L+3          to_batch_first (function)                              [b, s, h]
    L+4          MixedFusedLayerNorm or RMSNorm, the final norm         [b, s, h]
    L+5          EmbeddingPipe again, as LM head: x @ word weight.T     [b, s, V]
                 or LMHeadPipe, the untied head
    L+6          float16_to_fp32 (function), with fp16 and bf16         [b, s, V]
    L+7 ..       MultiTokenPredictionPipe, with --mtp-num-layers        see multi_token_prediction.py
    loss         CrossEntropy (loss.py)                                 scalar

The list and its indices are fixed: checkpoints name parameters by their layer's index, as BLOOM's public
checkpoints do. Layers 1 and L+5 share the word embedding, under the key 'embed', unless
--untie-embeddings-and-output-weights is given. If layers need document boundaries, layers 1 to L+2 pass a
pair (hidden, document_ids) instead of hidden: see `LayerIO`.

You can skip parallelism on a first reading. On one process `ColumnParallelLinear` and `RowParallelLinear` are
`nn.Linear`, `VocabParallelEmbedding` is `nn.Embedding`, and scatter and gather are the identity.

What tensor parallelism changes (TP > 1; Megatron-LM, arXiv 1909.08053, section 3): each rank computes n / TP
whole heads with the keys and values of their g / TP groups (of a part of one group if g < TP), 4h / TP
columns of the MLP, V / TP rows of the word embedding and V / TP columns of the logits. The outputs of the
second matrix product of attention and MLP are summed over the ranks. Hidden states are replicated, or sharded
with --sequence-parallel: [s / TP, b, h] from layer 1 to L+2 (arXiv 2205.05198). The layers of
`megatron.mpu.layers` do this behind the interface of `nn.Linear`. With context parallelism (CP > 1) s is s /
CP except in token ids, labels and document ids: the embedding selects this rank's tokens; attention
all-gathers keys and values (`megatron.mpu.context_parallel`).

Further files: attention/, experts.py, position.py, norm.py, activations.py, residual.py, loss.py,
layer_context.py. pipeline_module.py runs a rank's part of the list, inference/single_process.py all of it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from megatron.config.model import padded_vocab_size
from megatron.config.registries import LAYER_ARRANGEMENTS, QK_NORMS
from megatron.model.activations import gated, linear_and_activation, mlp_activation, soft_capped
from megatron.model.attention.core_attention import CoreAttention
from megatron.model.attention.latent import LatentSelfAttention
from megatron.model.attention.qk_clip import LogitWeight, fused_weight
from megatron.model.attention.qk_norm import head_norm_vectors
from megatron.model.experts import ExpertMLP
from megatron.model.layer_context import LayerContext, LayerIO, join_layer_io, split_layer_io
from megatron.model.layer_kinds import LayerDescription, Role, layer_kind
from megatron.model.layer_list import (
    FIRST_TRANSFORMER_LAYER,
    TIED_EMBEDDING,
    first_mtp_layer_of,
    layer_number,
)
from megatron.model.multi_token_prediction import MultiTokenPredictionPipe
from megatron.model.norm import new_norm, norm_arguments, norm_class
from megatron.model.position import document_ids_of, positions_within_documents
from megatron.model.residual import ResidualAddition
from megatron.mpu.context_parallel import shard_sequence
from megatron.mpu.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    parallel_logits,
)
from megatron.mpu.mappings import gather_from_rank_block, gather_from_tensor_region
from megatron.mpu.parameters import mark_sequence_parallel_grads
from megatron.mpu.recompute import recomputed
from megatron.mpu.vector_math import initialize_vector_math


def pipeline_layers(context: LayerContext, vocab_size: int, eod: int | None) -> list[LayerSpec | Callable]:
    """Returns the layer list of this module's docstring, for this rank of the tensor-parallel group."""
    initialize_vector_math()  # training and tools build the model here before they compute anything
    config = context.config
    model = config.model
    padded = padded_vocab_size(vocab_size, model, context.tp_group.size)
    embedding = (context, vocab_size, padded, eod)
    tied = {"tied_weight_attr": "word_embeddings.weight"}
    layers: list[LayerSpec | Callable] = [
        _to_float16,
        TiedLayerSpec(TIED_EMBEDDING, EmbeddingPipe, *embedding, **tied),
        _to_sequence_first(context),
    ]
    for index in range(FIRST_TRANSFORMER_LAYER, FIRST_TRANSFORMER_LAYER + model.num_layers):
        layers.append(LayerSpec(ParallelTransformerLayerPipe, context, index))
    layers += [
        _to_batch_first(context),
        LayerSpec(norm_class(config), *norm_arguments(config)),
        LayerSpec(LMHeadPipe, context, vocab_size, padded)
        if model.untie_embeddings_and_output_weights
        else TiedLayerSpec(
            TIED_EMBEDDING, EmbeddingPipe, *embedding, is_head=True, forward_fn=lm_head, **tied
        ),
    ]
    if config.precision.name != "fp32" or model.mtp_num_layers:  # fixed indices for MTP layers
        layers.append(float16_to_fp32)
    first = first_mtp_layer_of(model.num_layers)
    for index in range(first, first + (model.mtp_num_layers or 0)):
        layers.append(LayerSpec(MultiTokenPredictionPipe, context, index, ParallelTransformerLayerPipe))
    if model.mtp_num_layers and model.untie_embeddings_and_output_weights:
        copy = {"is_head": True, "forward_fn": lm_head, **tied}
        layers.append(TiedLayerSpec(TIED_EMBEDDING, EmbeddingCopyPipe, *embedding, **copy))
    return layers


def _to_float16(tokens: LayerIO) -> LayerIO:
    """Returns the token ids unchanged. Layer 0 exists only so that the other layers keep their indices."""
    return tokens


class EmbeddingPipe(nn.Module):
    """Embeds tokens, int64 [batch, seq]. Returns hidden [batch, seq, hidden], or with --sequence-parallel
    this rank's shard [seq / TP, batch, hidden]; and document ids if layers need them.

    The same class is the LM head on the last stage (`is_head`). The head holds only the word embedding, since
    a position embedding would be a parameter without a gradient.
    """

    def __init__(
        self,
        context: LayerContext,
        vocab_size: int,
        padded_vocab_size: int,
        eod: int | None,
        is_head: bool = False,
    ) -> None:
        """vocab_size: number of real tokens; the other rows of `padded_vocab_size` are padding. eod: the
        end-of-document token, needed by --reset-position-ids and --reset-attention-mask."""
        super().__init__()
        model = context.config.model
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size,
            model.hidden_size,
            context.tp_group,
            num_valid_rows=vocab_size,
            init_std=model.init_method_std,
            sequence_parallel=context.sequence_parallel,
        )
        self.tp_group, self.cp_group, self.cache = context.tp_group, context.cp_group, context.cache
        self.logits_multiplier, self.softcapping = model.logits_multiplier, model.final_logit_softcapping
        if is_head:
            return
        if model.embed_layernorm:
            self.word_embeddings.norm = new_norm(context.config)
        table = context.positions.table
        self.position_embeddings: Any = None if table is None else table(model)
        self.eod = eod
        self.reset_position_ids = context.config.data.reset_position_ids
        self.passes_document_ids = context.layers_need_document_ids
        self.fp32_residual = context.config.precision.fp32_residual_connection
        self.embed_norm = model.embed_layernorm
        self.multiplier = context.embedding_multiplier
        self.sequence_parallel = context.sequence_parallel
        self.dropout = ResidualAddition(context, "embedding.dropout", batch_dim=int(self.sequence_parallel))
        if self.sequence_parallel:
            mark_sequence_parallel_grads(self)

    def forward(self, inputs: LayerIO) -> LayerIO:
        """Returns the embedded tokens, after dropout. inputs: tokens [batch, seq], or (tokens, document_ids)
        if the document boundaries do not follow from `eod`."""
        tokens, document_ids = split_layer_io(inputs)
        if document_ids is None and (self.reset_position_ids or self.passes_document_ids):
            document_ids = document_ids_of(tokens, self.eod)
        hidden = self.word_embeddings(shard_sequence(self.cache.new_tokens(tokens), self.cp_group))
        if self.embed_norm:
            hidden = self.word_embeddings.norm(hidden)
        if self.position_embeddings is not None:
            if self.reset_position_ids:
                positions = positions_within_documents(document_ids)
            else:
                positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
            hidden = hidden + self._position_vectors(positions, len(tokens)).to(hidden.dtype)
        if self.multiplier != 1.0:
            hidden = hidden * self.multiplier
        if self.fp32_residual:
            hidden = hidden.float()
        hidden = self.dropout(hidden, None, None)
        return join_layer_io(hidden, document_ids if self.passes_document_ids else None)

    def _position_vectors(self, positions: Tensor, batch: int) -> Tensor:
        positions = shard_sequence(self.cache.new_tokens(positions), self.cp_group)
        if not self.sequence_parallel:
            return self.position_embeddings(positions, batch)
        own = positions.chunk(self.tp_group.size, dim=1)[self.tp_group.rank]
        return self.position_embeddings(own, batch).transpose(0, 1)

    @property
    def head_weight(self) -> Tensor:
        """The weight of the LM head, this rank's rows."""
        return self.word_embeddings.weight

    @classmethod
    def describe(cls, *_: Any, is_head: bool = False) -> LayerDescription:
        return LayerDescription(cls.__name__, Role.HEAD if is_head else Role.EMBEDDING, is_tied=is_head)


class EmbeddingCopyPipe(EmbeddingPipe):
    """The word embedding on the last stage, for multi-token prediction with an untied head."""

    @classmethod
    def describe(cls, *_: Any, **__: Any) -> LayerDescription:
        return LayerDescription(cls.__name__, Role.EMBEDDING, is_tied=True)


def _to_sequence_first(context: LayerContext) -> Callable[[LayerIO], LayerIO]:
    def to_sequence_first(layer_io: LayerIO) -> LayerIO:
        """Transposes [batch, seq, hidden] to [seq, batch, hidden]; a no-op with --sequence-parallel."""
        if context.sequence_parallel:
            return layer_io
        hidden, document_ids = split_layer_io(layer_io)
        return join_layer_io(hidden.transpose(0, 1).contiguous(), document_ids)

    return to_sequence_first


def _to_batch_first(context: LayerContext) -> Callable[[LayerIO], Tensor]:
    def to_batch_first(layer_io: LayerIO) -> Tensor:
        """Transposes [seq, batch, hidden] to [batch, seq, hidden], and removes the document ids."""
        hidden, _ = split_layer_io(layer_io)
        if context.sequence_parallel:
            hidden = gather_from_tensor_region(hidden, context.tp_group, dim=0)
        elif hidden.requires_grad:
            hidden.register_hook(Tensor.contiguous)  # copies once, so that no earlier layer must copy
        return hidden.transpose(0, 1).contiguous()

    return to_batch_first


class ParallelTransformerLayerPipe(nn.Module):
    """A transformer layer. It maps hidden [seq, batch, hidden] to [seq, batch, hidden].

    With --sequence-parallel hidden is this rank's shard [seq / TP, batch, hidden]. document_ids, if any, are
    returned unchanged. The functions of residual.py arrange norms, attention and MLP.
    """

    def __init__(self, context: LayerContext, layer_index: int) -> None:
        """layer_index: this layer's index in `pipeline_layers`. It is also part of its dropout's salt."""
        super().__init__()
        context = context.of_layer(layer_index)
        model = context.config.model
        self.arrange = LAYER_ARRANGEMENTS.load(model.layer_arrangement)

        def norm(name: str) -> nn.Module:
            if name not in LAYER_ARRANGEMENTS[model.layer_arrangement].norms:
                return nn.Identity()
            return new_norm(context.config)

        self.input_layernorm = norm("input_layernorm")
        self.self_attention = new_attention(context, layer_index)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_mlp_layernorm = norm("pre_mlp_layernorm")
        self.mlp = new_mlp(context, layer_index)
        self.post_mlp_layernorm = norm("post_mlp_layernorm")
        self.metrics = context.metrics  # one line records a metric of the layer (CONTRIBUTING.md)
        self.recomputes_norms = context.config.training.recomputes("layernorm")
        self.residual_after_norm = model.apply_residual_connection_post_layernorm
        self.additions: Any = nn.ModuleDict()
        for block in ("self_attention", "mlp"):
            self.additions[block] = ResidualAddition(context, f"{layer_index}.{block}.hidden_dropout")
        if context.sequence_parallel:
            mark_sequence_parallel_grads(self)

    def forward(self, layer_io: LayerIO) -> LayerIO:
        hidden, document_ids = split_layer_io(layer_io)
        return join_layer_io(self.arrange(self, hidden, document_ids), document_ids)

    def dropout_add(self, output: Tensor, residual: Tensor, block: str) -> Tensor:
        """Returns residual + dropout(output + the block's skipped bias). block: 'self_attention' or 'mlp'."""
        return self.additions[block](output, residual, getattr(self, block).skipped_bias)

    def add_and_norm(
        self, output: Tensor, residual: Tensor, block: str, norm: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """Returns the sum that `dropout_add` returns, and its norm."""
        return self.additions[block].and_norm(norm, output, residual, getattr(self, block).skipped_bias)

    def recomputed(self, norm: nn.Module, x: Tensor, normed: Tensor) -> AbstractContextManager[None]:
        """Returns a context that recomputes normed = norm(x), with --recompute-modules layernorm."""
        return recomputed(norm, x, normed, self.recomputes_norms)

    def before_compiled(self, layer_io: LayerIO) -> None:
        """Fetches the keys of the layer's dropout masks before a compiled forward pass."""
        hidden, _ = split_layer_io(layer_io)
        for addition in self.additions.values():
            addition.fetch_keys(hidden)

    @classmethod
    def describe(cls, context: LayerContext, layer_index: int) -> LayerDescription:
        kind = layer_kind(context.config.model, layer_index - FIRST_TRANSFORMER_LAYER)
        return LayerDescription(cls.__name__, Role.TRANSFORMER, kind)


def new_attention(context: LayerContext, layer_index: int) -> "ParallelSelfAttention | LatentSelfAttention":
    """Returns the attention of a transformer layer."""
    if context.config.model.multi_latent_attention:
        return LatentSelfAttention(context, layer_index, *_linear_layer_settings(context))
    return ParallelSelfAttention(context, layer_index)


class ParallelSelfAttention(nn.Module):
    """Causal self-attention. It maps [seq, batch, hidden] to [seq, batch, hidden].

    The rows of the fused projection are ordered (groups, heads per group + 2, head_dim): for each group its
    query heads, one key head, one value head. With one head per group this is (heads, 3, head_dim). A
    contiguous slice of rows is a set of whole groups, so one full weight serves every tensor-parallel degree.
    With --attention-output-gate, gates follow the group's query heads as in Megatron-Core: see `group_rows`.

    With fewer groups than ranks, each block of TP / groups consecutive ranks computes one group. A rank
    projects its part of the group's rows, and the block gathers the parts. Each rank keeps its own query
    heads, their gates, the key head and the value head. The backward pass sums the gradients over the block.
    No weight is replicated.
    """

    def __init__(self, context: LayerContext, layer_index: int) -> None:
        super().__init__()
        model, ranks = context.config.model, context.tp_group.size
        self.heads = model.num_attention_heads // ranks
        self.groups = max(model.query_groups // ranks, 1)
        self.ranks_per_group = max(ranks // model.query_groups, 1)
        self.tp_group = context.tp_group
        first, second = _linear_layer_settings(context)
        self.has_gate = model.attention_output_gate
        self.gate_activation = model.attention_output_gate_activation
        self.group_rows = model.group_rows
        *of_heads, key, value = self.group_rows
        self.own_rows = (*(rows // self.ranks_per_group for rows in of_heads), key, value)
        projection = {**first, "bias": model.qkv_bias, "matrix_rows": self.group_rows}
        width, _ = model.attention_matrices["query_key_value"]
        self.query_key_value = ColumnParallelLinear(model.hidden_size, width, context.tp_group, **projection)
        norms: Any = QK_NORMS.load(model.qk_layernorm_scope)(context) if model.qk_layernorm else (None, None)
        self.q_layernorm, self.k_layernorm = norms
        equal_parts = len({*of_heads}) == 1 and key == value
        self.fits_kernel = equal_parts and (not model.qk_layernorm or model.qk_layernorm_scope == "head")
        self.rotary = context.rotary(layer_index)
        self.reset_position_ids = context.resets_rotary_positions
        self.core_attention = CoreAttention(context, layer_index)
        self.dense = RowParallelLinear(model.output_width, model.hidden_size, context.tp_group, **second)

    @property
    def skipped_bias(self) -> Tensor | None:
        """The bias of the output projection that the residual addition adds: see `RowParallelLinear`."""
        return self.dense.skipped_bias

    def logit_weights(self) -> list[LogitWeight]:
        """Returns the weights of queries and keys for QK-clip: see `qk_clip`."""
        return [fused_weight(self.query_key_value.weight, self.has_gate)]

    def forward(self, hidden: Tensor, document_ids: Tensor | None) -> Tensor:
        """Returns the output [seq / CP, batch, hidden]. document_ids: [batch, seq] or None."""
        projected = self.query_key_value(hidden)
        if self.ranks_per_group > 1:
            of_group = gather_from_rank_block(projected, self.tp_group, self.ranks_per_group)
            projected = self._rows_of_own_heads(of_group)
        query, key, value, *gate = self._split(projected, document_ids)
        output = self.core_attention(query, key, value, document_ids)
        return self.dense(gated(output, gate[0], self.gate_activation) if self.has_gate else output)

    def _split(self, projected: Tensor, document_ids: Tensor | None) -> tuple[Tensor, ...]:
        """Returns query [seq, batch, heads / TP, head_dim], key and value of this rank's groups, with norms
        and rotary positions, and with --attention-output-gate the gate of each head."""
        group = self.heads // self.groups
        positions = positions_within_documents(document_ids) if self.reset_position_ids else None
        if self.rotary is not None and self.fits_kernel and self.rotary.in_kernel(projected):
            norms = head_norm_vectors(self.q_layernorm, self.k_layernorm)
            arguments = (projected, self.groups, group, positions, norms, self.has_gate)
            return self.rotary.split_and_rotate(*arguments)
        parts = projected.unflatten(2, (self.groups, -1)).split(self.own_rows, dim=3)
        counts = (*(group,) * (len(parts) - 2), 1, 1)
        heads = (part.unflatten(3, (n, -1)).flatten(2, 3) for part, n in zip(parts, counts, strict=True))
        query, *gate, key, value = heads
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if self.rotary is not None:
            query, key = self.rotary.rotate(query, key, positions)
        return query, key, value, *gate

    def _rows_of_own_heads(self, group: Tensor) -> Tensor:
        """Returns this rank's query heads, gates, key and value from a whole group's projection."""
        *of_heads, key, value = group.split(self.group_rows, dim=-1)
        own = self.tp_group.rank % self.ranks_per_group
        parts = (part.chunk(self.ranks_per_group, dim=-1)[own] for part in of_heads)
        return torch.cat((*parts, key, value), dim=-1)


def new_mlp(context: LayerContext, layer_index: int) -> "ParallelMLP | ExpertMLP":
    """Returns the MLP of a transformer layer: a dense MLP, or with --num-experts an `ExpertMLP`."""
    model = context.config.model
    if not model.has_experts(layer_number(layer_index, model.num_layers)):
        return ParallelMLP(context, model.ffn_hidden_size)
    shared, size = None, model.moe_shared_expert_intermediate_size
    if size is not None:
        shared = ParallelMLP(context, size, skip_bias_add=False)
    return ExpertMLP(context, layer_index, mlp_activation(model), shared)


class ParallelMLP(nn.Module):
    """MLP from h to 4h, activation, and back to h. It maps [seq, batch, hidden] to [seq, batch, hidden].

    In a gated MLP (GLU variants, arXiv 2002.05202) the first matrix has 2 * 4h rows: first the value, then
    the gate. The output is value * activation(gate).
    """

    def __init__(self, context: LayerContext, size: int, **settings: Any) -> None:
        """size: 4h, the inner dimension. settings: further arguments of the second linear layer."""
        super().__init__()
        model = context.config.model
        self.activation = mlp_activation(model)
        self.recomputes = context.config.training.recomputes("mlp_act")
        parts = 2 if model.glu_activation else 1
        first, second = _linear_layer_settings(context)
        self.dense_h_to_4h = ColumnParallelLinear(
            model.hidden_size, parts * size, context.tp_group, num_fused_parts=parts, **first
        )
        second = {**second, **settings}
        self.dense_4h_to_h = RowParallelLinear(size, model.hidden_size, context.tp_group, **second)

    @property
    def skipped_bias(self) -> Tensor | None:
        """The bias of the second matrix that the residual addition adds: see `RowParallelLinear`."""
        return self.dense_4h_to_h.skipped_bias

    def forward(self, hidden: Tensor) -> Tensor:
        wide, activated = linear_and_activation(self.dense_h_to_4h, self.activation, hidden)
        with recomputed(self.activation, wide, activated, self.recomputes):
            return self.dense_4h_to_h(activated)


def _linear_layer_settings(context: LayerContext) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the keyword arguments of the column-parallel layers, and of the row-parallel layers."""
    model = context.config.model
    both = {
        "lr_mult": model.matrix_lr_mult,
        "bias": not model.disable_bias_linear,
        "sequence_parallel": context.sequence_parallel,
        "deferred": context.deferred,
        "overlap_chunks": context.config.parallel.overlap_chunks,
        "fp8": context.fp8,
    }
    skips = {"skip_bias_add": not LAYER_ARRANGEMENTS[model.layer_arrangement].ends_with_norm}
    return {"init_std": model.matrix_init_std, **both}, {"init_std": model.output_init_std, **skips, **both}


class LMHeadPipe(nn.Module):
    """The untied LM head. It maps hidden [batch, seq, hidden] to logits [batch, seq, padded_vocab / TP]."""

    def __init__(self, context: LayerContext, vocab_size: int, padded_vocab_size: int) -> None:
        """vocab_size: number of real tokens. padded_vocab_size: rows of the weight over all TP ranks."""
        super().__init__()
        model = context.config.model
        self.lm_head = VocabParallelEmbedding(
            padded_vocab_size,
            model.hidden_size,
            context.tp_group,
            num_valid_rows=vocab_size,
            init_std=model.init_method_std,
        )
        self.tp_group = context.tp_group
        self.logits_multiplier, self.softcapping = model.logits_multiplier, model.final_logit_softcapping

    @property
    def head_weight(self) -> Tensor:
        """The weight of the LM head, this rank's rows."""
        return self.lm_head.weight

    @classmethod
    def describe(cls, *_: Any) -> LayerDescription:
        return LayerDescription(cls.__name__, Role.HEAD)

    def forward(self, hidden: Tensor) -> Tensor:
        return lm_head(self, hidden)


def lm_head(head: EmbeddingPipe | LMHeadPipe, hidden: Tensor) -> Tensor:
    """Returns this rank's logits [batch, seq, padded_vocab / TP] from hidden [batch, seq, hidden]."""
    logits = parallel_logits(head_input(head, hidden), head.head_weight, head.tp_group)
    return soft_capped(logits, head.softcapping)


def head_input(head: EmbeddingPipe | LMHeadPipe, hidden: Tensor) -> Tensor:
    """Returns the head's input times the logits' multiplier, which is cheaper than to scale the logits."""
    return hidden if head.logits_multiplier == 1.0 else hidden * head.logits_multiplier


def float16_to_fp32(logits: Tensor) -> Tensor:
    """Casts the logits to fp32, the precision of the loss."""
    return logits.float()
