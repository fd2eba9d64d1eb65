"""The training loop."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from megatron.checkpoint.manager import CheckpointManager, FolderTakenError, SaveError, TrainingState
from megatron.cluster.exit_codes import RunStopped
from megatron.cluster.signals import ExitConditions, ExitReason
from megatron.cluster.watchdog import Watchdog
from megatron.config import Config
from megatron.config.batch import BatchSchedule
from megatron.config.vocab import padded_vocab_size
from megatron.data.loader import GPTBatchLoader, truncated
from megatron.engine.pipeline_engine import GPTEngine
from megatron.optimizer.mixed_precision import NonFiniteError
from megatron.optimizer.schedule import LearningRateSchedule, Progress
from megatron.planner.flops import iteration_flops, recomputes_scores
from megatron.training.data import RunData, RunLength
from megatron.training.evaluate import evaluate, validation_start
from megatron.training.logging.metrics import MetricsLogger, StepRecord, Throughput, ValidationRecord
from megatron.training.logging.startup_report import StartupReport
from megatron.training.logging.writers import make_writers
from megatron.training.stability.monitor import StabilityMonitor


def run_length(config: Config, schedule: BatchSchedule) -> RunLength:
    """Iterations and samples of the whole run, resumed or not."""
    iterations = schedule.total_iterations(config.training, config.model.seq_length, config.curriculum)
    return RunLength(iterations, schedule.consumed_after(iterations))


@dataclass
class Trainer:
    """The parts that the loop works with, each made in `megatron.training.run`."""

    config: Config
    engine: GPTEngine
    data: RunData
    length: RunLength
    batches: BatchSchedule
    lr_schedule: LearningRateSchedule
    metrics: MetricsLogger
    watchdog: Watchdog
    checkpoints: CheckpointManager
    exit_reason: ExitReason | None = field(default=None, init=False)
    """Why `train` left before the last iteration, if it did."""
    startup_report: StartupReport = field(init=False)
    stability: StabilityMonitor = field(init=False)

    def __post_init__(self) -> None:
        self.startup_report = StartupReport(self.config, self.engine.layout)
        self.stability = StabilityMonitor(
            self.config, self.engine, self.batches, self.metrics, self.checkpoints
        )

    def train(self, state: TrainingState) -> TrainingState:
        """Trains from `state` to the end of the run or to a reason to leave; returns the state reached."""
        training, save_interval = self.config.training, self.config.checkpoint.save_interval
        if training.no_train:
            return state
        saved = state
        exits = ExitConditions.from_config(training, self.watchdog.report, self.checkpoints.folder_loss)
        exits.install_handlers()
        self.watchdog.start(training.hang_timeout, signals_handled="SIGTERM" in training.exit_signal)
        self.exit_reason = exits.reason_before_training(self.engine.device)
        while state.iteration < self.length.iterations and self.exit_reason is None:
            state = self.advance(state)
            self.stability.check_invariants(state.iteration)
            if self.data.valid and training.eval_iters and state.iteration % training.eval_interval == 0:
                self.evaluate(state, "validation")
            if save_interval and state.iteration % save_interval == 0:
                self.checkpoint(state)
                saved = state
            self.exit_reason = exits.reason(state.iteration, self.engine.device)
            self.watchdog.heartbeat(state.iteration)
        if self.config.checkpoint.save and saved != state:
            self.checkpoint(state)
        if self.exit_reason:
            nothing_saved = "" if self.config.checkpoint.save else "; nothing is saved without --save"
            self.metrics.print(self.exit_reason.sentence + nothing_saved)
        return state

    @property
    def should_requeue(self) -> bool:
        """Whether the run was cut short, and the same command would go on from what it has saved."""
        return (
            self.exit_reason is not None
            and self.exit_reason.should_requeue
            and self.config.checkpoint.save is not None
        )

    def advance(self, state: TrainingState) -> TrainingState:
        """One step, or past the iterations that are to be skipped."""
        return self.stability.skip_range(state, self.length.iterations) or self.step(state)

    def step(self, state: TrainingState) -> TrainingState:
        """One optimizer step on the next global batch; returns the state reached, after a rollback too."""
        started = time.perf_counter()
        batch_size = self.batches.global_batch_size_at(state.consumed_samples)
        seq_length = self.config.seq_length_at(state.iteration + 1)
        progress = Progress(
            state.iteration + 1,
            state.consumed_samples + batch_size,
            state.consumed_tokens + batch_size * seq_length,
        )
        rate = self.lr_schedule.rate(progress)
        micro_batches = _micro_batches(self.engine, self.data.train, state.consumed_samples, batch_size)
        try:
            loss = self.engine.train_step(
                truncated(micro_batches, seq_length),
                state.consumed_samples,
                batch_size,
                rate,
                seq_length=seq_length,
                **self.stability.step_options(state),
            )
        except NonFiniteError as error:
            raise self.stability.diagnose(error, progress.iteration) from error
        optimizer = self.engine.optimizer
        self.metrics.log_step(
            StepRecord(
                iteration=progress.iteration,
                total_iterations=self.length.iterations,
                consumed_samples=progress.consumed_samples,
                consumed_tokens=progress.consumed_tokens,
                learning_rate=rate,
                global_batch_size=batch_size,
                seq_length=seq_length,
                loss=loss,
                grad_norm=optimizer.grad_norm,
                loss_scale=optimizer.scaler.scale if self.config.precision.fp16 else None,
                skipped=optimizer.skipped,
                seconds=time.perf_counter() - started,
            )
        )
        for text in self.startup_report.lines(optimizer, progress.iteration == self.length.iterations):
            self.metrics.print(text)
        return self.stability.post_step(
            TrainingState(
                progress.iteration,
                progress.consumed_samples,
                progress.consumed_tokens,
                state.skipped_iterations + int(optimizer.skipped),
                state.skips_in_a_row + 1 if optimizer.skipped else 0,
                state.rollbacks,
            )
        )

    def checkpoint(self, state: TrainingState) -> None:
        """Saves, and says where."""
        started = time.perf_counter()
        try:
            folder = self.checkpoints.save(state)
        except FolderTakenError as error:
            raise RunStopped(str(error)) from error
        except SaveError as error:
            raise RunStopped(
                f"{error}: once that is mended, the run resumes from the checkpoint before", everywhere=False
            ) from error
        seconds = time.perf_counter() - started
        self.watchdog.heartbeat(state.iteration)
        if self.engine.global_rank != 0:
            return  # on a shared file system it may not see the folder yet
        size = sum(path.stat().st_size for path in folder.iterdir())
        self.metrics.print(
            f"saved {folder} in {seconds:.1f} s, {size / 1e6:,.1f} MB, {size / 1e6 / seconds:,.1f} MB/s"
        )

    def evaluate_at_end(self, state: TrainingState) -> None:
        """Evaluates on validation and test data once the run is over; one that left early goes on later."""
        if self.config.training.no_train or state.iteration >= self.length.iterations:
            for split, data in (("validation", "val"), ("test", "test")):
                at = f"the end of training for {data} data, iteration {state.iteration}"
                self.evaluate(state, split, at)

    def evaluate(self, state: TrainingState, split: str, at: str = "") -> None:
        """Evaluates on each group of a split ('validation' or 'test') and logs its loss."""
        loaders = self.data.valid if split == "validation" else self.data.test
        if self.config.training.eval_iters == 0:
            return
        # A checkpoint may be from beyond the end of this run, where there are no validation samples.
        iteration = min(state.iteration, self.length.iterations)
        first = validation_start(self.config, iteration) if split == "validation" else 0
        for name, loader in loaders.items():
            loss = evaluate(self.engine, loader, self.config, first)
            self.watchdog.heartbeat(state.iteration)
            self.metrics.log_validation(
                ValidationRecord(
                    state.iteration, state.consumed_samples, state.consumed_tokens, loss.item(), name, at
                )
            )


def _micro_batches(
    engine: GPTEngine, loader: GPTBatchLoader, consumed_samples: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
    """The step's micro-batches; the stages between the first and the last read none."""
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return iter(())
    return loader.micro_batches(consumed_samples, batch_size)


def make_metrics(config: Config, vocab_size: int, rank: int) -> MetricsLogger:
    """The logger of a run: rank 0 speaks."""
    model, parallel = config.model, config.parallel

    def flops_per_sample(seq_length: int) -> float:
        return iteration_flops(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            seq_length=seq_length,
            padded_vocab_size=padded_vocab_size(vocab_size, model, parallel.tensor_model_parallel_size),
            batch_size=1,
            recompute=config.training.recomputes_layers,
            recompute_attention=recomputes_scores(config),
            gated_mlp=model.glu_activation is not None,
        )

    throughput = Throughput(
        flops_per_sample=flops_per_sample,
        world_size=parallel.world_size,
        data_parallel_size=parallel.data_parallel_size,
        has_curriculum=config.curriculum is not None,
    )
    writers = make_writers(config) if rank == 0 else []
    return MetricsLogger(config.logging, throughput, enabled=rank == 0, writers=writers)
