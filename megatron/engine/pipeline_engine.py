"""The engine of a run: DeepSpeed's pipeline engine with this repository's optimizer and dropout."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from torch import Tensor, nn

from megatron.config import Config
from megatron.data.loader import MicroBatch
from megatron.deepspeed_names import restrict
from megatron.engine.cuda_graph import MicroBatchGraph
from megatron.engine.deepspeed_config import deepspeed_dict
from megatron.engine.device_progress import DeviceProgress
from megatron.engine.executor import ScheduleExecutor
from megatron.engine.pass_times import PassTimes
from megatron.engine.profiler_ranges import TRAIN_STEP, profiler_range
from megatron.model.attention.qk_clip import QKClip, records_logits
from megatron.model.experts import RouterBalance
from megatron.model.layer_list import PARAMETER_DTYPES
from megatron.model.pipeline_module import GPTModelPipe
from megatron.mpu.mesh import Mesh
from megatron.optimizer.loss_scale import LossScaler
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.optimizer.overlap import ZeroConfig, divide_into_buckets
from megatron.optimizer.parameter_groups import make_optimizer, parameter_groups
from megatron.run import Run
from megatron.shares import share_out

# Methods of DeepSpeed's engines that do what DeepSpeed documents. All other methods raise an error.
_SUPPORTED = (
    "autotuning_enabled checkpoint_tag_validation_enabled checkpoint_tag_validation_fail "
    "collect_python_gc communication_data_type data_efficiency_enabled destroy dump_state eval eval_batch "
    "flops_profiler_enabled get_additional_losses get_lr get_pipeline_parallel_rank "
    "gradient_accumulation_steps is_deepcompile_active is_deepcompile_enabled is_first_stage "
    "is_gradient_accumulation_boundary is_last_stage load_universal_checkpoint memory_breakdown "
    "optimizer_name random_ltd_enabled steps_per_print torch_autocast_enabled train train_batch_size "
    "train_micro_batch_size_per_gpu wall_clock_breakdown was_step_applied zero_grad zero_optimization"
)
_ANSWERS: dict[str, Callable[[Any], Any]] = {
    "bfloat16_enabled": lambda engine: engine.run.config.precision.bf16,
    "curriculum_learning_enabled": lambda engine: engine.run.config.curriculum is not None,
    "dynamic_loss_scale": lambda engine: engine.optimizer.scaler.dynamic,
    "fp16_enabled": lambda engine: engine.run.config.precision.fp16,
    "get_batch_info": lambda engine: (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    ),
    "get_data_parallel_rank": lambda engine: engine.mesh.dp.rank,
    "get_data_types": lambda engine: (PARAMETER_DTYPES[engine.run.config.precision.name], torch.float32),
    "get_global_grad_norm": lambda engine: engine.optimizer.grad_norm if engine.global_steps else None,
    "get_model_parallel_rank": lambda engine: engine.mesh.tp.rank,
    "get_mom": lambda engine: [g.get("betas", g.get("momentum", 0.0)) for g in engine.optimizer.param_groups],
    "get_tensor_parallel_rank": lambda engine: engine.mesh.tp.rank,
    "gradient_clipping": lambda engine: engine.run.config.optimizer.clip_grad,
    "is_compiled": lambda engine: engine.run.config.training.compile,
    "loss_scale": lambda engine: engine.run.config.precision.loss_scale or 0.0,
    "zero_cpu_offload": lambda engine: engine.run.config.parallel.cpu_offload,
    "zero_optimization_partition_gradients": lambda engine: engine.zero_optimization_stage() >= 2,
    "zero_optimization_partition_weights": lambda engine: engine.zero_optimization_stage() >= 3,
    "zero_optimization_stage": lambda engine: engine.run.config.parallel.zero_stage,
}
"""Methods of DeepSpeed's engines that return the run's values. DeepSpeed is configured with different
values."""


@restrict(_SUPPORTED, _ANSWERS)
class GPTEngine(ScheduleExecutor):
    """Trains and evaluates the stages of a `GPTModelPipe`.

    Callers may use only these inherited methods of DeepSpeed: `_SUPPORTED` and `_ANSWERS`.
    """

    def __init__(self, run: Run, model: GPTModelPipe) -> None:
        self.run, self.mesh = run, run.mesh
        config, mesh = run.config, run.mesh
        self._heartbeat: Callable[[], None] = _no_heartbeat
        self._seq_length = config.model.seq_length
        self.device_progress = DeviceProgress(get_accelerator())
        self.pass_times = PassTimes() if config.logging.log_bubble else None
        self._graph = MicroBatchGraph(model) if config.training.uses_cuda_graph else None
        settings = deepspeed_dict(config, config.batch.global_batch_size)
        super().__init__(
            config.parallel,
            mesh.tp,
            args=None,
            model=model,
            optimizer=plain_optimizer(config, model),
            model_parameters=list(model.parameters()),
            mpu=model.mpu(),
            config=settings,
            config_class=DeepSpeedConfig(settings, model.mpu()),
        )

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> MixedPrecisionOptimizer:
        return mixed_precision_optimizer(self.run.config, self.mesh, self.module, optimizer)

    def train_step(
        self,
        micro_batches: Iterator[MicroBatch],
        global_batch_size: int,
        lr: float,
        *,
        seq_length: int | None = None,
        masks_tokens: bool = False,
        skips_non_finite: bool | None = None,
        skip_update_fn: Callable[[float, float], bool] | None = None,
        exit_code_fn: Callable[[], int] | None = None,
        heartbeat: Callable[[], None] | None = None,
    ) -> Tensor:
        """Trains one step on the mean loss over the unmasked tokens of all ranks. Returns this loss, on the
        device.

        micro_batches: the micro-batches of this data-parallel rank. lr: learning rate of the step.
        seq_length: tokens per sample of `micro_batches`, by default --seq-length. masks_tokens: whether loss
        masks may have zeros; if so, all micro-batches are read before the first pass. skips_non_finite,
        exit_code_fn: see `MixedPrecisionOptimizer.begin_step`. skip_update_fn: gets the mean loss and the
        gradient norm, which are equal on all ranks, and returns whether to skip the update. heartbeat: is
        called for every micro-batch. Raises NonFiniteError on all ranks, before the update, if the loss or a
        gradient is not finite.
        """
        self._heartbeat = heartbeat or _no_heartbeat
        self._seq_length = seq_length or self.run.config.model.seq_length
        if global_batch_size != self.train_batch_size():
            super().set_train_batch_size(global_batch_size * self.mesh.cp_size)
        self._tokens_per_micro_batch = None
        if masks_tokens:
            batches = list(micro_batches)
            micro_batches, self._tokens_per_micro_batch = iter(batches), self._mean_tokens(batches)
        self.optimizer.begin_step(
            skips_non_finite,
            skip_update_fn and (lambda grad_norm: skip_update_fn(*self._loss_and_norm_everywhere(grad_norm))),
            exit_code_fn,
            self.micro_batches,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_mult"]
        self.device_progress.begin_step()
        if self.pass_times:
            self.pass_times.begin_step()
        with profiler_range(TRAIN_STEP):
            loss = super().train_batch(micro_batches)
        self._free_pipe_buffers()
        return loss

    def evaluate_totals(
        self,
        micro_batches: Iterator[MicroBatch],
        num_micro_batches: int,
        heartbeat: Callable[[], None] | None = None,
        seq_length: int | None = None,
    ) -> Tensor:
        """Evaluates `num_micro_batches` micro-batches per data-parallel rank, and returns their
        `token_totals`. heartbeat: is called for every micro-batch. seq_length: tokens per sample; None:
        --seq-length. It is a collective."""
        self._heartbeat = heartbeat or _no_heartbeat
        self._seq_length = seq_length or self.run.config.model.seq_length
        self.device_progress.begin_step()
        self.eval_batch(
            micro_batches, num_micro_batches=num_micro_batches, reduce_output=None, bcast_loss=False
        )
        self._free_pipe_buffers()
        return self.token_totals()

    def _mean_tokens(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Returns the mean number of unmasked tokens per micro-batch over all ranks, on the device: for the
        main model, then for each layer of multi-token prediction. If no token is unmasked, it is computed as
        for one token. It is a collective on the ranks of the last stage."""
        depths = range(self.module.loss_depths)
        own = [float(sum(batch.loss_mask[:, depth:].sum() for batch in batches)) for depth in depths]
        tokens = torch.tensor(own, device=self.device) / self.mesh.cp_size
        if self.is_last_stage() and self.is_data_parallel:
            dist.all_reduce(tokens, group=self.grid.get_data_parallel_group())
        return tokens.clamp_(min=1.0) / (len(batches) * self.mesh.dp_size)

    def train_batch_size(self) -> int:
        """Returns the global batch size in samples. DeepSpeed counts a sample once per context-parallel rank,
        and checks its own number while the engine is built."""
        return int(super().train_batch_size()) // (self.mesh.cp_size if self._is_built else 1)

    def was_step_applied(self) -> bool:
        """Returns whether the last step changed the weights."""
        return bool(super().was_step_applied()) and not self.optimizer.skipped

    def _loss_and_norm_everywhere(self, grad_norm: float) -> tuple[float, float]:
        """Returns, on all ranks, the step's mean loss and rank 0's gradient norm before the update. It is a
        collective."""
        found = torch.zeros(3, dtype=torch.float64, device=self.device)
        if self.is_last_stage() and self.mesh.tp.rank == 0:
            found[:2] = self._own_token_totals()
        if self.global_rank == 0:
            found[2] = grad_norm
        dist.all_reduce(found)
        losses, tokens, norm = found.tolist()
        return losses / tokens if tokens else math.nan, norm

    @property
    def layer_sizes(self) -> dict[int, int]:
        """The number of parameters of each of the module's `layers`, on one tensor-parallel rank."""
        return {i: sum(p.numel() for p in layer.parameters()) for i, layer in self.module.layers.items()}

    @property
    def layer_writers(self) -> dict[int, int]:
        """The replica (a rank of `Mesh.dp_cp`) that writes each layer. All replicas write about equally many
        bytes."""
        return share_out(self.layer_sizes, self.mesh.dp_cp.size)

    def _free_pipe_buffers(self) -> None:
        """Frees the activations of the last micro-batches, including logits.

        DeepSpeed keeps them until the next step. They also refer to the engine through autograd hooks, which
        Python's garbage collector cannot follow, so the engine would never be freed.
        """
        for buffers in self.pipe_buffers.values():
            buffers[:] = [None] * len(buffers)
        self.loss = self.loss.detach()

    def _exec_forward_pass(self, buffer_id: int, model_chunk_id: int) -> None:
        self._heartbeat()
        if self._graph and torch.is_grad_enabled():
            self._exec_both_passes(buffer_id, self._graph)
            return
        self.optimizer.unit_overlap.begin_micro_batch()
        samples = self.pipe_buffers["samples"][buffer_id % self._buffers_per_chunk]
        # DeepSpeed divides the loss by the number of micro-batches before the backward pass.
        loss_gradient = self.optimizer.scaler.scale / self.micro_batches
        head_loss: AbstractContextManager[None] = nullcontext()
        if self._compute_loss and not self.eval_return_logits:
            head_loss = self.module.fused_head_loss(loss_gradient)
        use_samples = self.module.dropout_rng.use_samples(samples, loss_gradient)
        with self._timed_pass(), use_samples, head_loss:
            super()._exec_forward_pass(buffer_id, model_chunk_id)

    def _exec_both_passes(self, buffer_id: int, graph: MicroBatchGraph) -> None:
        """Runs the forward and the backward pass of a micro-batch."""
        buffers = self.pipe_buffers
        inputs = (*buffers["inputs"][buffer_id], *buffers["labels"][buffer_id])
        buffers["inputs"][buffer_id] = buffers["labels"][buffer_id] = None
        samples, scale = buffers["samples"][buffer_id], self.optimizer.scaler.scale
        with self._timed_pass():
            self.loss = graph.run(inputs, samples, scale, self.micro_batches)
        self._count_loss(self.loss)

    def _exec_backward_pass(self, buffer_id: int, model_chunk_id: int) -> None:
        if self._graph:
            return  # `_exec_forward_pass` has already run it
        with self._timed_pass():
            super()._exec_backward_pass(buffer_id, model_chunk_id)

    def _exec_weight_grad_pass(self, buffer_id: int, model_chunk_id: int) -> None:
        with self._timed_pass():
            super()._exec_weight_grad_pass(buffer_id, model_chunk_id)

    def _timed_pass(self) -> AbstractContextManager[None]:
        return self.pass_times.measure() if self.pass_times else nullcontext()


