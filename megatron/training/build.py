"""Assembles a run from its configuration: stages, model, engine, data, trainer.

`megatron.training.run`, the simulation of a rank, evaluation without training, and the tests build their
objects with these functions, and pass replacements for the parts that they do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from megatron.arguments.checks import expert_mistakes, layout_mistakes, model_mistakes
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.huggingface.run_export import check_export
from megatron.checkpoint.lineage.start import check_save_is_outside_checkpoints
from megatron.checkpoint.manager import CheckpointManager
from megatron.checkpoint.ranks import errors_of_all_ranks, errors_of_rank_0
from megatron.checkpoint.record import Checkpoint
from megatron.cluster.exit_codes import SharedUserError
from megatron.cluster.watchdog import Watchdog
from megatron.config import Config, ParallelConfig
from megatron.config.mistakes import raise_first
from megatron.config.rules import rule_mistakes
from megatron.config.sections.training import recomputation
from megatron.data.vocabulary import Vocabulary
from megatron.engine.device_progress import flight_record
from megatron.engine.pipeline_engine import GPTEngine
from megatron.engine.workarounds import groups_of_mesh
from megatron.errors import UserError
from megatron.model.inference.distributed import DistributedGPT
from megatron.model.pipeline_module import GPTModelPipe
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import InitialValues, initial_values, spec_of
from megatron.mpu.pieces import Piece
from megatron.mpu.world import broadcast_from_rank_0
from megatron.pipeline.layer_times import find_layer_times, needs_profiling
from megatron.pipeline.stages import needs_memory_costs, plan_stages
from megatron.run import PredictMemory, Run
from megatron.training.data import RunData, open_data
from megatron.training.metrics import MetricsLogger
from megatron.training.trainer import Trainer


def new_run(config: Config, predict_memory: PredictMemory) -> Run:
    """Returns the run as it is known before the processes connect. Raises ConfigError for flags and files
    with which no run can start. A dry run and a training run check them in the same order."""
    check_save_is_outside_checkpoints(config)
    check_export(config)
    run = Run.from_config(config, None, predict_memory, measures=not config.training.dry_run)
    if config.checkpoint.load is None:
        run.lr_schedule  # noqa: B018 - raises its errors before the data are read
    return run


def find_stages(run: Run, predict_memory: PredictMemory) -> Run:
    """Partitions the layers by their measured times or their memory, unless the stages of the run are already
    known. Collective: all ranks get an equal result.

    Raises SharedUserError on every rank if the partition is not possible.
    """
    if run.plan is not None:
        return run
    config, vocab, times, memory = run.config, run.vocab, None, None
    if needs_profiling(config):
        times = find_layer_times(config, run.mesh, vocab.size, vocab.eod)
    try:
        if needs_memory_costs(config):
            with errors_of_rank_0():
                memory = predict_memory(config, vocab.size) if run.mesh.rank == 0 else None
            memory = broadcast_from_rank_0(memory)
        return replace(run, plan=plan_stages(config, vocab.size, times, memory))
    except UserError as error:
        raise SharedUserError(str(error)) from error


def build_model(run: Run, values: InitialValues = initial_values) -> GPTModelPipe:
    """Returns this rank's part of the model. Collective. values: see `GPTModelPipe`."""
    with groups_of_mesh(run.mesh):
        return GPTModelPipe(run.config, run.mesh, run.vocab.size, run.vocab.eod, run.stages.bounds, values)


def build_engine(run: Run, values: InitialValues = initial_values) -> GPTEngine:
    """Returns an engine with this rank's part of the model, see `build_model`. Collective."""
    return GPTEngine(run, build_model(run, values))


def zeros(
    spec: ParameterSpec, seed: int, name: str, axes: Sequence[Axis], elements: range | None = None
) -> torch.Tensor:
    """Returns zeros as the initial values of a parameter. For parameters that a checkpoint overwrites,
    because zeros are the fastest."""
    return torch.zeros(spec.local_shape(axes))


def build_trainer(
    engine: GPTEngine,
    checkpoints: CheckpointManager,
    metrics: MetricsLogger,
    watchdog: Watchdog,
    tasks: Any = None,
    data: Callable[[Run], RunData] = open_data,
) -> Trainer:
    """Returns the training loop of an engine, with its data. Collective. tasks: tasks of
    --eval-harness-tasks, only on rank 0. data: function that opens the data of a run."""
    watchdog.set_device_entries(engine.device_progress.status, flight_record)
    return Trainer(engine, data(engine.run), metrics, watchdog, checkpoints, tasks)


# Settings that change only training steps, and their values for inference.
_FOR_TRAINING = {
    "precision.fp8_format": None,
    "precision.fp8_recipe": None,
    "training.compile": False,
    "training.deterministic_mode": False,
    **recomputation(),
    "training.partition_activations": False,
    "training.checkpoint_in_cpu": False,
    "optimizer.use_apex": False,
    "model.moe_router_load_balancing_type": "none",
    "training.no_train": True,
}


def run_of_layout(checkpoint: Checkpoint, parallel: ParallelConfig) -> Run:
    """Returns a run with the checkpoint's model on a given layout, with sequence parallelism if experts need
    it. Raises UserError if model and layout do not fit each other."""
    config = replace(checkpoint.config, parallel=parallel).with_settings(_FOR_TRAINING)
    is_sharded = config.model.num_experts is not None and parallel.tensor_model_parallel_size > 1
    used = config.with_settings({"parallel.sequence_parallel": is_sharded})
    # The sequence length of the training is not checked: evaluated sequences are padded so that the layout
    # divides them.
    mistakes = layout_mistakes(config), model_mistakes(config), expert_mistakes(used)
    raise_first(chain(rule_mistakes(config, ["parallel"]), *mistakes))
    return Run.from_config(used, Vocabulary(checkpoint.vocab_size, checkpoint.eod))


@torch.no_grad()
def load_distributed_model(checkpoint: Checkpoint, run: Run, micro_batch_size: int) -> DistributedGPT:
    """Returns this rank's part of the model, in evaluation mode. Collective: each rank reads its own shards.
    Raises UserError on all ranks if one of them cannot read a file."""
    mesh, module = run.mesh, build_model(run, zeros)
    with errors_of_all_ranks():
        _load_weights(module, checkpoint, mesh.axes)
    return DistributedGPT(module.eval(), mesh, micro_batch_size)


def _load_weights(module: GPTModelPipe, checkpoint: Checkpoint, axes: Sequence[Axis]) -> None:
    reader = open_reader(checkpoint)
    for name, parameter in module.named_parameters():
        if name not in reader.stored_names:
            raise UserError(f"checkpoint {checkpoint.folder} holds no parameter {name}")
        shard = reader.read_piece(Piece.of_shard(name, spec_of(parameter), axes), VALUES)
        parameter.copy_(shard.view_as(parameter))
