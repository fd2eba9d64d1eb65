"""The GPT model as an ordered list of layers, and one pipeline stage of this list as a DeepSpeed module.

The list, with L transformer layers, from token ids to logits (b = batch, s = sequence, h = hidden, V = padded
vocabulary, TP = tensor-parallel degree):

    index        layer                                                  output
    0            _to_float16 (function)                                 [b, s]      token ids
    1            EmbeddingPipe, tied under the key 'embed'              [b, s, h]
    2            to_sequence_first (function)                           [s, b, h]   or [s / TP, b, h]
    3 .. L+2     ParallelTransformerLayerPipe                           [s, b, h]   or [s / TP, b, h]
    L+3          to_batch_first (function)                              [b, s, h]
    L+4          MixedFusedLayerNorm, the final norm                    [b, s, h]
    L+5          EmbeddingPipe, tied again: the LM head                 [b, s, V / TP]
    L+6          float16_to_fp32 (function), with fp16 and bf16         [b, s, V / TP]
    loss         CrossEntropy                                           scalar

The second shape is that of --sequence-parallel. If layers need document boundaries, layers 1 to L+2 pass a
pair (hidden, document_ids) instead of hidden: see `transformer.LayerIO`.

The list and its indices are fixed: checkpoints name parameters by a layer's index (BLOOM's public checkpoints
use the same indices). A pipeline stage holds a contiguous part of the list.

With --loss-implementation fused, training computes head and loss in one function, which never stores the full
logits. Evaluation that returns logits, and generation, run the list as shown.

To read the model: `pipeline_layers` below, then transformer.py, attention.py, mlp.py, embedding.py. The
package's docstring (model/__init__.py) has the overview.
"""

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from torch import Tensor, nn

from megatron.config import Config
from megatron.config.vocab import padded_vocab_size
from megatron.model.embedding import EmbeddingPipe, lm_head
from megatron.model.norm import norm_arguments, norm_class
from megatron.model.recompute import ActivationCheckpointing
from megatron.model.transformer import LayerContext, LayerIO, ParallelTransformerLayerPipe, split_layer_io
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from megatron.mpu.layout import ParallelLayout, TPGroup
from megatron.mpu.mappings import gather_from_tensor_region, scatter_to_tensor_region
from megatron.mpu.parameters import initialize_parameters, spec_of
from megatron.mpu.random import DropoutRNG
from megatron.mpu.vector_math import initialize_vector_math
from megatron.pipeline.methods import embedding_and_head

FIRST_TRANSFORMER_LAYER = 3
TIED_EMBEDDING = "embed"

PARAMETER_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _to_float16(tokens: Tensor) -> Tensor:
    """Layer 0: the identity, since token ids stay integers. It keeps the indices of all other layers."""
    return tokens


def _to_sequence_first(context: LayerContext) -> Callable[[LayerIO], LayerIO]:
    def to_sequence_first(layer_io: LayerIO) -> LayerIO:
        """[batch, seq, hidden] -> [seq, batch, hidden], or with --sequence-parallel this rank's shard
        [seq / TP, batch, hidden]."""
        hidden, document_ids = split_layer_io(layer_io)
        hidden = hidden.transpose(0, 1)
        if context.sequence_parallel:
            hidden = scatter_to_tensor_region(hidden, context.tp_group, dim=0)
        hidden = hidden.contiguous()
        return hidden if document_ids is None else (hidden, document_ids)

    return to_sequence_first


def _to_batch_first(context: LayerContext) -> Callable[[LayerIO], Tensor]:
    def to_batch_first(layer_io: LayerIO) -> Tensor:
        """[seq, batch, hidden] -> [batch, seq, hidden]; drops the document_ids."""
        hidden, _ = split_layer_io(layer_io)
        if context.sequence_parallel:
            hidden = gather_from_tensor_region(hidden, context.tp_group, dim=0)
        return hidden.transpose(0, 1).contiguous()

    return to_batch_first


def float16_to_fp32(logits: Tensor) -> Tensor:
    """Casts the logits: the loss is computed in fp32."""
    return logits.float()


