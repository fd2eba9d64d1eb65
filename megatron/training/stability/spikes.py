"""Spikes: steps whose loss or grad norm is far above those of the steps before (--spike-policy).

All is a function of the training state and of numbers that are equal on every rank, so every rank decides
alike, and a resumed run as an uninterrupted one.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from megatron.checkpoint.discovery import TrainingState
from megatron.config import StabilityConfig


class SpikeDetector:
    """Looks at one step after the other, before its update is made."""

    def __init__(self, options: StabilityConfig) -> None:
        self._options = options
        self.diagnosis = ""
        """In words, why the last step that was looked at is a spike; '' if it is none."""
        self._state = TrainingState()
        self._seen: tuple[float, float] | None = None

    def begin(self, state: TrainingState) -> None:
        """A step begins after `state`."""
        self._state, self._seen, self.diagnosis = state, None, ""

    def should_skip(self, loss: float, grad_norm: float) -> bool:
        """Whether the step's update is not to be made. loss, grad_norm: of the global batch."""
        self._seen = (loss, grad_norm)
        options, state = self._options, self._state
        if len(state.recent_losses) < options.spike_window:
            return False
        found = []
        for name, value, before, factor in (
            ("loss", loss, state.recent_losses, options.spike_loss_factor),
            ("grad norm", grad_norm, state.recent_grad_norms, options.spike_grad_norm_factor),
        ):
            usual = median(before)
            if value > factor * usual:
                found.append(f"{name} {value:.4g} (median of {len(before)} steps: {usual:.4g})")
        self.diagnosis = " and ".join(found)
        return bool(found) and options.spike_policy != "warn"

    def update_window(self, state: TrainingState, taken: bool) -> TrainingState:
        """`state`, the one after the step, with the step in its window if it was taken."""
        before = self._state
        losses, norms = before.recent_losses, before.recent_grad_norms
        if taken and self._seen is not None:
            keep = self._options.spike_window
            losses, norms = (*losses, self._seen[0])[-keep:], (*norms, self._seen[1])[-keep:]
        return replace(state, recent_losses=losses, recent_grad_norms=norms)
