"""The training loop."""

import gc
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed.accelerator import get_accelerator

from megatron.checkpoint.huggingface.run_export import export_model
from megatron.checkpoint.manager import CheckpointManager, FolderTakenError, SaveError
from megatron.checkpoint.record import TrainingState
from megatron.cluster.exit_codes import RankStopped, RunStopped, SharedUserError
from megatron.cluster.exit_status import ExitStatus
from megatron.cluster.signals import ExitConditions, ExitReason, is_due
from megatron.cluster.watchdog import Phase, Watchdog
from megatron.config import CheckpointConfig, Config
from megatron.data.loader import GPTBatchLoader
from megatron.engine.pass_times import bubble_line
from megatron.engine.pipeline_engine import GPTEngine
from megatron.errors import UserError
from megatron.model.flops import iteration_flops
from megatron.model.inference.distributed import MICRO_BATCHES_PER_STAGE
from megatron.mpu.world import broadcast_from_rank_0
from megatron.optimizer.batch_schedule import Progress
from megatron.optimizer.mixed_precision import NonFiniteError
from megatron.run import Run
from megatron.training.data import RunData
from megatron.training.garbage import collections_after_steps
from megatron.training.harness.live import run_tasks
from megatron.training.metrics import MetricsLogger, StepRecord, Throughput
from megatron.training.profiler import StepProfiler
from megatron.training.stability import StabilityMonitor, range_to_skip
from megatron.training.startup_report import StartupReport
from megatron.training.writers import make_writers

if TYPE_CHECKING:
    from megatron.training.harness.model import Tasks

_LOG = logging.getLogger(__name__)

# Fewer consecutive skipped fp16 steps after a resume are normal: the loss scale may just have grown.
_MANY_SKIPPED_STEPS = 10


@dataclass
class UpdateCount:
    """The number of steps since the start of this process, and how many of them updated the weights. Ranges
    of --skip-train-iteration-range do not count as steps."""

    num_steps: int = 0
    num_updates: int = 0

    def add(self, skipped: bool) -> None:
        """Counts a step."""
        self.num_steps += 1
        self.num_updates += not skipped

    def problem(self, fp16: bool) -> str | None:
        """Returns a sentence if there were steps but no update, otherwise None."""
        if self.num_updates or not self.num_steps:
            return None
        why = "with fp16 because of overflows: set --initial-loss-scale lower, or use --bf16"
        if not fp16:
            why = "by --spike-policy"
        return (
            f"none of the {self.num_steps} steps since the launch updated the weights: all were skipped "
            f"({why})"
        )


def after_failed_save(iteration: int, checkpoint: CheckpointConfig) -> str:
    """Returns what the user should do after a failed save. iteration: of the newest checkpoint, or 0."""
    if not iteration:
        return "nothing has been saved before; fix this, then start again"
    load = "" if checkpoint.load else f" with --load {checkpoint.save}"
    return f"fix this, then the run resumes from iteration {iteration}{load}"


