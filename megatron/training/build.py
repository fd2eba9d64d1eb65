"""Assembles a run from its configuration: vocabulary, stages, model, engine, checkpoints, data, trainer.

`megatron.training.run`, the simulation of a rank, evaluation without training, and the tests build their
objects with these functions. They replace the parts that they do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch.distributed import Store

from megatron.arguments.checks import layout_mistakes, model_mistakes
from megatron.checkpoint.formats.deepspeed_files import VALUES
from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.huggingface.run_export import check_export
from megatron.checkpoint.lineage.owner import FolderOwner
from megatron.checkpoint.lineage.start import check_save_is_outside_checkpoints
from megatron.checkpoint.local.saves import LocalCheckpoints
from megatron.checkpoint.manager import CheckpointManager
from megatron.checkpoint.object_store.checkpoints import ObjectCheckpoints
from megatron.checkpoint.ranks import first_problem_of_ranks
from megatron.checkpoint.record import Checkpoint
from megatron.cluster.exit_codes import SharedUserError
from megatron.cluster.watchdog import Watchdog
from megatron.config import Config, ParallelConfig
from megatron.config.mistakes import raise_first
from megatron.data.vocabulary import Vocabulary, find_vocabulary
from megatron.engine.device_progress import flight_record
from megatron.engine.pipeline_engine import GPTEngine
from megatron.engine.workarounds import groups_of_mesh
from megatron.errors import UserError
from megatron.model.distributed_inference import DistributedGPT
from megatron.model.pipeline_module import GPTModelPipe
from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import InitialValues, initial_values, spec_of
from megatron.mpu.world import broadcast_from_rank_0
from megatron.optimizer.batch_schedule import BatchSchedule, RunLength
from megatron.optimizer.schedule import LearningRateSchedule, schedule_of
from megatron.pipeline.layer_times import find_layer_times, needs_profiling, read_layer_times
from megatron.pipeline.methods import MemoryCosts
from megatron.pipeline.stages import StagePlan, find_memory_costs, needs_memory_costs, plan_stages
from megatron.training.data import RunData, open_data
from megatron.training.metrics import MetricsLogger
from megatron.training.trainer import Trainer


@dataclass(frozen=True)
class Setup:
    """Vocabulary and stages of a run, known before the processes connect."""

    vocab: Vocabulary
    plan: StagePlan | None
    """None if `find_stages` must be called when the processes have connected; never in a dry run."""

    @classmethod
    def from_config(cls, config: Config) -> Setup:
        """Raises ConfigError for flags and files with which no run can start, in the same order for a dry run
        and a run."""
        check_save_is_outside_checkpoints(config)
        check_export(config)
        vocab = find_vocabulary(config)
        times = read_layer_times(config, vocab.size)
        needs_processes = needs_profiling(config) or needs_memory_costs(config)
        plan = None
        if config.training.dry_run or not needs_processes:
            plan = plan_stages(config, vocab.size, times)
        if config.checkpoint.load is None:
            schedule_of(config)  # an error is found before the data are read
        return cls(vocab, plan)


def find_stages(config: Config, mesh: Mesh, vocab: Vocabulary) -> StagePlan:
    """Partitions the layers by their measured times or their memory. Collective: all ranks get one result.

    Raises SharedUserError on every rank if the partition is not possible.
    """
    times = memory = None
    if needs_profiling(config):
        times = find_layer_times(config, mesh, vocab.size, vocab.eod)
    if needs_memory_costs(config):
        memory = _memory_costs_of_rank_0(config, mesh, vocab.size)
    try:
        return plan_stages(config, vocab.size, times, memory)
    except UserError as error:
        raise SharedUserError(str(error)) from error


def _memory_costs_of_rank_0(config: Config, mesh: Mesh, vocab_size: int) -> MemoryCosts:
    found: MemoryCosts | str = ""
    if mesh.rank == 0:
        try:
            found = find_memory_costs(config, vocab_size)
        except UserError as error:
            found = str(error)
    found = broadcast_from_rank_0(found)
    if isinstance(found, str):
        raise SharedUserError(found)
    return found


def build_model(
    config: Config,
    mesh: Mesh,
    vocab: Vocabulary,
    bounds: Sequence[int] | None = None,
    values: InitialValues = initial_values,
) -> GPTModelPipe:
    """Returns this rank's part of the model. Collective. bounds: stage bounds (None: by --partition-method).
    values: see `GPTModelPipe`."""
    bounds = plan_stages(config, vocab.size).bounds if bounds is None else bounds
    with groups_of_mesh(mesh):
        return GPTModelPipe(config, mesh, vocab.size, vocab.eod, bounds, values)


def build_engine(
    config: Config,
    mesh: Mesh,
    vocab: Vocabulary,
    bounds: Sequence[int] | None = None,
    values: InitialValues = initial_values,
) -> GPTEngine:
    """Returns an engine with this rank's part of the model, see `build_model`. Collective."""
    return GPTEngine(config, mesh, build_model(config, mesh, vocab, bounds, values))


