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
        1e-8, above=0, help="Adam's epsilon, which is added to the square root of the second moment"
    )
    lion_beta1: float = flag(
        0.95,
        at_least=0,
        below=1,
        help="with --optimizer lion: weight X of the momentum in the update sign(X m + (1 - X) g), where m "
        "is the momentum and g the gradient",
    )
    lion_beta2: float = flag(
        0.98, at_least=0, below=1, help="with --optimizer lion: decay rate of the stored momentum"
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
        "spectral: sqrt(max(out, in)). With --muon-extra-scale-factor 0.2, as Moonshot AI uses it, Adam's "
        "learning rates are suitable (arXiv:2502.16982)\n"
        "unit_rms_norm: sqrt(out / in)\n"
        "shape_scaling: sqrt(max(1, out / in)), as in Keller Jordan's Muon",
    )
    muon_extra_scale_factor: float = flag(
        1.0, above=0, help="with --optimizer muon: additional factor of the update of a matrix"
    )
    muon_num_ns_steps: int = flag(
        5, at_least=1, at_most=99, help="with --optimizer muon: number of Newton-Schulz iterations"
    )
    muon_matmul_dtype: str | None = flag(
        None,
        choices=("bf16", "fp32"),
        help="with --optimizer muon: dtype of the Newton-Schulz iterations (default: fp32 in fp32 runs, "
        "otherwise bf16)",
    )
    qk_clip: bool = flag(
        False,
        help="after each update (with any optimizer), scale down the query and key weights of each head "
        "whose largest attention logit in the global batch is above --qk-clip-threshold, as MuonClip does "
        "(arXiv:2507.20534). The largest logit of all heads is logged",
        excludes={"model.attn_logit_softcapping": "the cap already limits the scores"},
    )
    qk_clip_alpha: float = flag(
        0.5,
        above=0,
        below=1,
        help="with --qk-clip and eta = --qk-clip-threshold / largest logit: query weights are multiplied by "
        "eta^X and key weights by eta^(1 - X), where X is this number",
        metavar="X",
        used_with=("optimizer.qk_clip",),
    )
    qk_clip_threshold: float = flag(
        100.0,
        above=0,
        help="with --qk-clip: attention logit above which the weights of a head are scaled down",
        used_with=("optimizer.qk_clip",),
    )
    sgd_momentum: float = flag(
        0.9, at_least=0, below=1, help="with --optimizer sgd: momentum; 0 is SGD without momentum"
    )
    weight_decay: float = flag(
        0.01, at_least=0, help="weight decay. It is not applied to biases and to the parameters of norms"
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
        "parameters with fewer than 4096 elements keep 32-bit moments. Unlike BigScience's flag of this "
        "name, it does not add a norm of the embeddings: to continue such a run, also give --embed-layernorm",
        needs={"optimizer.optimizer=adam|optimizer.optimizer=adamw": "8-bit moments exist only for Adam"},
        excludes={"optimizer.use_apex": "each flag selects its own Adam"},
    )

    @property
    def moments(self) -> frozenset[str]:
        """Returns the names of the states that the optimizer keeps for each element of a parameter."""
        choice = OPTIMIZERS[self.optimizer]
        return frozenset((*choice.moments, *choice.matrix_moments))

    @property
    def most_moments(self) -> int:
        """Returns the largest number of moments that the optimizer keeps for an element of a parameter."""
        choice = OPTIMIZERS[self.optimizer]
        return max(len(choice.moments), len(choice.matrix_moments))

    @property
    def updates_matrices(self) -> bool:
        """Returns whether the optimizer updates the weights of linear layers as whole matrices."""
        return bool(OPTIMIZERS[self.optimizer].matrix_moments)
