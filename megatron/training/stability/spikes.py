"""Spikes: steps whose loss or grad norm is far above those of the previous steps (--spike-policy).

The decision depends only on the training state and on values that are equal on all ranks. So all ranks decide
the same, and a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from megatron.checkpoint.record import TrainingState
from megatron.config import StabilityConfig


class SpikeDetector:
    """Examines each step before its update."""

    def __init__(self, options: StabilityConfig) -> None:
        self._options = options
        self.diagnosis = ""
        """Why the last examined step is a spike, for the log; '' if it is not."""
        self._state = TrainingState()
        self._seen: tuple[float, float] | None = None

    def begin(self, state: TrainingState) -> None:
        """Starts the step that follows `state`."""
        self._state, self._seen, self.diagnosis = state, None, ""

    def should_skip(self, loss: float, grad_norm: float) -> bool:
        """Whether to skip the step's update. loss, grad_norm: of the global batch."""
        self._seen = (loss, grad_norm)
        options, state = self._options, self._state
        if len(state.recent_losses) < options.spike_window:
            return False
        found = []
        for name, value, before, factor in (
            ("loss", loss, state.recent_losses, options.spike_loss_factor),
            ("grad norm", grad_norm, state.recent_grad_norms, options.spike_grad_norm_factor),
        ):
            typical = median(before)
            if value > factor * typical:
                found.append(f"{name} {value:.4g} (median of {len(before)} steps: {typical:.4g})")
        self.diagnosis = " and ".join(found)
        return bool(found) and options.spike_policy != "warn"

    def update_window(self, state: TrainingState, taken: bool) -> TrainingState:
        """Returns `state`, the state after the step, with the step added to its window if taken."""
        before = self._state
        losses, norms = before.recent_losses, before.recent_grad_norms
        if taken and self._seen is not None:
            keep = self._options.spike_window
            losses, norms = (*losses, self._seen[0])[-keep:], (*norms, self._seen[1])[-keep:]
        return replace(state, recent_losses=losses, recent_grad_norms=norms)
