"""Simulates one rank of a run on the simulated device, with the run's own code.

`simulate_rank` makes the process group, the model, the engine and the trainer as `megatron.training.run`
does, and takes two of the trainer's steps. It records the second step, since optimizer state and tables then
exist. No other rank exists: the backend's collectives return at once.

The process that calls `simulate_rank` cannot be used for anything else afterwards, so `stages` calls it in
new processes.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.checkpoint.manager import CheckpointManager
from megatron.checkpoint.record import TrainingState
from megatron.cluster import processes
from megatron.cluster.rank_reports import RankReport
from megatron.cluster.watchdog import Watchdog
from megatron.config import Config
from megatron.engine.pipeline_engine import GPTEngine
from megatron.engine.profiler_ranges import TRAIN_STEP
from megatron.model.attention.choice import run_uses_kernels
from megatron.mpu.mesh import Mesh
from megatron.optimizer.batch_schedule import RunLength
from megatron.planner.layer_memory import planned_run
from megatron.planner.simulation.device import POINT_TO_POINT, SimulatedDevice, process_group_of
from megatron.planner.simulation.rank_process import (
    SimulatedAccelerator,
    no_values,
    simulated_process,
    state_tensors,
)
from megatron.run import Run
from megatron.training.build import build_engine, build_trainer
from megatron.training.startup_report import StartupReport
from megatron.training.trainer import Trainer, make_metrics
from tests.support.simulation.memory import StepMemory
from tests.support.simulation.record import Instruction, StepRecord
from tests.support.simulation.trace import StepTrace

_STEPS = 2
_NEVER = 2**40
# A first micro-batch, two that must have equal counts, and a last one.
_LEAST_MICRO_BATCHES = 4
# Groups of micro-batches with --pipeline-schedule interleaved. They contain the warm-up, and each pair of
# passes of the steady state more than once.
_GROUPS = 4


def simulated_micro_batches(config: Config) -> int:
    """Returns the number of micro-batches in a simulated step. It is large enough to fill the pipeline and to
    compare several micro-batches, and not larger than the run's number."""
    parallel = config.parallel
    if parallel.schedule.micro_batches_multiple_of_ranks:
        enough = _GROUPS * parallel.micro_batch_multiple
    else:
        enough = max(parallel.num_stages + 1, parallel.min_micro_batches + 1, _LEAST_MICRO_BATCHES)
    return min(config.micro_batches_per_step, enough)


