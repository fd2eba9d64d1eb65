"""`GPTModelPipe`: the pipeline stages of a rank as a DeepSpeed module.

`gpt_model.pipeline_layers` is the model's list of layers. A stage holds a contiguous part of the list. A rank
holds one stage, or several stages with the schedules interleaved and dualpipev. This module adds what
training needs: activation recomputation, head and loss in one function, and overrides of DeepSpeed's
`PipelineModule`.

With --loss-implementation fused, training computes head and loss in one function, which never stores the full
logits. With --mtp-num-layers, the loss of a training step also runs the layers for multi-token prediction on
the head's input. Generation, and evaluation that returns logits, run the list only up to the logits.
"""

from __future__ import annotations

import contextlib
import io
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.config import Config, TrainingConfig
from megatron.deepspeed_names import restrict
from megatron.model.gpt_model import head_input, lm_head, pipeline_layers
from megatron.model.layer_context import LayerContext, LayerIO, TensorSpec, join_layer_io, split_layer_io
from megatron.model.layer_kinds import LayerDescription, Role, embedding_and_head
from megatron.model.layer_list import PARAMETER_DTYPES, TIED_EMBEDDING, first_mtp_layer_of
from megatron.model.loss import CrossEntropy
from megatron.model.multi_token_prediction import shifted
from megatron.model.position import document_ids_of
from megatron.mpu.compilation import compile_in_place
from megatron.mpu.mesh import Axis, Mesh, chunks_of_rank
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import (
    InitialValues,
    initial_values,
    initialize_parameters,
    spec_of,
    without_memory,
)
from megatron.mpu.products import Fp8
from megatron.mpu.random import DropoutRNG
from megatron.mpu.step_metrics import StepMetrics
from megatron.mpu.weight_gradient import DeferredGradients

recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""Calls a function. Its backward pass calls the function a second time instead of storing its
intermediates."""


def describe(layer: LayerSpec | Callable) -> LayerDescription:
    """Returns the description of an entry of the layer list. A class of --normalization is described by its
    name."""
    if not isinstance(layer, LayerSpec):
        return LayerDescription(layer.__name__)
    if not hasattr(layer.typename, "describe"):
        return LayerDescription(layer.typename.__name__, Role.NORM)
    found: LayerDescription = layer.typename.describe(*layer.module_args, **layer.module_kwargs)
    return found


def compile_transformer_layer(layer: nn.Module) -> None:
    """Compiles a transformer layer, or the transformer layer that a layer for multi-token prediction
    contains."""
    compile_in_place(getattr(layer, "transformer_layer", layer))


def layer_parameter_counts(
    layers: Sequence[LayerSpec | Callable],
    unsharded: bool = False,
    counts_parameter: Callable[[ParameterSpec], bool] = lambda _: True,
) -> list[int]:
    """Returns the number of parameters of each layer, on one TP rank or (`unsharded`) in the whole model.

    Layers with equal descriptions have equal parameters, so only one of them is built, on the meta device.
    """
    counts: dict[LayerDescription, int] = {}

    def count(layer: LayerSpec | Callable) -> int:
        if not isinstance(layer, LayerSpec):
            return 0
        key = describe(layer)
        if key not in counts:
            with torch.device("meta"):
                parameters = [p for p in layer.build().parameters() if counts_parameter(spec_of(p))]
            counts[key] = sum(prod(spec_of(p).global_shape) if unsharded else p.numel() for p in parameters)
        return counts[key]

    return [count(layer) for layer in layers]


class _DeviceLayerSpec(LayerSpec):
    """Builds a layer on the device in the run's precision, so that startup never holds all layers in fp32.

    With `is_sharded` (ZeRO-3) the parameters keep no memory: the optimizer makes their partitions from
    `GPTModelPipe.initial_values`, and all-gathers the parameters when the layer runs.
    """

    def __init__(self, layer: LayerSpec, dtype: torch.dtype, is_sharded: bool) -> None:
        super().__init__(layer.typename, *layer.module_args, **layer.module_kwargs)
        self.dtype, self.is_sharded = dtype, is_sharded

    def build(self, log: bool = False) -> nn.Module:
        with torch.device(get_accelerator().current_device_name()):
            layer = super().build(log).to(self.dtype)
        for parameter in layer.parameters() if self.is_sharded else ():
            if spec_of(parameter).has_gradient:
                parameter.data = without_memory(parameter)
        return layer


@restrict(
    "forward get_additional_losses get_tied_weights_and_groups mpu num_pipeline_stages partitions "
    "stage_owner topology",
    {},
)
class GPTModelPipe(PipelineModule):
    """This rank's pipeline stages of the model.

    Stage s holds the layers bounds[s] to bounds[s + 1] - 1; see `megatron.pipeline.partition`. `forward`, and
    all that DeepSpeed does with the layers, concerns one stage of the rank: the active model chunk.
    Parameters have the run's precision. Their initial values depend only on (seed, name), so every layout
    starts from equal weights. With ZeRO-3 the parameters of transformer layers have no memory yet.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        vocab_size: int,
        eod: int | None,
        bounds: Sequence[int],
        values: InitialValues = initial_values,
    ) -> None:
        """values: computes the initial values. Callers that overwrite the weights pass a faster function."""
        self.config = config
        self.mesh, self._values = mesh, values
        self.stage_bounds = list(bounds)
        self.cross_entropy = CrossEntropy(
            mesh.tp,
            vocab_size,
            z_loss_weight=config.training.z_loss_weight,
            cp_group=mesh.cp,
            softcapping=config.model.final_logit_softcapping,
        )
        self._eod, self._head_is_in_loss, self._loss_gradient = eod, False, 1.0
        self.main_loss = torch.zeros(0)
        """The loss of the last micro-batch, without the losses of multi-token prediction."""
        self.dropout_rng = DropoutRNG(config.training.seed)
        self.deferred_gradients = DeferredGradients() if config.parallel.schedule.splits_backward else None
        self.metrics, self.fp8 = StepMetrics(), Fp8.of(config, mesh)
        self.context = context = LayerContext(
            config, mesh, self.dropout_rng, self.deferred_gradients, self.metrics, self.fp8
        )
        training = config.training
        self.layers_per_checkpoint = training.checkpoint_num_layers if training.recomputes_layers else 0
        layers = pipeline_layers(context, vocab_size, eod)
        self.descriptions = list(map(describe, layers))
        _, self._head = embedding_and_head(self.descriptions)
        self._check_head()
        dtype, sharded = PARAMETER_DTYPES[config.precision.name], config.parallel.shards_weights
        layers = [
            _DeviceLayerSpec(layer, dtype, sharded) if description.has_transformer_layer else layer
            for layer, description in zip(layers, self.descriptions, strict=True)
        ]
        with contextlib.redirect_stdout(io.StringIO()):  # suppresses DeepSpeed's stage map
            super().__init__(layers=layers, topology=mesh.topology, loss_fn=self.loss)
        self.activation_checkpointing = ActivationCheckpointing(training, mesh.tp, self.dropout_rng)
        initialize_parameters(self, training.seed, mesh.axes, values)
        super().to(dtype)
        if training.compile:
            for layer in self.transformer_layers().values():
                compile_transformer_layer(layer)

    def initial_values(self, name: str, elements: range) -> Tensor:
        """Returns initial values of a parameter, fp32, on the CPU. elements: which elements of this rank's
        flattened shard."""
        spec = spec_of(self.get_parameter(name))
        shard = self._values(spec, self.config.training.seed, name, self.mesh.axes, elements)
        return shard.view(-1)[elements.start : elements.stop]

    def stage_input(self, stage: int, batch: int, seq: int) -> list[TensorSpec]:
        """Returns the shape and dtype of each tensor that a stage receives from the previous stage. batch,
        seq: samples and tokens per sample of the micro-batch."""
        return self.context.input_specs(self.stage_bounds[stage], batch, seq)

    def check_stage_output(self, stage: int, tensors: Sequence[Tensor], batch: int, seq: int) -> None:
        """Raises RuntimeError if `tensors` differ from what the next stage allocates, which would make it
        hang."""
        found = [(tuple(x.shape), x.dtype) for x in tensors]
        if found != (expected := self.stage_input(stage + 1, batch, seq)):
            raise RuntimeError(f"stage {stage} sends {found}, the next stage expects {expected}")

    def transformer_layers(self) -> dict[str, nn.Module]:
        """Returns this rank's transformer layers, and its layers for multi-token prediction (each contains
        one transformer layer). The keys are the layer indices in the names of their parameters."""
        return {str(i): f for i, f in self.layers.items() if self.descriptions[i].has_transformer_layer}

    def stages_record(self) -> dict[str, Any]:
        """Returns which layers each stage holds, in the form that checkpoints store."""
        parallel = self.config.parallel
        return {
            "partition_method": parallel.partition_method,
            "pipeline_schedule": parallel.pipeline_schedule,
            "bounds": self.stage_bounds,
        }

    def _check_head(self) -> None:
        """Raises ValueError if the last stage lacks the head, which --partition-method never causes."""
        if self.stage_bounds[-2] > self._head:
            raise ValueError(
                f"the last stage begins with layer {self.stage_bounds[-2]}, after the head (layer "
                f"{self._head}): expected it to hold the head, since logits are not sent between stages"
            )

    @contextlib.contextmanager
    def fused_head_loss(self, loss_gradient: float = 1.0) -> Iterator[None]:
        """Returns a context that moves the head from `forward` to `loss`: `forward` returns the head's input
        instead of logits. It does so with --loss-implementation fused, and in training with --mtp-num-layers.
        Within the context only `loss` may use the outputs of `forward`. loss_gradient: see
        `CrossEntropy.from_hidden`."""
        self._loss_gradient = loss_gradient
        self._head_is_in_loss = self._head_is_fused or self._predicts_more
        try:
            yield
        finally:
            self._head_is_in_loss = False

    @property
    def _head_is_fused(self) -> bool:
        return self.config.training.loss_implementation == "fused"

    @property
    def _predicts_more(self) -> bool:
        return self.config.model.mtp_num_layers is not None and torch.is_grad_enabled()

    @property
    def loss_depths(self) -> int:
        """The number of losses in training: one of the main model, and one of each layer for multi-token
        prediction."""
        return 1 + (self.config.model.mtp_num_layers or 0)

    @property
    def loss_reads_tokens(self) -> bool:
        """Whether `loss_inputs` needs the inputs of the first stage, to compute document ids."""
        return self.loss_depths > 1 and self.context.layers_need_document_ids

    def loss_inputs(
        self, labels: Tensor, mask: Tensor, counts: Sequence[Any] | Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns the tensors that `loss` reads of a micro-batch: labels [batch, seq] and their weights
        [batch, seq]; with multi-token prediction also the labels' weights in each layer [layers, batch, seq],
        and document ids.

        counts: for each loss, the number of unmasked tokens that divides the loss; in an evaluation only the
        number for the main model's loss. inputs: the inputs of the first stage, if `loss_reads_tokens`.
        """
        weights = [shifted(mask, depth) / counts[depth] for depth in range(len(counts))]
        read = [labels, weights[0]]
        if len(weights) > 1:
            read.append(torch.stack(weights[1:]))
            if inputs:
                read.append(inputs[1] if len(inputs) > 1 else document_ids_of(inputs[0], self._eod))
        return tuple(read)

    def loss(self, outputs: Tensor, loss_inputs: tuple[Tensor, ...]) -> Tensor:
        """Returns the scalar fp32 loss from the output of `forward` on the last stage. In training it
        includes the losses of multi-token prediction, which `main_loss` excludes."""
        labels, weights, *others = loss_inputs
        if not self._head_is_in_loss:
            loss = self.cross_entropy(outputs, (labels, weights))
            self.main_loss = loss.detach()
            return loss
        added = self._multi_token_loss(outputs, labels, *others) if self._predicts_more else 0.0
        loss = self._loss_of_head(outputs, (labels, weights))
        self.main_loss = loss.detach()
        return loss + added

    def _multi_token_loss(
        self, hidden: Tensor, labels: Tensor, weights: Tensor, document_ids: Tensor | None = None
    ) -> Tensor | float:
        """Returns the sum of the losses of multi-token prediction, multiplied with their scaling factor.
        hidden: the head's input. weights, document_ids: see `loss_inputs`."""
        layers = [f for i, f in self.layers.items() if self.descriptions[i].role is Role.MULTI_TOKEN]
        factor = self.config.model.mtp_loss_scaling_factor / len(layers)
        total: Tensor | float = 0.0
        embedding = self.tied_modules[TIED_EMBEDDING].word_embeddings
        for depth, (layer, of_depth) in enumerate(zip(layers, weights, strict=True), 1):
            run = partial(layer, tokens=shifted(labels, depth - 1), embedding=embedding)
            if self.layers_per_checkpoint:  # recomputation may free its input
                found = self.activation_checkpointing.run(run, join_layer_io(hidden.clone(), document_ids))
                hidden, _ = split_layer_io(found)
            else:
                hidden = run(join_layer_io(hidden, document_ids))
            loss = self._loss_of_head(hidden, (shifted(labels, depth), of_depth), factor)
            self.metrics.record(f"mtp_{depth} loss", loss)
            total = total + factor * loss
        return total

    def _loss_of_head(
        self, hidden: Tensor, labels_and_weights: tuple[Tensor, Tensor], factor: float = 1.0
    ) -> Tensor:
        """Returns the loss from the head's input. factor: the caller multiplies the returned loss by it."""
        is_tied = self.descriptions[self._head].is_tied
        head: Any = self.tied_modules[TIED_EMBEDDING] if is_tied else self.layers[self._head]
        if not self._head_is_fused:
            return self.cross_entropy(lm_head(head, hidden).float(), labels_and_weights)
        return self.cross_entropy.from_hidden(
            head_input(head, hidden), head.head_weight, labels_and_weights, self._loss_gradient * factor
        )

    def functions_before_loss(self) -> list[Callable]:
        """Returns this stage's layers, except the layers that `loss` computes."""
        end = self._head if self._head_is_in_loss else first_mtp_layer_of(self.config.model.num_layers)
        return list(self.forward_funcs[: max(end - self._local_start, 0)])

    def _partition_layers(self, method: str = "uniform") -> None:
        """Overrides DeepSpeed's partitioning: it uses the bounds given to the constructor."""
        self.parts = self.stage_bounds
        rank = self._topo.get_coord(self.global_rank).pipe
        held = chunks_of_rank(self.config.parallel.rank_of_stage, rank)
        self._chunk_bounds = [(self.parts[stage], self.parts[stage + 1]) for stage in held]

    def stage_owner(self, layer_idx: int) -> int:
        """Returns the pipeline rank that holds a layer."""
        return self.config.parallel.rank_of_stage[bisect_right(self.parts, layer_idx) - 1]

    def _build(self) -> None:
        self._chunk_functions: list[list[Callable]] = []
        for first, end in self._chunk_bounds:
            self._set_bounds(first, end)
            self.forward_funcs: list[Callable] = []
            super()._build()
            self._chunk_functions.append(self.forward_funcs)
        self.activate_model_chunk(0)

    def activate_model_chunk(self, model_chunk_id: int) -> None:
        """Selects the stage of this rank that `forward` runs."""
        self.forward_funcs = self._chunk_functions[model_chunk_id]
        self._set_bounds(*self._chunk_bounds[model_chunk_id])

    def functions_of_chunk(self, model_chunk_id: int) -> dict[int, Callable]:
        """Returns the layers of one of this rank's stages, by their index in the layer list."""
        return dict(enumerate(self._chunk_functions[model_chunk_id], self._chunk_bounds[model_chunk_id][0]))

    @property
    def layers(self) -> dict[int, nn.Module]:
        """The layers of all stages of this rank, by their index in the layer list."""
        chunks = map(self.functions_of_chunk, range(len(self._chunk_functions)))
        return {i: f for chunk in chunks for i, f in chunk.items() if isinstance(f, nn.Module)}

    def _synchronize_tied_weights(self) -> None:
        # DeepSpeed broadcasts the parameters with autograd enabled. Without no_grad, autograd would record
        # it.
        with torch.no_grad():
            super()._synchronize_tied_weights()

    def forward(self, inputs: LayerIO) -> LayerIO:
        """Runs this stage's layers. The last stage returns logits, or with `fused_head_loss` the head's
        input.

        With --checkpoint-activations, groups of --checkpoint-num-layers transformer layers are recomputed.
        DeepSpeed's `forward`, which this overrides, counts its groups from the stage's first function, and
        does not recompute a group that holds anything other than transformer layers.
        """
        functions = self.functions_before_loss()
        position = 0
        while position < len(functions):
            end = self._end_of_checkpointed_layers(position)
            run: Callable[[LayerIO], LayerIO]
            if end > position:
                run = partial(self.activation_checkpointing.run, _chain(functions[position:end]))
            else:
                end = position + 1
                run = functions[position]
            inputs = self.run_layers(range(position, end), run, inputs)
            position = end
        return inputs

    def run_layers(self, positions: range, run: Callable[[LayerIO], LayerIO], inputs: LayerIO) -> LayerIO:
        """Returns `run(inputs)`. positions: the positions of the stage's functions that `run` calls, several
        if they are recomputed together. A subclass can override this method to observe the layers."""
        return run(inputs)

    def _end_of_checkpointed_layers(self, start: int) -> int:
        """Returns the end of the group of layers from `start` that are recomputed together; `start` if none
        are."""
        end = start
        while (
            end - start < self.layers_per_checkpoint
            and end < len(self.forward_funcs)
            and self.descriptions[self._local_start + end].role is Role.TRANSFORMER
        ):
            end += 1
        return end


def _chain(layers: Sequence[Callable[[LayerIO], LayerIO]]) -> Callable[[LayerIO], LayerIO]:
    def run(layer_io: LayerIO) -> LayerIO:
        for layer in layers:
            layer_io = layer(layer_io)
        return layer_io

    return run


class ActivationCheckpointing:
    """Runs transformer layers, and stores only their input for the backward pass.

    With --partition-activations each tensor-parallel rank keeps its partition of the input; with
    --checkpoint-in-cpu the input is kept in host memory. Both flags use DeepSpeed's implementation. Its
    settings are global to the process: the model that was built last sets them.
    """

    def __init__(self, training: TrainingConfig, tp_group: Axis, dropout_rng: DropoutRNG) -> None:
        self.dropout_rng = dropout_rng
        partition = training.partition_activations and tp_group.size > 1
        # On a CPU there is nothing to move, and DeepSpeed would free the only copy (workarounds.py: 11).
        move = training.checkpoint_in_cpu and get_accelerator().device_name() != "cpu"
        self._checkpoint: Callable = recompute
        if partition or move:
            deepspeed_checkpointing.configure(
                _AxisAsMpu(tp_group),
                partition_activations=partition,
                checkpoint_in_cpu=move,
            )
            self._checkpoint = deepspeed_checkpointing.checkpoint

    def run(self, function: Callable[[LayerIO], LayerIO], layer_io: LayerIO) -> LayerIO:
        """Returns `function(layer_io)`. The recomputation uses the sample numbers of the forward pass, and
        therefore its dropout masks. The caller must not use layer_io afterwards: DeepSpeed frees the hidden
        state."""
        if not torch.is_grad_enabled():
            return function(layer_io)
        samples = self.dropout_rng.samples
        hidden, document_ids = split_layer_io(layer_io)

        def run(hidden: Tensor) -> Tensor:
            with self.dropout_rng.use_samples(samples):
                return split_layer_io(function(join_layer_io(hidden, document_ids)))[0]

        return join_layer_io(self._checkpoint(run, hidden), document_ids)


class _AxisAsMpu:
    """A tensor-parallel group with the method names that DeepSpeed expects of an `mpu` object."""

    def __init__(self, tp_group: Axis) -> None:
        self.tp_group = tp_group

    def get_tensor_model_parallel_rank(self) -> int:
        return self.tp_group.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.tp_group.size

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self.tp_group.group