class CrossEntropy:
    """Loss of a micro-batch: mean over samples of each sample's mean over its unmasked tokens.

    The mean per sample comes first. So the loss of a global batch does not depend on how the batch is divided
    into micro-batches and data-parallel ranks, even if `--eod-mask-loss` masks unequal numbers of tokens.
    `z_loss_weight` applies to `from_hidden` in training, see `vocab_parallel_linear_cross_entropy`.
    """

    def __init__(self, tp_group: TPGroup, vocab_size: int, z_loss_weight: float = 0.0) -> None:
        self.tp_group = tp_group
        self.vocab_size = vocab_size
        self.z_loss_weight = z_loss_weight

    def __call__(self, logits: Tensor, labels_and_mask: tuple[Tensor, Tensor]) -> Tensor:
        """logits [batch, seq, padded_vocab / TP], labels [batch, seq], mask [batch, seq] -> scalar fp32."""
        labels, mask = labels_and_mask
        # In training nothing reads the logits again: their memory is reused for the probabilities.
        losses = vocab_parallel_cross_entropy(
            logits, labels, self.tp_group, self.vocab_size, overwrite_logits=torch.is_grad_enabled()
        )
        return ((losses * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)).mean()

    def from_hidden(self, hidden: Tensor, weight: Tensor, labels_and_mask: tuple[Tensor, Tensor]) -> Tensor:
        """The same loss from the head's input [batch, seq, hidden] and weight [padded_vocab / TP, hidden].

        If the weight has a `main_grad` (the run's optimizer sets it), the gradient is added to it in fp32.
        """
        labels, mask = labels_and_mask
        # The mean is written as a weighted sum: the gradients computed in the forward pass are then final.
        token_weights = mask / (mask.sum(dim=1, keepdim=True).clamp(min=1.0) * len(mask))
        return vocab_parallel_linear_cross_entropy(
            hidden,
            weight,
            labels,
            self.tp_group,
            self.vocab_size,
            token_weights=token_weights,
            z_loss_weight=self.z_loss_weight if torch.is_grad_enabled() else 0.0,
            main_grad=getattr(weight, "main_grad", None),
        ).sum()


def pipeline_layers(context: LayerContext, vocab_size: int, eod: int | None) -> list[LayerSpec | Callable]:
    """The list of layers of this module's docstring, for this rank of the tensor-parallel group."""
    initialize_vector_math()  # training and tools both build the model here, before they compute anything
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
        TiedLayerSpec(TIED_EMBEDDING, EmbeddingPipe, *embedding, is_head=True, forward_fn=lm_head, **tied),
    ]
    if config.precision.name != "fp32":
        layers.append(float16_to_fp32)
    return layers


def layer_names(layers: Sequence[LayerSpec | Callable]) -> list[str]:
    """Class or function name per layer: what `--partition-method type:REGEX` matches."""
    return [layer.typename.__name__ if isinstance(layer, LayerSpec) else layer.__name__ for layer in layers]


def layer_parameter_counts(layers: Sequence[LayerSpec | Callable], unsharded: bool = False) -> list[int]:
    """Parameters per layer, of one tensor-parallel rank or (`whole`) of the whole model.

    Transformer layers are identical, so each distinct class is built once, on the meta device without memory.
    """
    counts: dict[tuple, int] = {}

    def count(layer: LayerSpec | Callable) -> int:
        if not isinstance(layer, LayerSpec):
            return 0
        key = (layer.typename, layer.module_kwargs.get("is_head", False))
        if key not in counts:
            with torch.device("meta"):
                parameters = layer.build().parameters()
            counts[key] = sum(prod(spec_of(p).global_shape) if unsharded else p.numel() for p in parameters)
        return counts[key]

    return [count(layer) for layer in layers]


