"""GPT as the ordered list of pipeline layers, and that list on DeepSpeed's pipeline.

The list is fixed, since checkpoints name parameters by a layer's index in it (BLOOM's public ones too);
L is the number of transformer layers:

    0            _to_float16 (function)
    1            EmbeddingPipe                  tied under the key 'embed'
    2            to_sequence_first (function)
    3 .. L+2     ParallelTransformerLayerPipe
    L+3          to_batch_first (function)
    L+4          MixedFusedLayerNorm
    L+5          EmbeddingPipe                  tied again: the LM head
    L+6          float16_to_fp32 (function)     with fp16 and bf16

With --loss-implementation fused the layers from the head on run as one step with the loss, which needs no
whole logits; where logits are asked for, they run as they stand here.
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
from megatron.engine.workarounds import initialize_vector_math
from megatron.model.embedding import EmbeddingPipe, lm_head
from megatron.model.norm import norm_arguments, norm_class
from megatron.model.recompute import ActivationCheckpointing
from megatron.model.transformer import LayerContext, LayerIO, ParallelTransformerLayerPipe, split_layer_io
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from megatron.mpu.layout import ParallelLayout, TPGroup
from megatron.mpu.mappings import gather_from_tensor_region, scatter_to_tensor_region
from megatron.mpu.parameters import initialize_parameters, spec_of
from megatron.mpu.random import DropoutRNG
from megatron.pipeline.methods import embedding_and_head

FIRST_TRANSFORMER_LAYER = 3
TIED_EMBEDDING = "embed"

PARAMETER_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _to_float16(tokens: Tensor) -> Tensor:
    """Layer 0. Token ids stay integers; the layer keeps its place, which numbers all others."""
    return tokens


def _to_sequence_first(context: LayerContext) -> Callable[[LayerIO], LayerIO]:
    def to_sequence_first(layer_io: LayerIO) -> LayerIO:
        """[batch, seq, hidden] -> [seq, batch, hidden], the layout of the transformer layers; with
        --sequence-parallel this rank's [seq / TP, batch, hidden]."""
        hidden, document_ids = split_layer_io(layer_io)
        hidden = hidden.transpose(0, 1)
        if context.sequence_parallel:
            hidden = scatter_to_tensor_region(hidden, context.tp_group, dim=0)
        hidden = hidden.contiguous()
        return hidden if document_ids is None else (hidden, document_ids)

    return to_sequence_first


def _to_batch_first(context: LayerContext) -> Callable[[LayerIO], Tensor]:
    def to_batch_first(layer_io: LayerIO) -> Tensor:
        """Back to [batch, seq, hidden]; the document_ids end here."""
        hidden, _ = split_layer_io(layer_io)
        if context.sequence_parallel:
            hidden = gather_from_tensor_region(hidden, context.tp_group, dim=0)
        return hidden.transpose(0, 1).contiguous()

    return to_batch_first


def float16_to_fp32(logits: Tensor) -> Tensor:
    """The loss is computed in fp32."""
    return logits.float()


class CrossEntropy:
    """Loss of a micro-batch: mean over samples of each sample's mean over its unmasked tokens.

    Averaging per sample first, the loss of a global batch does not depend on how it is cut into
    micro-batches and data-parallel ranks, even when `--eod-mask-loss` leaves samples of unequal length.
    `z_loss_weight` acts on `from_hidden` in training, see `vocab_parallel_linear_cross_entropy`.
    """

    def __init__(self, tp_group: TPGroup, vocab_size: int, z_loss_weight: float = 0.0) -> None:
        self.tp_group = tp_group
        self.vocab_size = vocab_size
        self.z_loss_weight = z_loss_weight

    def __call__(self, logits: Tensor, labels_and_mask: tuple[Tensor, Tensor]) -> Tensor:
        """logits [batch, seq, padded_vocab / TP], labels [batch, seq], mask [batch, seq] -> scalar fp32."""
        labels, mask = labels_and_mask
        # In training nothing reads the logits again, so their memory serves for the probabilities.
        losses = vocab_parallel_cross_entropy(
            logits, labels, self.tp_group, self.vocab_size, overwrite_logits=torch.is_grad_enabled()
        )
        return ((losses * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)).mean()

    def from_hidden(self, hidden: Tensor, weight: Tensor, labels_and_mask: tuple[Tensor, Tensor]) -> Tensor:
        """The same of the head's input [batch, seq, hidden] and weight [padded_vocab / TP, hidden].

        Where the weight has a `main_grad`, as the run's optimizer gives it, its gradient goes there, in fp32.
        """
        labels, mask = labels_and_mask
        # As factors of a plain sum: the gradients made in the forward pass are right then.
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
    """The fixed list above, for this rank's place in the tensor-parallel group."""
    initialize_vector_math()  # whatever uses the model, of training and tools, begins with this list
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


def layer_parameter_counts(layers: Sequence[LayerSpec | Callable], whole: bool = False) -> list[int]:
    """Parameters per layer that one tensor-parallel rank holds, or of the whole model; nothing is allocated.

    Transformer layers are alike, so each distinct class is built once, on the meta device.
    """
    counts: dict[tuple, int] = {}

    def count(layer: LayerSpec | Callable) -> int:
        if not isinstance(layer, LayerSpec):
            return 0
        key = (layer.typename, layer.module_kwargs.get("is_head", False))
        if key not in counts:
            with torch.device("meta"):
                parameters = layer.build().parameters()
            counts[key] = sum(prod(spec_of(p).global_shape) if whole else p.numel() for p in parameters)
        return counts[key]

    return [count(layer) for layer in layers]


