"""The loss scale of fp16: static, or dynamic (mixed precision training, arXiv 1710.03740)."""

from megatron.config import PrecisionConfig


class LossScaler:
    """The factor `scale` of the loss, which keeps small gradients representable; 1.0 without fp16.

    A dynamic scale is halved at the `hysteresis`-th overflow and at each later one, but not below
    `min_loss_scale`. After `loss_scale_window` steps without overflow it is doubled, and the number of
    overflows is set to zero.
    """

    def __init__(self, precision: PrecisionConfig) -> None:
        self.dynamic = precision.fp16 and not precision.loss_scale
        if self.dynamic:
            self.scale = float(precision.initial_loss_scale)
        else:
            self.scale = float(precision.loss_scale or 1.0) if precision.fp16 else 1.0
        self._minimum = precision.min_loss_scale
        self._window = precision.loss_scale_window
        self._hysteresis = precision.hysteresis
        self._overflows_left = precision.hysteresis
        self._steps_without_overflow = 0

    @property
    def can_shrink(self) -> bool:
        """Whether the scale can become smaller after an overflow."""
        return self.dynamic and self.scale > self._minimum

    def update(self, overflow: bool) -> None:
        """Updates a dynamic scale. It must be called once per step."""
        if overflow:
            self._steps_without_overflow = 0
            self._overflows_left = max(self._overflows_left - 1, 0)
            if self._overflows_left == 0:
                self.scale = max(self.scale / 2, self._minimum)
            return
        self._steps_without_overflow += 1
        if self._steps_without_overflow % self._window == 0:
            self.scale *= 2
            self._overflows_left = self._hysteresis

    def state_dict(self) -> dict[str, float]:
        """Returns the state that a checkpoint saves."""
        return {
            "scale": self.scale,
            "overflows_left": self._overflows_left,
            "steps_without_overflow": self._steps_without_overflow,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores a dynamic scale. A static scale is set by the flags instead."""
        if self.dynamic:
            self.scale = float(state["scale"])
            self._overflows_left = int(state["overflows_left"])
            self._steps_without_overflow = int(state["steps_without_overflow"])