@dataclass
class Trainer:
    """Trains, evaluates and saves with the objects that `megatron.training.run` creates."""

    engine: GPTEngine
    data: RunData
    metrics: MetricsLogger
    watchdog: Watchdog
    checkpoints: CheckpointManager
    tasks: "Tasks | None" = None
    """The tasks of --eval-harness-tasks; None on all ranks except rank 0."""
    run: Run = field(init=False)
    exit_reason: ExitReason | None = field(default=None, init=False)
    """The reason why `train` stopped before the last iteration; None if it did not."""
    startup_report: StartupReport = field(init=False)
    stability: StabilityMonitor = field(init=False)
    exits: ExitConditions = field(init=False)
    resumable_iteration: int = field(default=0, init=False)
    """The iteration of the run's newest checkpoint; 0 without a checkpoint."""
    updates: UpdateCount = field(default_factory=UpdateCount, init=False)
    exit_code: int | None = field(default=None, init=False)
    """The largest `ExitConditions.code_of_this_rank` of all ranks in the last step; None after an evaluation
    or a save."""

    def __post_init__(self) -> None:
        self.run = self.engine.run
        self.exits = ExitConditions(
            self.run.config.training, self.watchdog.report, self.checkpoints.ownership_lost_reason
        )
        self.profiler = StepProfiler(self.run, self.metrics.print)
        self.startup_report = StartupReport(self.run)
        self.stability = StabilityMonitor(self.engine, self.metrics, self.checkpoints, self.watchdog)

    def train(self, state: TrainingState) -> TrainingState:
        """Trains from `state` to the last iteration or to an early exit. Returns the state at the end."""
        training, options = self.run.config.training, self.run.config.checkpoint
        if training.no_train:
            return state
        saved = None if self.checkpoints.started_from_local else state
        self.resumable_iteration = state.iteration
        self.watchdog.set_handled_signals(self.exits.install_handlers())
        if not self._stop_requested(state) and state.pending_evaluations:
            state = self._evaluate_interval(state, state.pending_evaluations)
        with collections_after_steps() as collect_garbage, self.profiler:
            while state.iteration < self.run.length.iterations and self.exit_reason is None:
                self.exit_code, previous = None, state.iteration
                with self.watchdog.phase(Phase.STEP):
                    with self.profiler.iteration(previous + 1):
                        state = self.advance(state)
                    self.stability.check_invariants(previous, state.iteration)
                    collect_garbage(self.updates.num_steps)
                self.watchdog.report.set_iteration(state.iteration)
                now = (previous, state.iteration)
                if self.data.valid and training.eval_iters and is_due(training.eval_interval, *now):
                    state = self._evaluate_interval(state, len(self.data.valid))
                if is_due(options.save_interval, *now):
                    self.checkpoint(state, in_background=options.async_save)
                    saved = state
                elif is_due(options.save_local_interval, *now):
                    self.checkpoint_locally(state)
                if is_due(options.save_hf_interval, *now):
                    self._export(state)
                self._announce_saves()
                if is_due(training.eval_harness_interval, *now) and self.exit_reason is None:
                    self._evaluate_tasks(state)
                self.exit_reason = self.exits.reason(
                    state.iteration, self.engine.device, self.exit_code, previous
                )
        self.engine.optimizer.wait_for_params()  # a rank that exits would interrupt the others
        with self.watchdog.phase(Phase.SAVE):
            last = self.checkpoints.finish_save()
        self._announce_saves()
        has_failed = last is not None and last.problem and not last.is_local
        if options.save and (saved != state or has_failed):
            self.checkpoint(state)
            with self.watchdog.phase(Phase.SAVE):
                self.checkpoints.finish_save()  # waits until old checkpoints are deleted
        if options.save_hf_at_end and state.iteration >= self.run.length.iterations:
            self._export(state, replace_folder=False)
        self._print_exit_reason()
        return state

    def _print_exit_reason(self) -> None:
        if self.exit_reason:
            self.metrics.flush()  # prints the lines of the last steps first
            self.metrics.print(self.exit_reason.line(self.run.config.checkpoint))

    @property
    def exit_status(self) -> ExitStatus:
        """Returns how the run ended: REQUEUE if it stopped early and the same command resumes it."""
        options = self.run.config.checkpoint
        return self.exit_reason.final_status(options) if self.exit_reason else ExitStatus.FINISHED

    def advance(self, state: TrainingState) -> TrainingState:
        """Takes one step, or skips a range of iterations."""
        return self.stability.skip_range(state) or self.step(state)

    def is_logged(self, iteration: int) -> bool:
        """Returns whether a log line follows this iteration: whether a line is due at the iteration, or in
        skipped ranges that follow the iteration directly."""
        total, end = self.run.length.iterations, iteration
        while skipped := range_to_skip(self.run, end):
            end = skipped[1]
        return end == total or is_due(self.run.config.logging.log_interval, iteration - 1, end)

    def step(self, state: TrainingState) -> TrainingState:
        """Takes one optimizer step on the next global batch. Returns the state after the step, or the state
        after a rollback."""
        started = time.perf_counter()
        batch_size = self.run.batches.global_batch_size_at(state.consumed_samples)
        seq_length = self.run.config.seq_length_at(state.iteration + 1)
        progress = Progress(
            state.iteration + 1,
            state.consumed_samples + batch_size,
            state.consumed_tokens + batch_size * seq_length,
        )
        lr = self.run.lr_schedule.lr(progress)
        assert self.data.train is not None  # without training, no step is taken
        micro_batches = self.data.train.micro_batches(state.consumed_samples, batch_size)
        try:
            with self.engine.module.metrics.recording():
                loss = self.engine.train_step(
                    (batch.truncated(seq_length) for batch in micro_batches),
                    batch_size,
                    lr,
                    seq_length=seq_length,
                    masks_tokens=self.data.train.masks_tokens,
                    exit_code_fn=self.exits.code_of_this_rank,
                    heartbeat=self.watchdog.heartbeat,
                    **self.stability.step_options(state),
                )
        except NonFiniteError as error:
            raise self.stability.diagnose(error, progress.iteration) from error
        optimizer = self.engine.optimizer
        self.exit_code = optimizer.exit_code
        is_logged = self.is_logged(progress.iteration)
        recorded = self.engine.module.metrics.collect(self.engine.device) if is_logged else {}
        self.updates.add(optimizer.skipped)
        reached = TrainingState(
            progress.iteration,
            progress.consumed_samples,
            progress.consumed_tokens,
            state.skipped_iterations + int(optimizer.skipped),
            state.skips_in_a_row + 1 if optimizer.skipped else 0,
            state.rollbacks,
            warmup_end=self.run.lr_schedule.warmup_end,
        )
        self.metrics.log_step(
            StepRecord(
                state=reached,
                total_iterations=self.run.length.iterations,
                learning_rate=lr,
                global_batch_size=batch_size,
                seq_length=seq_length,
                loss=loss,
                grad_norm=optimizer.grad_norm,
                loss_scale=optimizer.scaler.scale if self.run.config.precision.fp16 else None,
                skipped=optimizer.skipped,
                seconds=time.perf_counter() - started,
                recorded=recorded,
            )
        )
        if is_logged:
            self.metrics.flush()
        if self.engine.pass_times and is_logged:
            self.metrics.print(bubble_line(self.engine.pass_times, self.engine.mesh))
        for text in self.startup_report.lines(optimizer, progress.iteration == self.run.length.iterations):
            self.metrics.print(text)
        return self.stability.post_step(reached)

    def checkpoint(self, state: TrainingState, in_background: bool = False) -> None:
        """Saves a checkpoint and prints its path. in_background: returns once the state is copied;
        `_announce_saves` prints the path when the checkpoint is complete."""
        self.exit_code = None
        started = time.perf_counter()
        try:
            with self.watchdog.phase(Phase.SAVE):
                self.checkpoints.finish_save()
                self._announce_saves()
                waited = time.perf_counter() - started
                folder = self.checkpoints.save(state, in_background)
        except FolderTakenError as error:
            raise RunStopped(str(error)) from error
        except SaveError as error:
            remedy = after_failed_save(self.resumable_iteration, self.run.config.checkpoint)
            raise RankStopped(f"{error}: {remedy}") from error
        seconds = time.perf_counter() - started
        if folder is None:
            why = f", {waited:.1f} s of them for the save before" if waited >= 0.1 else ""
            self.metrics.print(
                f"saving iteration {state.iteration} in the background: training waited {seconds:.1f} s{why}"
            )
            return
        self._note_saved(state.iteration)
        if self.engine.global_rank != 0:
            return  # other nodes may not see the folder yet on a network file system
        size = sum(path.stat().st_size for path in folder.iterdir())
        self.metrics.print(
            f"saved {folder} in {seconds:.1f} s, {size / 1e6:,.1f} MB, {size / 1e6 / seconds:,.1f} MB/s"
        )

    def checkpoint_locally(self, state: TrainingState) -> None:
        """Begins to save a local checkpoint, unless a previous save is still in flight."""
        self.exit_code = None
        started = time.perf_counter()
        with self.watchdog.phase(Phase.SAVE):
            has_begun = self.checkpoints.save_local(state)
        if has_begun:
            self.metrics.print(
                f"saving iteration {state.iteration} locally: training waited "
                f"{time.perf_counter() - started:.1f} s"
            )
        else:
            assert self.checkpoints.local is not None
            text = "iteration %d is not saved locally: a save is in flight (%d left out)"
            _LOG.info(text, state.iteration, self.checkpoints.local.num_left_out)

    def _export(self, state: TrainingState, replace_folder: bool = True) -> None:
        """Writes the model for Hugging Face transformers. A failure is only a warning: the checkpoint has the
        weights, too. replace_folder: whether to replace a folder that exists."""
        self.exit_code = None
        started = time.perf_counter()
        folder = Path(str(self.run.config.checkpoint.save)) / f"huggingface_step{state.iteration}"
        if not (replace_folder or broadcast_from_rank_0(not folder.exists())):
            return
        try:
            with self.watchdog.phase(Phase.SAVE):
                written = export_model(
                    self.engine, folder, self.watchdog.heartbeat, self.checkpoints.check_owner
                )
        except FolderTakenError as error:
            raise RunStopped(str(error)) from error
        except UserError as error:
            self.metrics.print(
                f"warning: {error}: the run continues; tools/convert_huggingface.py writes the model of a "
                "checkpoint"
            )
            return
        seconds = time.perf_counter() - started
        self.metrics.print(
            f"wrote {folder} in {seconds:.1f} s: {written.architecture} in {self.run.config.precision.name}, "
            f"{written.num_bytes / 1e6:,.1f} MB"
        )

    def _announce_saves(self) -> None:
        """Prints a line for each background save that has ended."""
        for outcome in self.checkpoints.background.take_outcomes():
            if outcome.problem:
                kind = "local checkpoint" if outcome.is_local else "checkpoint"
                what_next = "" if outcome.is_local else ": the next save is not in the background"
                self.metrics.print(
                    f"warning: {kind} {outcome.folder} was not saved ({outcome.problem}){what_next}"
                )
                continue
            if not outcome.is_local:  # a local checkpoint may be lost
                self._note_saved(outcome.iteration)
            how = "on the nodes' disks" if outcome.is_local else "in the background"
            self.metrics.print(
                f"saved {outcome.folder} {how}, {outcome.num_bytes / 1e6:,.1f} MB, "
                f"{outcome.seconds:.1f} s after its begin"
            )

    def _note_saved(self, iteration: int) -> None:
        self.resumable_iteration = iteration
        self.watchdog.report.note(saved_iteration=iteration)
        if not self.run.config.checkpoint.load:
            self.watchdog.report.note(load_to_resume=self.run.config.checkpoint.save)

    def evaluate_at_end(self, state: TrainingState) -> None:
        """Evaluates on validation and test data after the last iteration, or with --eval-only, but not after
        an early exit."""
        if not self.run.config.training.no_train and state.iteration < self.run.length.iterations:
            return
        for split, data in (("validation", "val"), ("test", "test")):
            at = f"the end of training for {data} data, iteration {state.iteration}"
            if self.evaluate(state, split, at):
                self._print_exit_reason()
                return

    def check_updates(self, state: TrainingState) -> None:
        """Prints a warning if every step since the start of this process was skipped. After the last
        iteration, raises RunStopped instead, unless there were few steps and earlier processes of the run
        have updated the weights."""
        problem = self.updates.problem(self.run.config.precision.fp16)
        if problem is None:
            return
        is_unusual = (
            self.updates.num_steps >= _MANY_SKIPPED_STEPS or state.skipped_iterations >= state.iteration
        )
        if state.iteration >= self.run.length.iterations and is_unusual:
            raise RunStopped(problem)
        self.metrics.print(f"WARNING: {problem}")

    def _evaluate_interval(self, state: TrainingState, count: int) -> TrainingState:
        """Evaluates on the last `count` validation data sets. After a request to stop, the returned state
        records how many data sets remain, so that a resumed run begins with these."""
        return replace(state, pending_evaluations=self.evaluate(state, "validation", count=count))

    def _stop_requested(self, state: TrainingState) -> bool:
        """Returns whether the run must stop during an evaluation, and sets `exit_reason`. Collective."""
        reason = self.exits.request(state.iteration, self.engine.device)
        self.exit_reason = reason or self.exit_reason
        return reason is not None

    def _evaluate_tasks(self, state: TrainingState) -> None:
        """Runs the tasks of --eval-harness-tasks. A request to stop ends the tasks, and the resumed run does
        not repeat them."""
        self.exit_code = None
        with self.watchdog.phase(Phase.EVALUATION):
            results = run_tasks(
                self.engine,
                self.tasks,
                partial(self._stop_requested, state),
                self.watchdog.heartbeat,
                self.metrics.print,
            )
        gc.collect()  # the harness leaves reference cycles, and automatic collections are off
        if results is None:
            self.metrics.print(f"the tasks at iteration {state.iteration} were stopped")
            return
        self.metrics.log_tasks(state, results)

    def evaluate(self, state: TrainingState, split: str, at: str = "", count: int | None = None) -> int:
        """Evaluates on the data sets of a split ('validation' or 'test'), or on the last `count` of them, and
        logs their losses. A request to stop ends the evaluation. Returns the number of data sets that
        remain."""
        loaders = list((self.data.valid if split == "validation" else self.data.test).items())
        loaders = loaders[max(len(loaders) - count, 0) :] if count is not None else loaders
        if self.run.config.training.eval_iters == 0:
            return 0
        self.exit_code = None
        # The checkpoint's iteration may be after this run's end, where no validation samples exist.
        iteration = min(state.iteration, self.run.length.iterations)
        if count is not None:  # due at a multiple of the interval, even inside a skipped range
            iteration -= iteration % self.run.config.training.eval_interval
        first = validation_start(self.run.config, iteration) if split == "validation" else 0
        for index, (name, loader) in enumerate(loaders):
            with self.watchdog.phase(Phase.EVALUATION):
                loss = evaluate(
                    self.engine,
                    loader,
                    first,
                    stop_requested=partial(self._stop_requested, state),
                    heartbeat=self.watchdog.heartbeat,
                )
            if loss is None:
                self.metrics.print(
                    f"the evaluation on {name} data at iteration {state.iteration} was stopped"
                )
                return len(loaders) - index
            self.metrics.log_validation(state, loss, name, at)
        return 0