class StepDevice(SimulatedDevice):
    """The simulated device, with the NCCL communicators that its calls need."""

    trace: StepTrace
    memory: StepMemory

    def __init__(self) -> None:
        memory = StepMemory()
        super().__init__(StepTrace(memory), memory)
        self.communicators: set[tuple[str, int | None]] = set()

    def _run_collective(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Records the communicator of a process group, or of the two ranks of a message outside a batch.
        Messages of the default group are sent one at a time, messages of other groups in batches
        (`engine.executor`). A group of one rank needs no buffers."""
        group = process_group_of(args)
        if dist.get_world_size(group) > 1:
            alone = name in POINT_TO_POINT and group == dist.group.WORLD
            self.communicators.add((group.group_name, int(args[2]) if alone else None))
        return super()._run_collective(func, name, args, kwargs)


class _Accelerator(SimulatedAccelerator):
    """Reads the profiler ranges of the engine, which mark the beginning and end of steps and instructions."""

    simulated: StepDevice

    def __init__(self, simulated: StepDevice, kernels: bool) -> None:
        super().__init__(simulated, kernels)
        self._open: list[Any] = []
        self.on_step = lambda: None

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        name, *arguments = msg.split(" ")
        context: Any = nullcontext()
        if name == TRAIN_STEP:
            self.on_step()
            self.simulated.trace.begin_step()
        elif name.isidentifier():
            values = {key: int(value) for key, _, value in (part.partition("=") for part in arguments)}
            instruction = Instruction(name, values.get("model_chunk_id", 0))
            context = self.simulated.trace.instruction(instruction, values.get("buffer_id", 0))
        self._open.append(context)
        context.__enter__()

    def range_pop(self, domain: Any = None) -> None:
        self._open.pop().__exit__(None, None, None)


def simulate_rank(config: Config, rank: int, micro_batches: int | None = None) -> StepRecord:
    """Simulates a training step of `rank`. Returns its record. The device runs Triton kernels if
    `model.attention.choice.run_uses_kernels` returns True. micro_batches: None means
    `simulated_micro_batches`."""
    run = planned_run(config)
    mesh = Mesh.from_config(config.parallel, rank)
    count = micro_batches or simulated_micro_batches(config)
    first = config.curriculum.steps if config.curriculum is not None else 0
    config = _simulated_config(config, count)
    simulated = StepDevice()
    accelerator = _Accelerator(simulated, run_uses_kernels(config))
    # The report of the first steps would need values of all ranks.
    no_report = patch.object(StartupReport, "lines", lambda *_: iter(()))
    with simulated_process(mesh, accelerator), no_report:
        trainer = _make_trainer(dataclasses.replace(run, config=config, mesh=mesh))
        engine = trainer.engine
        accelerator.on_step = lambda: simulated.memory.mark_state(
            chain(*state_tensors(engine.module, engine.optimizer).values())
        )
        start_peak = simulated.memory.peak
        state = TrainingState(first, 0, 0)
        for _ in range(_STEPS):  # `train` would gather weights at its end
            state = trainer.advance(state)
        return _record(simulated, trainer.engine, mesh, count, start_peak)


def _simulated_config(config: Config, micro_batches: int) -> Config:
    """Returns the run's configuration with `micro_batches` per step, and without logs and files that a run
    reads or writes. The first of the two steps only makes the state and is not recorded, so it has as few
    micro-batches as the layout allows."""
    batch, parallel = config.batch, config.parallel
    unit = batch.micro_batch_size * parallel.data_parallel_size
    size, first = micro_batches * unit, max(parallel.min_micro_batches, parallel.micro_batch_multiple) * unit
    return config.with_settings(
        {
            "batch.global_batch_size": size,
            "batch.rampup_batch_size": (first, size - first, first) if first < size else None,
            "checkpoint.save": None,
            "checkpoint.load": None,
            "parallel.distributed_backend": None,
            "model.moe_router_force_load_balancing": config.model.num_experts is not None,
            "training.hang_timeout": 0.0,
            "training.deepspeed_config": None,
            "training.compile": False,
            "training.deterministic_mode": False,
            "logging.tensorboard_dir": None,
            "logging.wandb_project": None,
            "logging.log_path": None,
            "logging.log_interval": _NEVER,
            "data.mock_data": True,
            "data.data_path": (),
            "data.num_workers": 0,
            "stability.skip_train_iteration_range": (),
        }
    )


def _make_trainer(run: Run) -> Trainer:
    rank = processes.init_distributed(run.config, FakeStore())
    vocab = dataclasses.replace(run.vocab, eod=run.vocab.eod or 0)
    run = dataclasses.replace(run, vocab=vocab, mesh=run.mesh.connect())
    # The simulated steps are not the last steps of a run, and they read few samples.
    vars(run)["length"] = RunLength(_NEVER, _STEPS * run.config.batch.global_batch_size)
    engine = build_engine(run, no_values)
    watchdog = Watchdog(RankReport(None, str(rank)))
    return build_trainer(engine, CheckpointManager(engine, ""), make_metrics(run), watchdog)


def _record(
    simulated: StepDevice, engine: GPTEngine, mesh: Mesh, micro_batches: int, start_peak: int
) -> StepRecord:
    simulated.memory.end_instruction(None)
    return StepRecord(
        rank=mesh.rank,
        stage=mesh.pp.rank,
        micro_batches=micro_batches,
        parameters=sum(p.numel() for p in engine.module.parameters()),
        start_peak=start_peak,
        peak=simulated.memory.at_peak,
        end=simulated.memory.now(),
        communicators=len(simulated.communicators),
        works=tuple(simulated.trace.works),
        outside=simulated.trace.outside,
    )
