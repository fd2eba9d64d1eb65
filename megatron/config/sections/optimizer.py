"""The optimizer and its hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.fields import Section, flag
from megatron.config.registries import OPTIMIZERS


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer, its hyperparameters, weight decay and gradient clipping."""

    group: ClassVar[str] = "regularization"

    optimizer: str = flag("adam", choices=OPTIMIZERS, group="training", help="optimizer")
    adam_beta1: float = flag(0.9, at_least=0, below=1, help="Adam's beta1, for the first moment")
    adam_beta2: float = flag(0.999, at_least=0, below=1, help="Adam's beta2, for the second moment")
    adam_eps: float = flag(1e-8, above=0, help="Adam's epsilon, added to the root of the second moment")
    sgd_momentum: float = flag(0.9, at_least=0, below=1, help="momentum of --optimizer sgd")
    weight_decay: float = flag(
        0.01, at_least=0, help="weight decay; not applied to biases and norm parameters"
    )
    clip_grad: float = flag(1.0, at_least=0, help="maximum global gradient norm; 0: no clipping")
    use_apex: bool = flag(
        False, group="training", help="use the fused layer norm and Adam of NVIDIA apex (GPU only)"
    )
    use_bnb_optimizer: bool = flag(
        False,
        aliases=("--use_bnb_optimizer",),
        group="training",
        help="use 8-bit Adam from bitsandbytes (pip install bitsandbytes); the word embeddings, norms, "
        "biases and parameters with fewer than 4096 elements keep 32-bit moments. Use it with "
        "--embed-layernorm, which BigScience's flag of this name included",
        excludes={
            "optimizer.optimizer=sgd": "8-bit moments are supported for Adam only, use adam or adamw, or "
            "remove the flag",
            "optimizer.use_apex": "each has its own Adam, remove one of the two",
        },
    )

    @property
    def moments_kind(self) -> str:
        """The optimizer state per parameter, 'sgd' or 'adam' (also for adamw and 8-bit Adam)."""
        return "sgd" if self.optimizer == "sgd" else "adam"
