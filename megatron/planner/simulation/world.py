"""Simulates one rank of a run on the simulated device, with the run's own code.

`simulate_rank` makes the process group, the model, the engine and the trainer as `megatron.training.run`
does, and takes two of the trainer's steps. The second one is recorded, since optimizer state and tables then
exist. No other rank exists: the backend's collectives return at once.

The process that calls `simulate_rank` cannot be used for anything else afterwards: see `processes`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.checkpoint.compatibility import resumed_schedule
from megatron.checkpoint.record import TrainingState
from megatron.cluster import processes
from megatron.cluster.rank_reports import RankReport
from megatron.cluster.watchdog import Watchdog
from megatron.config import Config, ConfigError
from megatron.data.loader import GPTBatchLoader
from megatron.data.vocabulary import Vocabulary, find_vocabulary
from megatron.engine.pipeline_engine import GPTEngine
from megatron.model.attention_choice import run_uses_kernels
from megatron.mpu.layout import ParallelLayout
from megatron.optimizer.batch_schedule import BatchSchedule, RunLength
from megatron.optimizer.mixed_precision import MixedPrecisionOptimizer
from megatron.pipeline.layer_times import needs_profiling, read_layer_times
from megatron.pipeline.stages import StagePlan, plan_stages
from megatron.planner.simulation.device import SimulatedDevice
from megatron.planner.simulation.rank_process import mark_state, no_values, simulated_process
from megatron.planner.simulation.record import StepRecord
from megatron.training.build import build_engine, build_trainer
from megatron.training.data import RunData
from megatron.training.startup_report import StartupReport
from megatron.training.trainer import Trainer, make_metrics

_STEPS = 2
_NEVER = 2**40
# A first one, two that must have equal counts, and a last one.
_LEAST_MICRO_BATCHES = 4
# Groups of micro-batches with --pipeline-schedule interleaved: they contain the warm-up, and each pair of
# passes of the steady state more than once.
_GROUPS = 4


def simulated_micro_batches(config: Config) -> int:
    """Returns the number of micro-batches in a simulated step: enough to fill the pipeline and to compare
    several of them, but at most the run's number."""
    parallel = config.parallel
    if parallel.schedule.micro_batches_multiple_of_ranks:
        enough = _GROUPS * parallel.micro_batch_multiple
    else:
        enough = max(parallel.num_stages + 1, parallel.min_micro_batches + 1, _LEAST_MICRO_BATCHES)
    return min(config.micro_batches_per_step, enough)


def find_stages(config: Config) -> tuple[Vocabulary, StagePlan]:
    """Returns the vocabulary and the stages. Raises ConfigError if the stages depend on unmeasured times."""
    vocab = find_vocabulary(config)
    times = read_layer_times(config, vocab.size)
    if times is None and needs_profiling(config):
        raise ConfigError(
            "--simulate with --partition-method profile: the stages depend on times that a run measures. Set "
            "--partition-profile to the file of an earlier run, or set another --partition-method."
        )
    return vocab, plan_stages(config, vocab.size, times)


def simulate_rank(config: Config, rank: int, micro_batches: int | None = None) -> StepRecord:
    """Simulates a training step of `rank`, and returns its record. The device runs Triton kernels if
    `model.attention_choice.run_uses_kernels`. micro_batches: None takes `simulated_micro_batches`."""
    vocab, plan = find_stages(config)
    layout = ParallelLayout.from_config(config.parallel, rank)
    count = micro_batches or simulated_micro_batches(config)
    first = config.curriculum.steps if config.curriculum is not None else 0
    config = _simulated_config(config, count)
    with simulated_process(layout, run_uses_kernels(config)) as (simulated, ranges):
        trainer = _make_trainer(config, layout, vocab, plan, first)
        optimizer = trainer.engine.optimizer
        ranges.on_step = lambda: mark_state(simulated, optimizer)
        start_peak = simulated.memory.peak
        state = TrainingState(first, 0, 0)
        for _ in range(_STEPS):  # not `train`: at its end it gathers weights that the next step would gather
            state = trainer.advance(state)
        return _record(simulated, trainer.engine, layout, count, start_peak)


def _simulated_config(config: Config, micro_batches: int) -> Config:
    """Returns the run's configuration with `micro_batches` per step, without logs, and files that a run reads
    or writes. The first of the two steps only makes the state and is not recorded, so it has as few
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
            "training.hang_timeout": 0.0,
            "training.deepspeed_config": None,
            "training.compile": False,
            "training.deterministic_mode": False,
            "logging.tensorboard_dir": None,
            "logging.wandb_project": None,
            "logging.log_path": None,
            "logging.log_interval": _NEVER,
            "data.num_workers": 0,
            "stability.skip_train_iteration_range": (),
        }
    )


class _EmptySamples:
    """A data set of zeros instead of token files: no result of a simulation depends on tokens."""

    name = "simulated"

    def __init__(self, count: int, seq_length: int) -> None:
        self._count, self._sample = count, np.zeros(seq_length + 1, dtype=np.int64)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> np.ndarray:
        return self._sample


class _NoReport(StartupReport):
    """Reports nothing: the report needs values of all ranks, but only one rank is simulated."""

    def lines(self, optimizer: MixedPrecisionOptimizer, is_last: bool) -> Iterator[str]:
        return iter(())


class _SimulatedTrainer(Trainer):
    """The run's trainer without the report of the first steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.startup_report = _NoReport(self.config, self.engine.layout)


def _make_trainer(
    config: Config, layout: ParallelLayout, vocab: Vocabulary, plan: StagePlan, first: int
) -> Trainer:
    rank = processes.init_distributed(config, FakeStore())
    vocab = dataclasses.replace(vocab, eod=vocab.eod or 0)
    tp_group = layout.make_tp_group()
    engine = build_engine(config, layout, tp_group, vocab, plan.bounds, no_values)
    return build_trainer(
        config,
        engine,
        vocab,
        RunLength(_NEVER, _STEPS * config.batch.global_batch_size),
        BatchSchedule.from_config(config.batch),
        resumed_schedule(None, config),
        make_metrics(config, vocab.size, rank),
        Watchdog(RankReport(None, str(rank))),
        data=_no_tokens,
        trainer=_SimulatedTrainer,
    )


def _no_tokens(config: Config, layout: ParallelLayout, length: RunLength, vocab: Vocabulary) -> RunData:
    loader = GPTBatchLoader(
        _EmptySamples(length.train_samples, config.model.seq_length),
        micro_batch_size=config.batch.micro_batch_size,
        dp_rank=layout.dp_rank,
        dp_size=layout.dp_size,
        eod=vocab.eod,
        eod_mask_loss=config.data.eod_mask_loss,
        reads_tokens=config.parallel.reads_tokens(layout.pipeline_stage),
    )
    return RunData(loader, {}, {})


def _record(
    simulated: SimulatedDevice, engine: GPTEngine, layout: ParallelLayout, micro_batches: int, start_peak: int
) -> StepRecord:
    first, rest, last = simulated.trace.by_instruction()
    simulated.memory.end_instruction(None)
    return StepRecord(
        rank=layout.rank,
        stage=layout.pipeline_stage,
        world_size=layout.world_size,
        micro_batches=micro_batches,
        parameters=sum(p.numel() for p in engine.module.parameters()),
        start_peak=start_peak,
        peak=simulated.memory.peak_memory(),
        end=simulated.memory.current_memory(),
        host_bytes=simulated.host_memory.total,
        communicators=len(simulated.communicators - {None}),
        first=first,
        rest=rest,
        last=last,
        order=simulated.trace.order,
        outside=simulated.trace.outside,
    )
