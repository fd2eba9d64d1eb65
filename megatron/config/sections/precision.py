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
        help="train in fp16 with loss scaling (without --fp16 and --bf16: in fp32). Master weights and "
        "gradient accumulation are fp32",
        excludes={"precision.bf16": "remove one of them"},
    )
    bf16: bool = flag(
        False, help="train in bf16. Master weights and gradient accumulation are fp32", group=COMMON_FLAGS
    )
    fp8_format: str | None = flag(
        None,
        choices=("e4m3", "hybrid"),
        help="multiply the matrices of transformer layers in FP8, except that weight gradients are bf16 "
        "products (default: no FP8, unless --fp8-recipe is given). e4m3: all operands in this format; "
        "hybrid: the gradients of outputs in e5m2. Weights are stored in bf16, and the router, the "
        "embedding, the head and small matrices (--fp8-min-size) compute in bf16. Needs an H100 or newer; "
        "CPUs emulate it. With --fp8-recipe the default is e4m3 for blockwise and hybrid for tensorwise",
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
        help="elements that share one scale in FP8. blockwise: 128 elements of an activation, and 128 x 128 "
        "elements of a weight; tensorwise: all elements of a tensor of a micro-batch, on all ranks that "
        "hold a part of it "
        "(default: blockwise with --fp8-format)",
    )
    fp8_min_size: int = flag(
        MIN_SIZE,
        at_least=0,
        at_most=2**24,
        help="with FP8: compute with a matrix of R rows and C columns in bf16 if R x C / (R + C) is smaller "
        "than this number, because quantizing such a matrix is expected to take longer than FP8 saves. R "
        "and C are the sizes of the whole matrix, not of a tensor-parallel shard; 0: all matrices use FP8",
        used_with=("precision.fp8_format",),
    )
    loss_scale: float | None = flag(
        None,
        at_least=0,
        help="static loss scale for fp16 (default, and with 0: dynamic loss scaling). A value in the file "
        "of --deepspeed_config takes precedence",
        needs={"precision.fp16": "fp32 and bf16 have no loss scaling; remove --loss-scale or add --fp16"},
    )
    initial_loss_scale: float = flag(
        2.0**32, above=0, help="with --fp16: initial dynamic loss scale", used_with=("precision.fp16",)
    )
    min_loss_scale: float = flag(
        1.0, above=0, help="with --fp16: minimum dynamic loss scale", used_with=("precision.fp16",)
    )
    loss_scale_window: int = flag(
        1000,
        at_least=1,
        help="number of steps without overflow after which the dynamic loss scale is doubled",
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
        help="keep the residual connections in fp32 (without the flag: in the precision of the run)",
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
            # Transformer Engine's recipes of these names use these formats.
            derived["fp8_format"] = "e4m3" if self.fp8_recipe == "blockwise" else "hybrid"
        return derived

    @property
    def name(self) -> str:
        """Returns 'fp32', 'fp16' or 'bf16'."""
        if self.fp16:
            return "fp16"
        return "bf16" if self.bf16 else "fp32"

    @property
    def title(self) -> str:
        """Returns a text about the precision for reports."""
        fp8 = f" with FP8 ({self.fp8_recipe}, {self.fp8_format})" if self.fp8_recipe is not None else ""
        return self.name + fp8
