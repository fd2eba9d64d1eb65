"""Handles skipped ranges, spikes, non-finite values and replica mismatches in the training loop.

Every decision depends only on the training state and on values that are equal on all ranks: see
docs/stability.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypedDict

from megatron.checkpoint.manager import CheckpointManager
from megatron.checkpoint.record import TrainingState
from megatron.cluster.exit_codes import RunStopped
from megatron.config import BatchSchedule, Config
from megatron.engine.pipeline_engine import GPTEngine
from megatron.optimizer.mixed_precision import NonFiniteError
from megatron.training.logging.metrics import MetricsLogger
from megatron.training.stability.invariants import find_invariant_violation
from megatron.training.stability.skipped_ranges import advance_state, range_to_skip
from megatron.training.stability.spikes import SpikeDetector


class StepOptions(TypedDict):
    """The arguments of `GPTEngine.train_step` that control skipped updates."""

    skips_non_finite: bool | None
    skip_update_fn: Callable[[float, float], bool] | None


@dataclass
class StabilityMonitor:
    """Called before, during and after each step, on every rank."""

    config: Config
    engine: GPTEngine
    batches: BatchSchedule
    metrics: MetricsLogger
    checkpoints: CheckpointManager
    spikes: SpikeDetector = field(init=False)

    def __post_init__(self) -> None:
        self.spikes = SpikeDetector(self.config.stability)

    def skip_range(self, state: TrainingState, total_iterations: int) -> TrainingState | None:
        """The state after the range to skip, which is printed; None if the next iteration is not in a
        range."""
        skipped = range_to_skip(self.config, state.iteration, total_iterations)
        if skipped is None:
            return None
        first, last = skipped
        self.metrics.print(f"Skipped iterations {first} to {last} due to --skip-train-iteration-range flag")
        return advance_state(state, last, self.config, self.batches)

    def step_options(self, state: TrainingState) -> StepOptions:
        """The options of the step that follows `state`; starts that step."""
        self.spikes.begin(state)
        options = self.config.stability
        limit = options.max_consecutive_skips
        return {
            "skips_non_finite": None if limit is None else state.skips_in_a_row + 1 < limit,
            "skip_update_fn": self.spikes.should_skip if options.spike_policy else None,
        }

    def diagnose(self, error: NonFiniteError, iteration: int) -> RunStopped:
        """The error of a non-finite step that must not be skipped."""
        limit = self.config.stability.max_consecutive_skips
        in_a_row = f"; {limit} steps in a row (--max-consecutive-skips)" if limit else ""
        return RunStopped(f"iteration {iteration}: {error}{in_a_row}")

    def post_step(self, state: TrainingState) -> TrainingState:
        """Prints what was wrong with the step that led to `state`, rolls back if needed; returns the state to
        continue from. Raises RunStopped after too many skips or rollbacks."""
        options, optimizer = self.config.stability, self.engine.optimizer
        state = self.spikes.update_window(state, taken=not optimizer.skipped)
        if optimizer.found_nonfinite and optimizer.diagnosis:
            self.metrics.print(f"iteration {state.iteration}: {optimizer.diagnosis}")
        if not self.spikes.diagnosis:
            return state
        what = f"iteration {state.iteration}: spike, {self.spikes.diagnosis}"
        if options.spike_policy == "rollback":
            return self._roll_back(state, what)
        limit = options.max_consecutive_skips or options.spike_window
        if state.skips_in_a_row >= limit:
            raise RunStopped(f"{what}: {limit} consecutive skipped updates: not a spike, stopping")
        self.metrics.print(what + (": update skipped" if optimizer.skipped_by_fn else ""))
        return state

    def _roll_back(self, state: TrainingState, what: str) -> TrainingState:
        """Loads the newest checkpoint and skips the data between it and `state`. Without a checkpoint only
        the update is skipped. what: the cause, for the log.
        """
        limit = self.config.stability.max_rollbacks
        if state.rollbacks >= limit:
            raise RunStopped(f"{what}: reached --max-rollbacks {limit}")
        checkpoint = self.checkpoints.rollback()
        if checkpoint is None:
            self.metrics.print(f"{what}: update skipped; there is no checkpoint to roll back to")
            return state
        there = checkpoint.state
        self.metrics.print(
            f"{what}: rolled back to {checkpoint.folder}; the data of iterations "
            f"{there.iteration + 1} to {state.iteration} are skipped"
        )
        reached = advance_state(there, state.iteration, self.config, self.batches)
        return replace(reached, rollbacks=state.rollbacks + 1)

    def check_invariants(self, iteration: int) -> None:
        """Checks the replicas every --check-invariants-interval steps, before an evaluation or save. Raises
        RunStopped on a mismatch."""
        interval = self.config.stability.check_invariants_interval
        if interval and iteration % interval == 0:
            violation = find_invariant_violation(self.engine.optimizer, self.engine.layout)
            if violation:
                raise RunStopped(
                    f"iteration {iteration}: {violation}. Resume from an earlier checkpoint, and check the "
                    "devices of these ranks"
                )
