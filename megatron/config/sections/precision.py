"""The precision of the computation, and the loss scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.fields import COMMON_FLAGS, Section, flag


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section):
    """The precision of the computation. Master weights and gradient accumulation are always fp32."""

    group: ClassVar[str] = "mixed precision"

    fp16: bool = flag(
        False,
        help="train in fp16 with loss scaling; master weights and gradient accumulation are fp32",
        excludes={"precision.bf16": "remove one of them"},
    )
    bf16: bool = flag(
        False, help="train in bf16; master weights and gradient accumulation are fp32", group=COMMON_FLAGS
    )
    loss_scale: float | None = flag(
        None,
        at_least=0,
        help="static loss scale for fp16 (default, and with 0: dynamic loss scaling); --deepspeed_config "
        "overrides it",
        needs={"precision.fp16": "fp32 and bf16 have no loss scaling; remove --loss-scale or add --fp16"},
    )
    initial_loss_scale: float = flag(
        2.0**32, above=0, help="initial dynamic loss scale", used_with=("precision.fp16",)
    )
    min_loss_scale: float = flag(
        1.0, above=0, help="minimum dynamic loss scale", used_with=("precision.fp16",)
    )
    loss_scale_window: int = flag(
        1000,
        at_least=1,
        help="steps without overflow after which the dynamic loss scale is doubled",
        used_with=("precision.fp16",),
    )
    hysteresis: int = flag(
        2,
        at_least=1,
        help="number of overflows after which the dynamic loss scale is halved",
        used_with=("precision.fp16",),
    )
    fp32_residual_connection: bool = flag(
        False,
        changes_model=True,
        help="keep the residual connections in fp32",
        excludes={
            "model.layer_arrangement=post-norm": "attention and MLP read the residual stream itself, in "
            "the precision of the weights; remove one of the two"
        },
    )

    def derive(self) -> dict[str, Any]:
        return {"loss_scale": None} if self.loss_scale == 0 else {}

    @property
    def name(self) -> str:
        """'fp32', 'fp16' or 'bf16'."""
        if self.fp16:
            return "fp16"
        return "bf16" if self.bf16 else "fp32"
