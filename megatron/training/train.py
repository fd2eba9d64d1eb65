"""The training loop."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from megatron.checkpoint.native import RunCheckpoints, SaveError, TrainingState
from megatron.config import Config, TroubleConfig
from megatron.config.batch import BatchSchedule
from megatron.config.vocab import padded_vocab_size
from megatron.data.loader import GPTBatchLoader, truncated
from megatron.engine.pipeline_engine import GPTEngine
from megatron.optimizer.mixed_precision import NonFiniteError
from megatron.optimizer.schedule import LearningRateSchedule, Progress
from megatron.planner.flops import iteration_flops, recomputes_scores
from megatron.training.data import RunData, RunLength
from megatron.training.evaluate import evaluate, validation_start
from megatron.training.failures import RunStopped
from megatron.training.first_steps import FirstSteps
from megatron.training.invariants import broken_invariants
from megatron.training.metrics import MetricsLogger, StepRecord, Throughput, ValidationRecord
from megatron.training.signals import ExitConditions
from megatron.training.skipped_ranges import passed_over, range_to_skip
from megatron.training.spikes import SpikeWatch


def run_length(config: Config, schedule: BatchSchedule) -> RunLength:
    """Iterations and samples of the whole run, resumed or not."""
    iterations = schedule.total_iterations(config.training, config.model.seq_length, config.curriculum)
    return RunLength(iterations, schedule.consumed_after(iterations))


@dataclass
class Trainer:
    """The parts that the loop works with, each made in `pretrain_gpt.py`."""

    config: Config
    engine: GPTEngine
    data: RunData
    length: RunLength
    batches: BatchSchedule
    rates: LearningRateSchedule
    metrics: MetricsLogger
    exits: ExitConditions
    checkpoints: RunCheckpoints
    first_steps: FirstSteps = field(init=False)
    spikes: SpikeWatch = field(init=False)

    def __post_init__(self) -> None:
        self.first_steps = FirstSteps(self.config, self.engine.layout)
        self.spikes = SpikeWatch(self.config.trouble)

    def train(self, state: TrainingState) -> TrainingState:
        """Trains from `state` to the end of the run or to a reason to leave; returns the state reached."""
        training, save_interval = self.config.training, self.config.checkpoint.save_interval
        if training.no_train:
            return state
        saved = state
        reason = self.exits.reason_before_training(self.engine.device)
        while state.iteration < self.length.iterations and reason is None:
            state = self.advance(state)
            self.check_invariants(state)
            if self.data.valid and training.eval_iters and state.iteration % training.eval_interval == 0:
                self.evaluate(state, "validation")
            if save_interval and state.iteration % save_interval == 0:
                self.checkpoint(state)
                saved = state
            reason = self.exits.reason(state.iteration, self.engine.device)
        if self.config.checkpoint.save and saved != state:
            self.checkpoint(state)
        if reason:
            self.metrics.print(reason)
        return state

    def advance(self, state: TrainingState) -> TrainingState:
        """One step, or past the iterations that are to be skipped."""
        skipped = range_to_skip(self.config, state.iteration, self.length.iterations)
        if skipped is None:
            return self.step(state)
        first, last = skipped
        self.metrics.print(f"Skipped iterations {first} to {last} due to --skip-train-iteration-range flag")
        return passed_over(state, last, self.config, self.batches)

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
        rate = self.rates.rate(progress)
        micro_batches = _micro_batches(self.engine, self.data.train, state.consumed_samples, batch_size)
        self.spikes.begin(state)
        try:
            loss = self.engine.train_step(
                truncated(micro_batches, seq_length),
                state.consumed_samples,
                batch_size,
                rate,
                seq_length=seq_length,
                skips_non_finite=_skips_non_finite(self.config.trouble, state),
                refuses=self.spikes.refuses if self.config.trouble.spike_policy else None,
            )
        except NonFiniteError as error:
            limit = self.config.trouble.max_consecutive_skips
            in_a_row = f"; {limit} steps in a row (--max-consecutive-skips)" if limit else ""
            raise RunStopped(f"iteration {progress.iteration}: {error}{in_a_row}") from error
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
        for text in self.first_steps.texts(optimizer, progress.iteration == self.length.iterations):
            self.metrics.print(text)
        reached = TrainingState(
            progress.iteration,
            progress.consumed_samples,
            progress.consumed_tokens,
            state.skipped_iterations + int(optimizer.skipped),
            state.skips_in_a_row + 1 if optimizer.skipped else 0,
            state.rollbacks,
        )
        return self.after_trouble(self.spikes.remember(reached, taken=not optimizer.skipped))

    def after_trouble(self, state: TrainingState) -> TrainingState:
        """Tells what was wrong with the step that has led to `state`, if anything, and does what is left to
        do about it. RunStopped if that was tried too often."""
        trouble, optimizer = self.config.trouble, self.engine.optimizer
        if optimizer.overflow and optimizer.finding:
            self.metrics.print(f"iteration {state.iteration}: {optimizer.finding}")
        if self.spikes.finding:
            what = f"iteration {state.iteration}: spike, {self.spikes.finding}"
            if trouble.spike_policy == "rollback":
                return self.roll_back(state, what)
            limit = trouble.max_consecutive_skips or trouble.spike_window
            if state.skips_in_a_row >= limit:
                raise RunStopped(f"{what}: {limit} steps in a row are without an update, so this is no spike")
            self.metrics.print(what + (": the update was not made" if optimizer.refused else ""))
        return state

    def roll_back(self, state: TrainingState, what: str) -> TrainingState:
        """Takes the newest checkpoint's weights, at the iteration of `state`: the data since are skipped.

        Without a checkpoint so far, the weights stay what they were before the step. `what`: the cause.
        """
        limit = self.config.trouble.max_rollbacks
        if state.rollbacks >= limit:
            raise RunStopped(f"{what}: the run has gone back {limit} times already (--max-rollbacks)")
        checkpoint = self.checkpoints.go_back()
        if checkpoint is None:
            self.metrics.print(f"{what}: the update was not made; there is no checkpoint to go back to")
            return state
        there = checkpoint.state
        self.metrics.print(
            f"{what}: back to the weights of {checkpoint.folder}, and the data of iterations "
            f"{there.iteration + 1} to {state.iteration} are skipped"
        )
        reached = passed_over(there, state.iteration, self.config, self.batches)
        return replace(reached, rollbacks=state.rollbacks + 1)

    def check_invariants(self, state: TrainingState) -> None:
        """Every --check-invariants-interval steps, before what has drifted can be evaluated or saved."""
        interval = self.config.trouble.check_invariants_interval
        if interval and state.iteration % interval == 0:
            broken = broken_invariants(self.engine.optimizer, self.engine.layout)
            if broken:
                raise RunStopped(
                    f"iteration {state.iteration}: {broken}. The run must not go on from this state: resume "
                    "from a checkpoint before, and suspect the devices of these ranks"
                )

    def checkpoint(self, state: TrainingState) -> None:
        """Saves, and says where."""
        started = time.perf_counter()
        try:
            folder = self.checkpoints.save(state)
        except SaveError as error:
            raise RunStopped(
                f"{error}: once that is mended, the run resumes from the checkpoint before", everywhere=False
            ) from error
        seconds = time.perf_counter() - started
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
        """Evaluates on a split ('validation' or 'test') and logs its loss."""
        loader = self.data.valid if split == "validation" else self.data.test
        if loader is None or self.config.training.eval_iters == 0:
            return
        # A checkpoint may be from beyond the end of this run, where there are no validation samples.
        iteration = min(state.iteration, self.length.iterations)
        first = validation_start(self.config, iteration) if split == "validation" else 0
        loss = evaluate(self.engine, loader, self.config, first)
        self.metrics.log_validation(
            ValidationRecord(
                state.iteration, state.consumed_samples, state.consumed_tokens, loss.item(), split, at
            )
        )


def _skips_non_finite(trouble: TroubleConfig, state: TrainingState) -> bool | None:
    """Whether the step after `state` may be skipped for a number that is not finite; None: as fp16's loss
    scale says."""
    limit = trouble.max_consecutive_skips
    return None if limit is None else state.skips_in_a_row + 1 < limit


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
    return MetricsLogger(config.logging, throughput, enabled=rank == 0)