class GPTModelPipe(PipelineModule):
    """This rank's pipeline stage of the model.

    Stage s holds layers bounds[s] to bounds[s + 1] - 1; see `megatron.pipeline.partition`. Parameters are
    initialized from (seed, name) only, so every layout starts from the same weights. They are then cast to
    the run's precision.
    """

    def __init__(
        self,
        config: Config,
        layout: ParallelLayout,
        tp_group: TPGroup,
        vocab_size: int,
        eod: int | None,
        bounds: Sequence[int],
        initialize: Callable[[nn.Module, int, TPGroup], None] = initialize_parameters,
    ) -> None:
        """`initialize`: fills the parameters; another function is given only where they have no values."""
        self.config = config
        self.stage_bounds = list(bounds)
        self.cross_entropy = CrossEntropy(tp_group, vocab_size, config.training.z_loss_weight)
        self._head_is_fused = False
        self.dropout_rng = DropoutRNG(config.training.seed)
        context = LayerContext(config, tp_group, self.dropout_rng)
        training = config.training
        self.layers_per_checkpoint = training.checkpoint_num_layers if training.recomputes_layers else 0
        layers = pipeline_layers(context, vocab_size, eod)
        self._check_head(layers)
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its stage map here
            super().__init__(layers=layers, topology=layout.topology, loss_fn=self.loss)
        self.activation_checkpointing = ActivationCheckpointing(training, tp_group, self.dropout_rng)
        initialize(self, training.seed, tp_group)
        self.to(PARAMETER_DTYPES[config.precision.name])
        if training.compile:
            for layer in self.modules():
                if isinstance(layer, ParallelTransformerLayerPipe):
                    layer.compile(dynamic=False)  # in place: its parameters keep their names

    def transformer_layers(self) -> dict[str, nn.Module]:
        """This rank's transformer layers by layer index, the first part of their parameters' names."""
        layers = self.forward_funcs
        return {str(f.layer_index): f for f in layers if isinstance(f, ParallelTransformerLayerPipe)}

    def stages_record(self) -> dict[str, Any]:
        """Which layers each stage holds; saved in the checkpoint."""
        parallel = self.config.parallel
        return {
            "partition_method": parallel.partition_method,
            "pipeline_schedule": parallel.pipeline_schedule,
            "bounds": self.stage_bounds,
        }

    def _check_head(self, layers: Sequence[LayerSpec | Callable]) -> None:
        """ValueError if the last stage does not hold the head. --partition-method never makes such bounds."""
        _, head = embedding_and_head(layer_names(layers))
        if self.stage_bounds[-2] > head:
            raise ValueError(
                f"the last stage begins with layer {self.stage_bounds[-2]}, after the head (layer {head}): "
                "expected it to hold the head, since logits are not sent between stages"
            )

    @contextlib.contextmanager
    def fused_head_loss(self) -> Iterator[None]:
        """Within this context only `loss` may use the outputs of `forward`. With --loss-implementation fused
        `forward` then returns the head's input instead of logits, and `loss` computes the head."""
        self._head_is_fused = self.config.training.loss_implementation == "fused"
        try:
            yield
        finally:
            self._head_is_fused = False

    def loss(self, outputs: Tensor, labels_and_mask: tuple[Tensor, Tensor]) -> Tensor:
        """Scalar fp32 loss from the output of `forward` on the last stage."""
        if not self._head_is_fused:
            return self.cross_entropy(outputs, labels_and_mask)
        embedding = self.tied_modules[TIED_EMBEDDING]
        hidden, weight = embedding.apply_logits_multiplier(outputs), embedding.word_embeddings.weight
        return self.cross_entropy.from_hidden(hidden, weight, labels_and_mask)

    def functions_before_loss(self) -> list[Callable]:
        """This stage's layers, without those that `loss` computes."""
        functions = list(self.forward_funcs)
        if self._head_is_fused:
            for position, function in enumerate(functions):
                if getattr(function, "func", None) is lm_head:
                    return functions[:position]
        return functions

    def _partition_layers(self, method: str = "uniform") -> None:
        """Overrides DeepSpeed's partitioning with the bounds given to the constructor."""
        self.parts = self.stage_bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def _synchronize_tied_weights(self) -> None:
        # DeepSpeed broadcasts the parameters with autograd enabled, which would record the broadcast.
        with torch.no_grad():
            super()._synchronize_tied_weights()

    def forward(self, inputs: LayerIO) -> LayerIO:
        """Runs this stage's layers. The last stage returns logits (with `fused_head_loss` the head's input).

        With --checkpoint-activations, groups of --checkpoint-num-layers transformer layers are recomputed.
        Overrides DeepSpeed's `forward`, which counts its groups from the stage's first function, and does not
        recompute a group that holds anything other than transformer layers.
        """
        functions = self.functions_before_loss()
        position = 0
        while position < len(functions):
            end = self._end_of_checkpointed_layers(position)
            if end > position:
                inputs = self.activation_checkpointing.run(_chain(functions[position:end]), inputs)
            else:
                end = position + 1
                inputs = functions[position](inputs)
            position = end
        return inputs

    def _end_of_checkpointed_layers(self, start: int) -> int:
        """End of the group of layers from `start` that is recomputed together; `start` if there is none."""
        end = start
        while (
            end - start < self.layers_per_checkpoint
            and end < len(self.forward_funcs)
            and isinstance(self.forward_funcs[end], ParallelTransformerLayerPipe)
        ):
            end += 1
        return end


class GPTModelDualPipeV(DualPipeVModule, GPTModelPipe):
    """This rank's two stages for `--pipeline-schedule dualpipev` (DualPipeV, from DeepSeek-V3, arXiv
    2412.19437).

    Rank r holds stages r and 2 * ranks - 1 - r of `bounds`. So rank 0 holds both the embedding and the head,
    and they are one module.
    """


def _chain(layers: Sequence[nn.Module]) -> Callable[[LayerIO], LayerIO]:
    def run(layer_io: LayerIO) -> LayerIO:
        for layer in layers:
            layer_io = layer(layer_io)
        return layer_io

    return run
