"""The loss scale of fp16: static, or dynamic as in Micikevicius et al., 2018."""

from megatron.config import PrecisionConfig


class LossScaler:
    """`scale` multiplies the loss, so that small gradients stay representable; 1.0 without fp16.

    Dynamic: halved when `hysteresis` overflows have come, doubled after `loss_scale_window` steps without
    one (which also restores the hysteresis), never under `min_loss_scale`.
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
        """A smaller scale may still cure an overflow."""
        return self.dynamic and self.scale > self._minimum

    def update(self, overflow: bool) -> None:
        """Call once per step of a dynamic scale."""
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
        """What a resume needs to go on exactly."""
        return {
            "scale": self.scale,
            "overflows_left": self._overflows_left,
            "steps_without_overflow": self._steps_without_overflow,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """A static scale stays what the flags say."""
        if self.dynamic:
            self.scale = float(state["scale"])
            self._overflows_left = int(state["overflows_left"])
            self._steps_without_overflow = int(state["steps_without_overflow"])
