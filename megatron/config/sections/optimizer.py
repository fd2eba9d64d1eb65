"""The optimizer and its hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
