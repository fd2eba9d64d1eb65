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
    adam_beta1: float = flag(
        0.9, at_least=0, below=1, help="Adam's beta1, the decay rate of the first moment"
    )
    adam_beta2: float = flag(
        0.999, at_least=0, below=1, help="Adam's beta2, the decay rate of the second moment"
    )
    adam_eps: float = flag(
        1e-8, above=0, help="Adam's epsilon, added to the square root of the second moment"
    )
    lion_beta1: float = flag(
        0.95, at_least=0, below=1, help="with --optimizer lion: decay rate of the momentum in the update"
    )
    lion_beta2: float = flag(
        0.98, at_least=0, below=1, help="with --optimizer lion: decay rate of the momentum"
    )
    muon_momentum: float = flag(
        0.95, at_least=0, below=1, help="with --optimizer muon: decay rate of the momentum"
    )
    muon_use_nesterov: bool = flag(
        False,
        help="with --optimizer muon: use Nesterov momentum, as Keller Jordan's Muon and torch.optim.Muon do",
    )
    muon_scale_mode: str = flag(
        "spectral",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
        help="with --optimizer muon: scale of the update of a matrix [out, in]\n"
        "spectral: sqrt(max(out, in)); Moonshot AI adds --muon-extra-scale-factor 0.2, with which Adam's "
        "learning rates can be used (arXiv:2502.16982)\n"
        "unit_rms_norm: sqrt(out / in)\n"
        "shape_scaling: sqrt(max(1, out / in)), as in Keller Jordan's Muon",
    )
    muon_extra_scale_factor: float = flag(
        1.0, above=0, help="with --optimizer muon: further factor of the update of a matrix"
    )
    muon_num_ns_steps: int = flag(
        5, at_least=1, at_most=99, help="with --optimizer muon: number of Newton-Schulz iterations"
    )
    muon_matmul_dtype: str | None = flag(
        None,
        choices=("bf16", "fp32"),
        help="with --optimizer muon: dtype of the Newton-Schulz iterations (default: fp32 in runs in fp32, "
        "otherwise bf16)",
    )
    qk_clip: bool = flag(
        False,
        help="after each update, by any optimizer, scale the weights of queries and keys of heads whose "
        "largest attention logit in the global batch is above --qk-clip-threshold, as MuonClip does "
        "(arXiv:2507.20534); the largest logit of all heads is logged",
        excludes={"model.attn_logit_softcapping": "the cap already limits the scores"},
    )
    qk_clip_alpha: float = flag(
        0.5,
        above=0,
        below=1,
        help="with eta = --qk-clip-threshold / largest logit: the weight of a query is multiplied by eta^X, "
        "and the weight of a key by eta^(1 - X)",
        metavar="X",
        used_with=("optimizer.qk_clip",),
    )
    qk_clip_threshold: float = flag(
        100.0,
        above=0,
        help="largest attention logit of a head whose weights are not scaled",
        used_with=("optimizer.qk_clip",),
    )
    sgd_momentum: float = flag(0.9, at_least=0, below=1, help="with --optimizer sgd: momentum")
    weight_decay: float = flag(
        0.01, at_least=0, help="weight decay; not applied to biases and norm parameters"
    )
    clip_grad: float = flag(1.0, at_least=0, help="maximum global gradient norm; 0 disables clipping")
    use_apex: bool = flag(
        False,
        group="training",
        help="use the fused layer norm and the fused Adam of NVIDIA apex (GPUs only)",
        needs={"optimizer.optimizer=adam|optimizer.optimizer=adamw": "the fused optimizer of apex is Adam"},
    )
    use_bnb_optimizer: bool = flag(
        False,
        aliases=("--use_bnb_optimizer",),
        group="training",
        help="use 8-bit Adam of bitsandbytes (pip install bitsandbytes). Word embeddings, norms, biases and "
        "parameters with fewer than 4096 elements keep 32-bit moments. Add --embed-layernorm, which "
        "BigScience's flag of this name enabled implicitly",
        needs={"optimizer.optimizer=adam|optimizer.optimizer=adamw": "8-bit moments exist only for Adam"},
        excludes={"optimizer.use_apex": "each flag selects its own Adam"},
    )

    @property
    def moments(self) -> frozenset[str]:
        """Names of the states that the optimizer keeps for each element of a parameter."""
        choice = OPTIMIZERS[self.optimizer]
        return frozenset((*choice.moments, *choice.matrix_moments))

    @property
    def most_moments(self) -> int:
        """The largest number of states that the optimizer keeps for an element of a parameter."""
        choice = OPTIMIZERS[self.optimizer]
        return max(len(choice.moments), len(choice.matrix_moments))

    @property
    def updates_matrices(self) -> bool:
        """Whether the optimizer updates the weights of linear layers as whole matrices."""
        return bool(OPTIMIZERS[self.optimizer].matrix_moments)
