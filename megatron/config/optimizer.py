"""The optimizer, the learning rate over time, and the number format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.fields import Section, flag


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """What moves the weights."""

    group: ClassVar[str] = "regularization"

    optimizer: str = flag(
        "adam",
        choices=("adam", "adamw", "sgd"),
        group="training",
        help="adam has decoupled weight decay, as in Megatron, which makes it the same as adamw",
    )
    adam_beta1: float = flag(0.9, at_least=0, below=1, help="decay rate of Adam's first moment")
    adam_beta2: float = flag(0.999, at_least=0, below=1, help="decay rate of Adam's second moment")
    adam_eps: float = flag(1e-8, above=0, help="added to the root of Adam's second moment")
    sgd_momentum: float = flag(0.9, at_least=0, below=1, help="momentum of --optimizer sgd")
    weight_decay: float = flag(
        0.01, at_least=0, help="decay of the weights; biases and layer norms have none"
    )
    clip_grad: float = flag(1.0, at_least=0, help="largest norm of the whole gradient; 0: no clipping")
    use_apex: bool = flag(False, group="training", help="use NVIDIA apex's fused layer norm and Adam")
    use_bnb_optimizer: bool = flag(
        False,
        aliases=("--use_bnb_optimizer",),
        group="training",
        help="keep Adam's moments in 8 bits, with bitsandbytes (pip install bitsandbytes); those of the word "
        "embedding, norms, biases and parameters of fewer than 4096 elements stay in 32",
    )

    @property
    def moments_kind(self) -> str:
        """What is kept per parameter, 'sgd' or 'adam': adam and adamw keep the same, with 8 bits too."""
        return "sgd" if self.optimizer == "sgd" else "adam"


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The learning rate over time: a linear warm-up, then a decay to min_lr."""

    group: ClassVar[str] = "learning rate"

    lr: float = flag(above=0, help="learning rate after the warm-up")
    min_lr: float = flag(0.0, at_least=0, help="learning rate at the end of the decay and after it")
    lr_decay_style: str = flag("linear", choices=("constant", "linear", "cosine"), help="shape of the decay")
    lr_decay_iters: int | None = flag(
        None, at_least=1, help="step at which the decay ends (default: --train-iters)"
    )
    lr_decay_samples: int | None = flag(
        None, at_least=1, help="consumed samples at which the decay ends (default: --train-samples)"
    )
    lr_decay_tokens: int | None = flag(
        None, at_least=1, help="consumed tokens at which the decay ends, in place of --lr-decay-samples"
    )
    lr_warmup_iters: int = flag(0, at_least=0, help="steps of linear warm-up")
    lr_warmup_samples: int = flag(0, at_least=0, help="samples of linear warm-up")
    lr_warmup_fraction: float | None = flag(
        None, at_least=0, below=1, help="warm-up as a fraction of the length of the decay"
    )
    override_lr_scheduler: bool = flag(
        False, help="resume with the learning-rate schedule of the flags where the checkpoint's is another"
    )
    use_checkpoint_lr_scheduler: bool = flag(
        False, help="resume with the checkpoint's learning-rate schedule where the flags say another"
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section):
    """The format that the model computes in; weights of the optimizer and gradient sums are always fp32."""

    group: ClassVar[str] = "mixed precision"

    fp16: bool = flag(False, help="compute in fp16, with a loss scale")
    bf16: bool = flag(False, help="compute in bf16")
    loss_scale: float | None = flag(
        None,
        at_least=0,
        help="static loss scale of fp16; 0 or absent: a dynamic one (the DeepSpeed JSON wins)",
    )
    initial_loss_scale: float = flag(2.0**32, above=0, help="first value of the dynamic loss scale")
    min_loss_scale: float = flag(1.0, above=0, help="smallest value of the dynamic loss scale")
    loss_scale_window: int = flag(
        1000, at_least=1, help="steps without overflow after which the dynamic loss scale doubles"
    )
    hysteresis: int = flag(2, at_least=1, help="overflows before the dynamic loss scale is halved")
    fp32_residual_connection: bool = flag(False, help="keep the residual stream in fp32")

    def derive(self) -> dict[str, Any]:
        return {"loss_scale": None} if self.loss_scale == 0 else {}

    @property
    def name(self) -> str:
        """'fp32', 'fp16' or 'bf16'."""
        if self.fp16:
            return "fp16"
        return "bf16" if self.bf16 else "fp32"
