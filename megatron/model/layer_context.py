"""What the layers of a stage share (`LayerContext`), and what they pass to each other (`LayerIO`)."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from megatron.config import Config
from megatron.config.registries import POSITION_EMBEDDINGS
from megatron.model.attention.cache import KeyValueCache
from megatron.model.layer_list import (
    FIRST_TRANSFORMER_LAYER,
    PARAMETER_DTYPES,
    final_norm_of,
    layer_number,
)
from megatron.model.position import AttentionMasks, PositionScheme, RotaryEmbedding
from megatron.mpu.context_parallel import sequence_chunks, tensor_shard
from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.products import Fp8
from megatron.mpu.random import DropoutRNG, Part
from megatron.mpu.step_metrics import StepMetrics
from megatron.mpu.weight_gradient import DeferredGradients

# The type that a layer receives and returns, and that a stage sends: hidden, or (hidden, document_ids).
LayerIO = Tensor | tuple[Tensor, Tensor]
TensorSpec = tuple[tuple[int, ...], torch.dtype]
_ROTATION = ("rotary_base", "rotary_dim", "rope_scaling_type")


def split_layer_io(layer_io: LayerIO) -> tuple[Tensor, Tensor | None]:
    """Returns (hidden, document_ids) of a layer's input or output. document_ids is None if there are none."""
    return (layer_io, None) if isinstance(layer_io, Tensor) else (layer_io[0], layer_io[1])


def join_layer_io(hidden: Tensor, document_ids: Tensor | None) -> LayerIO:
    """Returns the `LayerIO` of hidden and document_ids: the inverse of `split_layer_io`."""
    return hidden if document_ids is None else (hidden, document_ids)