class GPTModelPipe(PipelineModule):
    """This rank's stage of the model.

    `bounds` (length stages + 1) says where the list of layers is cut; see `megatron.pipeline.partition`.
    Parameters are initialised from (seed, name) alone, so every layout starts from the same weights, and
    cast to the run's precision.
    """

    def __init__(
        self,
        config: Config,
        layout: ParallelLayout,
        tp_group: TPGroup,
        vocab_size: int,
        eod: int | None,
        bounds: Sequence[int],
    ) -> None:
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
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints its own map; ours is printed once
            super().__init__(layers=layers, topology=layout.topology, loss_fn=self.loss)
        self.activation_checkpointing = ActivationCheckpointing(training, tp_group, self.dropout_rng)
        initialize_parameters(self, training.seed, tp_group)
        self.to(PARAMETER_DTYPES[config.precision.name])
        if training.compile:
            for layer in self.modules():
                if isinstance(layer, ParallelTransformerLayerPipe):
                    layer.compile(dynamic=False)  # in place: its parameters keep their names

    def transformer_layers(self) -> dict[str, nn.Module]:
        """This rank's, by the first part of their parameters' names."""
        layers = self.forward_funcs
        return {str(f.layer_index): f for f in layers if isinstance(f, ParallelTransformerLayerPipe)}

    def stages_record(self) -> dict[str, Any]:
        """Which layers each stage holds, for a checkpoint to tell."""
        parallel = self.config.parallel
        return {
            "partition_method": parallel.partition_method,
            "pipeline_schedule": parallel.pipeline_schedule,
            "bounds": self.stage_bounds,
        }

    def _check_head(self, layers: Sequence[LayerSpec | Callable]) -> None:
        """The methods of `--partition-method` never cut behind the head; bounds made by hand may."""
        _, head = embedding_and_head(layer_names(layers))
        if self.stage_bounds[-2] > head:
            raise ValueError(
                f"the last stage begins with layer {self.stage_bounds[-2]}, behind the head, layer {head}: "
                "expected it to hold the head, since logits do not travel between stages"
            )

    @contextlib.contextmanager
    def fused_head_loss(self) -> Iterator[None]:
        """Within this context outputs of `forward` are for `loss` alone: with --loss-implementation fused
        they are not logits but the head's input, and `loss` runs the head."""
        self._head_is_fused = self.config.training.loss_implementation == "fused"
        try:
            yield
        finally:
            self._head_is_fused = False

    def loss(self, outputs: Tensor, labels_and_mask: tuple[Tensor, Tensor]) -> Tensor:
        """Scalar fp32 of what `forward` has returned on the last stage."""
        if not self._head_is_fused:
            return self.cross_entropy(outputs, labels_and_mask)
        embedding = self.tied_modules[TIED_EMBEDDING]
        hidden, weight = embedding.apply_logits_multiplier(outputs), embedding.word_embeddings.weight
        return self.cross_entropy.from_hidden(hidden, weight, labels_and_mask)

    def functions_before_loss(self) -> list[Callable]:
        """This stage's layers, without those that `loss` runs."""
        functions = list(self.forward_funcs)
        if self._head_is_fused:
            for position, function in enumerate(functions):
                if getattr(function, "func", None) is lm_head:
                    return functions[:position]
        return functions

    def _partition_layers(self, method: str = "uniform") -> None:
        """Takes the bounds that were decided before any process group existed."""
        self.parts = self.stage_bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def _synchronize_tied_weights(self) -> None:
        # DeepSpeed broadcasts the parameters with autograd watching, which then tries to pass through.
        with torch.no_grad():
            super()._synchronize_tied_weights()

    def forward(self, inputs: LayerIO) -> LayerIO:
        """Runs this stage's layers: on the last stage up to the logits or, with `fused_head_loss`, the head's
        input; with --checkpoint-activations transformer layers, N by N, are recomputed.

        DeepSpeed's own would count its blocks from the stage's first function and leave out each block that
        holds anything but transformer layers.
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
        """Where the layers from `start` on that are recomputed together end; `start` if there are none."""
        end = start
        while (
            end - start < self.layers_per_checkpoint
            and end < len(self.forward_funcs)
            and isinstance(self.forward_funcs[end], ParallelTransformerLayerPipe)
        ):
            end += 1
        return end


class GPTModelDualPipeV(DualPipeVModule, GPTModelPipe):
    """The same for `--pipeline-schedule dualpipev`: rank r holds stages r and 2 * ranks - 1 - r of `bounds`,
    so the embedding and the head are one module on rank 0."""


GPT_MODELS = {"1f1b": GPTModelPipe, "dualpipev": GPTModelDualPipeV}


def _chain(layers: Sequence[nn.Module]) -> Callable[[LayerIO], LayerIO]:
    def run(layer_io: LayerIO) -> LayerIO:
        for layer in layers:
            layer_io = layer(layer_io)
        return layer_io

    return run
