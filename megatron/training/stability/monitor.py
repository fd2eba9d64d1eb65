"""What the loop does about bad data, spikes, numbers that are not finite, and copies that drift.

Every decision is a function of the training state and of numbers that are equal on all ranks: see
docs/trouble.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypedDict

from megatron.checkpoint.manager import CheckpointManager, TrainingState
from megatron.cluster.exit_codes import RunStopped
from megatron.config import BatchSchedule, Config
from megatron.engine.pipeline_engine import GPTEngine
from megatron.optimizer.mixed_precision import NonFiniteError
from megatron.training.logging.metrics import MetricsLogger
from megatron.training.stability.invariants import find_invariant_violation
from megatron.training.stability.skipped_ranges import advance_state, range_to_skip
from megatron.training.stability.spikes import SpikeDetector


class StepOptions(TypedDict):
    """What `GPTEngine.train_step` is told of a step that it may have to leave out."""

    skips_non_finite: bool | None
    skip_update_fn: Callable[[float, float], bool] | None


@dataclass
class StabilityMonitor:
    """Asked before, during and after each step, on every rank."""

    config: Config
    engine: GPTEngine
    batches: BatchSchedule
    metrics: MetricsLogger
    checkpoints: CheckpointManager
    spikes: SpikeDetector = field(init=False)

    def __post_init__(self) -> None:
        self.spikes = SpikeDetector(self.config.stability)

    def skip_range(self, state: TrainingState, total_iterations: int) -> TrainingState | None:
        """The state behind a range to skip, which is told; None if the next iteration is in none."""
        skipped = range_to_skip(self.config, state.iteration, total_iterations)
        if skipped is None:
            return None
        first, last = skipped
        self.metrics.print(f"Skipped iterations {first} to {last} due to --skip-train-iteration-range flag")
        return advance_state(state, last, self.config, self.batches)

    def step_options(self, state: TrainingState) -> StepOptions:
        """Of the step after `state`, which begins."""
        self.spikes.begin(state)
        options = self.config.stability
        limit = options.max_consecutive_skips
        return {
            "skips_non_finite": None if limit is None else state.skips_in_a_row + 1 < limit,
            "skip_update_fn": self.spikes.should_skip if options.spike_policy else None,
        }

    def diagnose(self, error: NonFiniteError, iteration: int) -> RunStopped:
        """On a step that must not be skipped."""
        limit = self.config.stability.max_consecutive_skips
        in_a_row = f"; {limit} steps in a row (--max-consecutive-skips)" if limit else ""
        return RunStopped(f"iteration {iteration}: {error}{in_a_row}")

    def post_step(self, state: TrainingState) -> TrainingState:
        """Tells what was wrong with the step that has led to `state`, if anything, and does what is left to
        do; the state to go on from. RunStopped if that was tried too often."""
        options, optimizer = self.config.stability, self.engine.optimizer
        state = self.spikes.update_window(state, taken=not optimizer.skipped)
        if optimizer.overflow and optimizer.diagnosis:
            self.metrics.print(f"iteration {state.iteration}: {optimizer.diagnosis}")
        if not self.spikes.diagnosis:
            return state
        what = f"iteration {state.iteration}: spike, {self.spikes.diagnosis}"
        if options.spike_policy == "rollback":
            return self._roll_back(state, what)
        limit = options.max_consecutive_skips or options.spike_window
        if state.skips_in_a_row >= limit:
            raise RunStopped(f"{what}: {limit} steps in a row are without an update, so this is no spike")
        self.metrics.print(what + (": the update was not made" if optimizer.update_skipped else ""))
        return state

    def _roll_back(self, state: TrainingState, what: str) -> TrainingState:
        """Takes the newest checkpoint's weights, at the iteration of `state`: the data since are skipped.

        Where there is no checkpoint yet, only the update is left out. `what`: the cause.
        """
        limit = self.config.stability.max_rollbacks
        if state.rollbacks >= limit:
            raise RunStopped(f"{what}: the run has gone back {limit} times already (--max-rollbacks)")
        checkpoint = self.checkpoints.rollback()
        if checkpoint is None:
            self.metrics.print(f"{what}: the update was not made; there is no checkpoint to go back to")
            return state
        there = checkpoint.state
        self.metrics.print(
            f"{what}: back to the weights of {checkpoint.folder}, and the data of iterations "
            f"{there.iteration + 1} to {state.iteration} are skipped"
        )
        reached = advance_state(there, state.iteration, self.config, self.batches)
        return replace(reached, rollbacks=state.rollbacks + 1)

    def check_invariants(self, iteration: int) -> None:
        """Every --check-invariants-interval steps, before what has drifted can be evaluated or saved."""
        interval = self.config.stability.check_invariants_interval
        if interval and iteration % interval == 0:
            broken = find_invariant_violation(self.engine.optimizer, self.engine.layout)
            if broken:
                raise RunStopped(
                    f"iteration {iteration}: {broken}. The run must not go on from this state: resume from a "
                    "checkpoint before, and suspect the devices of these ranks"
                )
