"""The precision of the computation, and the loss scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.fields import COMMON_FLAGS, Section, flag
from megatron.config.sections.fp8_layers import MIN_SIZE


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
    fp8_format: str | None = flag(
        None,
        choices=("e4m3", "hybrid"),
        help="multiply the matrices of transformer layers in FP8, except for their own gradients: e4m3, or "
        "hybrid, which has e5m2 for the gradients of outputs. Weights stay in bf16; router, embedding, head "
        "and small matrices (--fp8-min-size) compute in bf16. Needs an H100 or newer; on CPUs it is emulated "
        "(default: without FP8, or with --fp8-recipe blockwise e4m3, with tensorwise hybrid)",
        needs={
            "precision.bf16": "all other operations of an FP8 run are in bf16; add --bf16, or remove "
            "--fp8-format and --fp8-recipe"
        },
        excludes={
            "parallel.tp_comm_overlap": "the products of its chunks are in bf16; remove --tp-comm-overlap, "
            "or --fp8-format and --fp8-recipe"
        },
    )
    fp8_recipe: str | None = flag(
        None,
        choices=("blockwise", "tensorwise"),
        rejected={
            "delayed": "the scales of earlier steps would depend on the layout; set blockwise or tensorwise",
            "mxfp8": "it is not implemented; set blockwise",
            "custom": "it is not implemented; set blockwise",
        },
        help="what shares a scale in FP8: blockwise, 128 elements of an activation, and 128 x 128 of a "
        "weight; tensorwise, all elements of a tensor of a micro-batch, on all its ranks (default: blockwise "
        "with --fp8-format)",
    )
    fp8_min_size: int = flag(
        MIN_SIZE,
        at_least=0,
        at_most=2**24,
        help="with FP8, compute with a matrix of R rows and C columns in bf16 if R x C / (R + C) is smaller "
        "than this: its quantization is expected to take longer than FP8 saves. R and C are of the whole "
        "matrix, with all tensor-parallel shards; 0: no matrix is too small",
        used_with=("precision.fp8_format",),
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
        derived: dict[str, Any] = {"loss_scale": None} if self.loss_scale == 0 else {}
        if self.fp8_format is not None and self.fp8_recipe is None:
            derived["fp8_recipe"] = "blockwise"
        if self.fp8_recipe is not None and self.fp8_format is None:
            # The formats of Transformer Engine's recipes of these names.
            derived["fp8_format"] = "e4m3" if self.fp8_recipe == "blockwise" else "hybrid"
        return derived

    @property
    def name(self) -> str:
        """'fp32', 'fp16' or 'bf16'."""
        if self.fp16:
            return "fp16"
        return "bf16" if self.bf16 else "fp32"

    @property
    def title(self) -> str:
        """The precision in reports."""
        fp8 = f" with FP8 ({self.fp8_recipe}, {self.fp8_format})" if self.fp8_recipe is not None else ""
        return self.name + fp8