def plain_optimizer(config: Config, model: GPTModelPipe) -> torch.optim.Optimizer:
    """Returns the optimizer that --optimizer selects, over the parameter groups of a model."""
    optimizer = config.optimizer
    units = {layer: layer for layer in _zero_units(config, model)}
    buckets = _buckets(model, config.parallel.bucket_size)
    groups = parameter_groups(
        model.named_parameters(),
        optimizer.weight_decay,
        optimizer.use_bnb_optimizer,
        units | {layer: name for name, bucket in buckets.items() for layer in bucket},
        config.model.matrix_lr_mult,
        [weight for weight, _ in _tied_weights(model)] if config.parallel.optimizer_partitions > 1 else [],
        matrices=optimizer.updates_matrices,
    )
    return make_optimizer(groups, optimizer)


def mixed_precision_optimizer(
    config: Config,
    mesh: Mesh,
    model: GPTModelPipe,
    plain: torch.optim.Optimizer,
) -> MixedPrecisionOptimizer:
    """Returns the mixed-precision optimizer of a rank. plain: the result of `plain_optimizer` for the
    model."""
    parallel = config.parallel
    buckets = _buckets(model, parallel.bucket_size)
    # The replay of a CUDA graph runs no Python hooks.
    calls_hooks = not config.training.uses_cuda_graph
    return MixedPrecisionOptimizer(
        plain,
        {parameter: name for name, parameter in model.named_parameters()},
        mesh,
        _tied_weights(model),
        LossScaler(config.precision),
        ZeroConfig(
            parallel.zero_stage,
            _zero_units(config, model),
            model.initial_values if parallel.shards_weights else None,
            {name: list(bucket.values()) for name, bucket in buckets.items()},
            overlap_grad_reduce=calls_hooks and not parallel.no_overlap_grad_reduce,
            overlap_param_gather=calls_hooks and not parallel.no_overlap_param_gather,
            chains_param_gathers=parallel.needs_one_queue and mesh.pp.rank == 0,
            cpu_offload=parallel.cpu_offload,
        ),
        config.optimizer.clip_grad,
        averages_replicated=config.stability.sync_tp_duplicated_parameters,
        overwrites_gradients=calls_hooks and not config.training.compile,
        state_rule=RouterBalance(model, mesh),
        row_scaling=QKClip(model, mesh, config, model.metrics) if records_logits(config) else None,
        weights_changed_fn=None if model.fp8 is None else model.fp8.weights_changed,
    )


def _zero_units(config: Config, model: GPTModelPipe) -> dict[str, nn.Module]:
    """Returns the layers whose gradients ZeRO-2 and ZeRO-3 shard."""
    return model.transformer_layers() if config.parallel.shards_gradients else {}


def _buckets(model: GPTModelPipe, bucket_size: int | None) -> dict[str, dict[str, nn.Module]]:
    """Returns the layers of each bucket (see `optimizer.overlap`) by name. Without a bucket_size there are
    none."""
    if bucket_size is None:
        return {}
    layers = list(model.transformer_layers().items())
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for _, layer in layers]
    buckets = [dict(layers[part.start : part.stop]) for part in divide_into_buckets(sizes, bucket_size)]
    return {f"layers {', '.join(bucket)}": bucket for bucket in buckets}


def _tied_weights(model: GPTModelPipe) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
    """Returns the parameters with a replica on a different stage, and the process group of these stages."""
    tied = model.get_tied_weights_and_groups()
    return [(weight, group) for weight, group in tied if dist.get_world_size(group) > 1]


def _no_heartbeat() -> None:
    """Does nothing. Callers without a watchdog use it."""