def make_metrics(run: Run) -> MetricsLogger:
    """Returns the logger of a run, which prints and writes on rank 0."""
    config, vocab_size, rank = run.config, run.vocab.size, run.mesh.rank
    parallel, on_cpu = config.parallel, get_accelerator().device_name() == "cpu"

    def flops_per_sample(seq_length: int) -> float:
        return iteration_flops(config, vocab_size, batch_size=1, seq_length=seq_length, on_cpu=on_cpu)

    throughput = Throughput(
        flops_per_sample=flops_per_sample,
        world_size=parallel.world_size,
        data_parallel_size=parallel.data_parallel_size,
        has_curriculum=config.curriculum is not None,
    )
    writers = make_writers(config) if rank == 0 else []
    return MetricsLogger(
        config.logging, throughput, enabled=rank == 0, writers=writers, vocab_size=vocab_size
    )


def evaluate(
    engine: GPTEngine,
    loader: GPTBatchLoader,
    first_sample: int,
    *,
    stop_requested: Callable[[], bool],
    heartbeat: Callable[[], None],
) -> float | None:
    """Returns the mean loss over the unmasked tokens of `--eval-iters` global batches from sample
    `first_sample` on. Returns NaN if all tokens are masked (in --eval-only raises SharedUserError instead),
    and None if the evaluation was stopped. Collective.

    stop_requested: collective function with an equal result on all ranks, called between groups of
    micro-batches. heartbeat: called for every micro-batch.
    """
    config = engine.run.config
    samples = config.training.eval_iters * config.batch.global_batch_size
    num_micro_batches = config.training.eval_iters * config.micro_batches_per_step
    micro_batches = loader.micro_batches(first_sample, samples)
    # The size of the groups depends only on the layout, so that all ranks and all runs round the mean
    # equally.
    group = MICRO_BATCHES_PER_STAGE * config.parallel.num_stages
    losses = tokens = 0.0
    for start in range(0, num_micro_batches, group):
        if start and stop_requested():
            return None
        count = min(group, num_micro_batches - start)
        found = engine.evaluate_totals(micro_batches, count, heartbeat=heartbeat).tolist()
        losses, tokens = losses + found[0], tokens + found[1]
    if not tokens and config.training.no_train:
        raise SharedUserError(
            "--eval-only: all tokens are masked (--eod-mask-loss, or a loss mask): give other data"
        )
    return losses / tokens if tokens else math.nan


def validation_start(config: Config, iteration: int) -> int:
    """Returns the first validation sample of the evaluation at `iteration`. Evaluations use consecutive
    samples."""
    training = config.training
    evaluations_before = max(-(-iteration // training.eval_interval) - 1, 0)
    return evaluations_before * training.eval_iters * config.batch.global_batch_size
