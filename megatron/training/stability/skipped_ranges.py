"""Iterations without a step: they are counted, and their samples and tokens are consumed without being
read."""

from __future__ import annotations

from dataclasses import replace

from megatron.checkpoint.record import TrainingState
from megatron.config import BatchSchedule, Config


def range_to_skip(config: Config, iteration: int, total_iterations: int) -> tuple[int, int] | None:
    """The rest of the --skip-train-iteration-range that contains the next iteration: (next, last iteration).
    None if the next iteration is not in a range."""
    for first, last in config.stability.skipped_ranges:
        if first <= iteration + 1 <= last and iteration < total_iterations:
            return iteration + 1, min(last, total_iterations)
    return None


def advance_state(state: TrainingState, last: int, config: Config, batches: BatchSchedule) -> TrainingState:
    """The state after iteration `last`, with the samples and tokens of the iterations until then consumed."""
    samples, tokens = state.consumed_samples, state.consumed_tokens
    for iteration in range(state.iteration + 1, last + 1):
        size = batches.global_batch_size_at(samples)
        samples += size
        tokens += size * config.seq_length_at(iteration)
    return replace(
        state,
        iteration=max(last, state.iteration),
        consumed_samples=samples,
        consumed_tokens=tokens,
        skipped_iterations=state.skipped_iterations + max(last - state.iteration, 0),
        pending_evaluations=0,
    )