def zeros(
    spec: ParameterSpec, seed: int, name: str, axes: Sequence[Axis], elements: range | None = None
) -> torch.Tensor:
    """Returns the initial values of a parameter that a checkpoint overwrites: zeros are the fastest."""
    return torch.zeros(spec.local_shape(axes))


def build_trainer(
    config: Config,
    engine: GPTEngine,
    vocab: Vocabulary,
    length: RunLength,
    batches: BatchSchedule,
    lr_schedule: LearningRateSchedule,
    metrics: MetricsLogger,
    watchdog: Watchdog,
    *,
    fingerprint: dict[str, Any] | None = None,
    owner: FolderOwner | None = None,
    store: Store | None = None,
    local: LocalCheckpoints | None = None,
    objects: ObjectCheckpoints | None = None,
    tasks: Any = None,
    data: Callable[[Config, Mesh, RunLength, Vocabulary], RunData] = open_data,
    trainer: type[Trainer] = Trainer,
) -> Trainer:
    """Returns the training loop around an engine, with its checkpoints and data.

    fingerprint: see `run_fingerprint`. owner: owner of --save. store: of all ranks, for saves in the
    background. local: the local checkpoints. objects: the checkpoints in object stores. tasks:
    --eval-harness-tasks, on rank 0.
    """
    watchdog.set_device_facts(engine.device_progress.facts, flight_record)
    saved_to = config.checkpoint.save or ""
    facts = (vocab.size, vocab.eod, fingerprint or {}, owner, watchdog.heartbeat, store, local, objects)
    checkpoints = CheckpointManager(engine, saved_to, *facts)
    opened = data(config, engine.mesh, length, vocab)
    return trainer(
        config, engine, opened, length, batches, lr_schedule, metrics, watchdog, checkpoints, tasks
    )


# Settings that change only training steps, and their values for inference.
_FOR_TRAINING = {
    "training.compile": False,
    "training.deterministic_mode": False,
    "training.checkpoint_activations": False,
    "training.recompute_granularity": None,
    "training.partition_activations": False,
    "training.checkpoint_in_cpu": False,
    "optimizer.use_apex": False,
}


def config_of_layout(checkpoint: Checkpoint, parallel: ParallelConfig) -> Config:
    """Returns the config of the checkpoint's model on another layout. Raises UserError if they do not fit."""
    config = replace(checkpoint.config, parallel=parallel).with_settings(_FOR_TRAINING)
    raise_first(chain(layout_mistakes(config), model_mistakes(config)))
    plan_stages(config, checkpoint.vocab_size)
    return config


@torch.no_grad()
def load_distributed_model(
    checkpoint: Checkpoint, config: Config, rank: int, micro_batch_size: int
) -> DistributedGPT:
    """Returns this rank's part of the model, in evaluation mode. Collective: each rank reads its own shards.
    Raises UserError on all ranks if one of them cannot read a file."""
    mesh = Mesh.from_config(config.parallel, rank).connect()
    vocab = Vocabulary(checkpoint.vocab_size, checkpoint.eod)
    module = build_model(config, mesh, vocab, values=zeros)
    problem = None
    try:
        _load_weights(module, checkpoint, mesh.axes)
    except UserError as error:
        problem = str(error)
    # All ranks raise, because they would wait for a rank that raises alone.
    if (found := first_problem_of_ranks(problem)) is not None:
        raise SharedUserError(found[1])
    return DistributedGPT(module.eval(), mesh, micro_batch_size)


def _load_weights(module: GPTModelPipe, checkpoint: Checkpoint, axes: Sequence[Axis]) -> None:
    reader = open_reader(checkpoint)
    for name, parameter in module.named_parameters():
        if name not in reader.stored_names:
            raise UserError(f"checkpoint {checkpoint.folder} holds no parameter {name}")
        shard = reader.read_shard(name, VALUES, spec_of(parameter), axes)
        parameter.copy_(shard.view_as(parameter))