@dataclass(frozen=True)
class LayerContext:
    """What all layers of a stage share.

    deferred: the queue of deferred weight gradients with --pipeline-schedule zero-bubble, otherwise None.
    metrics: records values to log. fp8: the FP8 settings of the linear layers with --fp8-format; None in a
    bf16 layer. cache: stores keys and values while texts are generated.
    """

    config: Config
    mesh: Mesh
    dropout_rng: DropoutRNG
    deferred: DeferredGradients | None = None
    metrics: StepMetrics = field(default_factory=StepMetrics)
    fp8: Fp8 | None = None
    cache: KeyValueCache = field(default_factory=KeyValueCache)

    def of_layer(self, layer_index: int) -> "LayerContext":
        """Returns the context of a layer of the layer list. Its model has the settings of this layer, and its
        `fp8` is None if the layer is in bf16. All contexts share the masks and the rotary tables."""
        model = self.config.model
        layer = layer_number(layer_index, model.num_layers)
        own, fp8 = model.of_layer(layer), None if model.is_bf16_layer(layer) else self.fp8
        if own is model and fp8 is self.fp8:
            return self
        context = replace(self, config=replace(self.config, model=own), fp8=fp8)
        vars(context).update(_masks=self._masks, _rotary=self._rotary)  # cached properties
        return context

    @property
    def tp_group(self) -> Axis:
        """The group of tensor-parallel ranks."""
        return self.mesh.tp

    @property
    def cp_group(self) -> Axis:
        """The group of ranks that share each sequence. Embedding, positions, attention and dropout use it;
        all other layers compute each token independently."""
        return self.mesh.cp

    @property
    def positions(self) -> PositionScheme:
        """The components that --position-embedding-type selects."""
        return POSITION_EMBEDDINGS.load(self.config.model.position_embedding_type)

    @property
    def embedding_multiplier(self) -> float:
        """The factor of the embedding output. The factor of --scale-embeddings is rounded to the weights'
        dtype."""
        model = self.config.model
        if not model.scale_embeddings:
            return model.embedding_multiplier
        dtype = PARAMETER_DTYPES[self.config.precision.name]
        factor: float = torch.tensor(model.hidden_size**0.5, dtype=dtype, device="cpu").item()
        return model.embedding_multiplier * factor

    def masks(self, layer_index: int) -> AttentionMasks:
        """Returns the attention masks of a layer of the layer list, with ALiBi slopes for this rank's
        heads."""
        return self._masks[self._has_window(layer_index)]

    def rotary(self, layer_index: int) -> RotaryEmbedding | None:
        """Returns the rotary embedding of a layer of the layer list, or None if the layer has none."""
        has_rotary = self.config.model.has_rotary(layer_number(layer_index, self.config.model.num_layers))
        return self._rotary[self._has_window(layer_index)] if self._rotary and has_rotary else None

    def _has_window(self, layer_index: int) -> bool:
        return self.config.model.has_window(layer_number(layer_index, self.config.model.num_layers))

    @cached_property
    def _masks(self) -> dict[bool, AttentionMasks]:
        """The masks that all layers with a window share (key True), and all layers without a window
        (False)."""
        all_slopes, within_documents = self.positions.slopes, self.config.data.reset_attention_mask
        masks = {}
        for has_window, window in ((True, self.config.model.window_size), (False, None)):
            slopes, heads = None, self.config.model.of_kind(has_window).num_attention_heads
            if all_slopes is not None:
                own = heads // self.tp_group.size
                slopes = all_slopes(heads)[self.tp_group.rank * own :][:own]
            masks[has_window] = AttentionMasks(slopes, within_documents, window)
        return masks

    @cached_property
    def _rotary(self) -> dict[bool, RotaryEmbedding] | None:
        """The rotary embeddings of all layers with a window (key True) and without a window (False). Both
        keys have one object if the frequencies are equal."""
        rotary, model = self.positions.rotary, self.config.model
        if rotary is None:
            return None
        full = window = rotary(model, self.cp_group, self.cache)
        of_window = model.of_kind(has_window=True)
        if any(getattr(of_window, name) != getattr(model, name) for name in _ROTATION):
            window = rotary(of_window, self.cp_group, self.cache)
        return {True: window, False: full}

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations outside of attention and MLP are sharded along the sequence (arXiv
        2205.05198)."""
        return self.config.parallel.sequence_parallel and self.tp_group.size > 1

    def dropout_part(self, hidden: Tensor, dim: int) -> Part | None:
        """Returns which part of the full activation the tensor `hidden` is, as `mpu.random.dropout` needs it;
        None if `hidden` is the full activation. dim: the sequence dimension of `hidden`."""
        if self.cp_group.size == 1 and not self.sequence_parallel:
            return None
        tp_group = self.tp_group if self.sequence_parallel else Axis("tp")
        seq = hidden.shape[dim] * tp_group.size * self.cp_group.size
        return Part(dim, tensor_shard(sequence_chunks(self.cp_group, seq), tp_group), seq)

    @property
    def resets_rotary_positions(self) -> bool:
        """Whether rotary positions count from the start of each document."""
        return self.positions.rotary is not None and self.config.data.reset_position_ids

    @property
    def layers_need_document_ids(self) -> bool:
        """Whether the transformer layers use document ids. If so, the layers pass them in `LayerIO`."""
        return self.config.data.reset_attention_mask or self.resets_rotary_positions

    def input_specs(self, layer_index: int, batch: int, seq: int) -> list[TensorSpec]:
        """Returns the shape and dtype of each tensor that a layer receives. layer_index: the layer's index in
        `pipeline_layers`; a layer after the embedding and not after the head. batch, seq: samples and tokens
        per sample of the micro-batch."""
        config, final_norm = self.config, final_norm_of(self.config.model.num_layers)
        is_sharded = self.sequence_parallel and layer_index < final_norm
        new = seq if self.cache.positions is None else self.cache.positions.shape[1]
        own_seq = new // self.cp_group.size // (self.tp_group.size if is_sharded else 1)
        seq_first = is_sharded or FIRST_TRANSFORMER_LAYER <= layer_index < final_norm
        shape = (own_seq, batch) if seq_first else (batch, own_seq)
        # With --apply-residual-connection-post-layernorm the residual is the norm's output, in the
        # parameters' dtype.
        only_first = config.model.apply_residual_connection_post_layernorm
        last_fp32 = FIRST_TRANSFORMER_LAYER if only_first else final_norm
        fp32 = config.precision.fp32_residual_connection and layer_index <= last_fp32
        dtype = torch.float32 if fp32 else PARAMETER_DTYPES[config.precision.name]
        hidden = (*shape, config.model.hidden_size), dtype
        has_ids = self.layers_need_document_ids and layer_index < final_norm
        return [hidden, ((batch, seq), torch.int64)] if has_ids else [hidden]
