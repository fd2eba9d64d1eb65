"""The experts of the model: mixture-of-experts layers and their router."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from megatron.config.fields import Section, flag
from megatron.config.mistakes import indivisible
from megatron.config.sections.layer_pattern import DENSE, EXPERTS

_NEEDS: dict[str, Any] = {
    "needs": {
        "model.num_experts": "it belongs to expert layers: set --num-experts to 2 or more, or remove the flag"
    }
}
SIZE: dict[str, Any] = {"at_least": 1, "at_most": 2**24}
"""Bounds of fields that are the size of a layer or a length in tokens."""
_COUNT: dict[str, Any] = {"at_least": 1, "at_most": 2**16}
_TRAINING: dict[str, Any] = {**_NEEDS, "changes_model": False, "changes_layer_time": False}
SCORE_FUNCTIONS = ("softmax", "sigmoid")
BALANCE_LOSSES = ("seq_aux_loss", "global_aux_loss", "none")


@dataclass(frozen=True, kw_only=True)
class ExpertConfig(Section):
    """The sizes of expert layers, and the rules by which their router chooses the experts of a token. Names
    and defaults are Megatron-LM's, except the default of --moe-router-load-balancing-type."""

    group: ClassVar[str] = "mixture of experts"

    num_experts: int | None = flag(
        None,
        summary="{} experts",
        help="number of experts of each expert layer: the MLP of a transformer layer becomes a router and "
        "this many MLPs, and each token uses --moe-router-topk of them (default, and with 1: a dense model)",
        several="all expert layers have it, and --moe-layer-freq chooses these layers",
        excludes={
            "model.mup": "muP has no rule for the initial values and learning rates of routers and experts; "
            "remove --mup"
        },
        **_COUNT,
    )
    moe_ffn_hidden_size: int | None = flag(
        derived="--ffn-hidden-size",
        summary="{} hidden each",
        help="hidden size of each expert; with --glu-activation, the size of the gate and of the value",
        **_NEEDS,
        **SIZE,
    )
    moe_layer_freq: tuple[str, ...] = flag(
        (EXPERTS,),
        nargs="+",
        metavar="E|D",
        summary="expert layers {}",
        help=f"layers that have experts, as in D E E E: an {EXPERTS} has them, a {DENSE} has a dense MLP, "
        "and the letters are repeated to --num-layers. Megatron-LM's N (layers 0, N, 2N, ... have experts) "
        "and its lists, such as ([0]*3+[1]*58), are accepted, too",
        changes_layer_time=False,
        **_NEEDS,
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None,
        summary="shared expert of {} hidden",
        help="hidden size of the shared expert, an MLP that every token uses in addition to its experts; for "
        "several shared experts, the sum of their sizes",
        **_NEEDS,
        **SIZE,
    )
    moe_shared_expert_gate: bool = flag(
        False,
        summary="gated shared expert",
        help="multiply the output of the shared expert by the sigmoid of a learned linear function of its "
        "input",
        needs={"model.moe_shared_expert_intermediate_size": ""},
    )
    moe_router_topk: int = flag(
        2,
        summary="{} per token",
        summarizes_default=True,
        help="number of experts that each token uses",
        **_COUNT,
        **_NEEDS,
    )
    moe_router_score_function: str = flag(
        "softmax",
        choices=SCORE_FUNCTIONS,
        rejected={"sqrtsoftplus": "it is not implemented; set softmax or sigmoid"},
        summary="{} scores",
        help="function that converts the router's logits to scores, which determine the experts of a token "
        "and their weights",
        **_NEEDS,
    )
    moe_router_pre_softmax: bool = flag(
        False,
        summary="softmax over all experts",
        help="weight the outputs of the chosen experts by their softmax over all experts, so that the "
        "weights add up to less than 1 (without the flag, the softmax is over the chosen experts)",
        unused_with=("model.moe_router_score_function=sigmoid",),
        **_NEEDS,
    )
    moe_router_num_groups: int | None = flag(
        None,
        summary="{} expert groups",
        help="number of groups of consecutive experts (default: no groups). A token chooses experts only in "
        "the --moe-router-group-topk groups with the highest scores",
        needs={
            **_NEEDS["needs"],
            "model.moe_router_group_topk": "",
        },
        **_COUNT,
    )
    moe_router_group_topk: int | None = flag(
        None,
        summary="{} groups per token",
        help="with --moe-router-num-groups: number of groups in which a token chooses experts",
        needs={"model.moe_router_num_groups": ""},
        **_COUNT,
    )
    moe_router_group_score_topk: int | None = flag(
        None,
        summary="group score of {} experts",
        help="the score of a group is the sum of its N highest expert scores; 1 in DeepSeek-V2, "
        "2 in DeepSeek-V3 (default: --moe-router-topk / --moe-router-group-topk, as in Megatron-LM)",
        needs={"model.moe_router_num_groups": ""},
        **_COUNT,
    )
    moe_router_topk_scaling_factor: float | None = flag(
        None,
        above=0,
        summary="expert weights x {:g}",
        help="multiplier of the weights of the chosen experts (default: 1)",
        changes_layer_time=False,
        **_NEEDS,
    )
    moe_router_enable_expert_bias: bool = flag(
        False,
        summary="expert bias",
        help="balance the load by a bias per expert, which is added to the expert's scores when experts are "
        "chosen, but not to their weights (arXiv:2408.15664). After each step, the bias of an expert with "
        "fewer tokens than the mean grows by --moe-router-bias-update-rate, and the bias of an expert with "
        "more tokens than the mean shrinks by it",
        needs={"model.moe_router_score_function=sigmoid": "the bias is added to sigmoid scores"},
    )
    moe_router_bias_update_rate: float = flag(
        1e-3,
        above=0,
        changes_model=False,
        changes_layer_time=False,
        help="with --moe-router-enable-expert-bias: change of each expert's bias per step",
        needs={"model.moe_router_enable_expert_bias": ""},
    )
    moe_router_load_balancing_type: str = flag(
        "seq_aux_loss",
        choices=BALANCE_LOSSES,
        rejected={
            "aux_loss": "its value for a micro-batch depends on the layout; set seq_aux_loss, which has a "
            "value for each sequence",
            "sinkhorn": "it is not implemented; set seq_aux_loss",
            "quantile_balancing": "it is not implemented; set none, and --moe-router-enable-expert-bias",
        },
        several="a run has one balance loss, so keep one of them",
        help="balance loss, which is multiplied by --moe-aux-loss-coeff. Its value does not "
        "depend on the layout\n"
        "seq_aux_loss: the loss of each sequence, averaged over the sequences\n"
        "global_aux_loss: the loss with the tokens per expert in the global batch of the previous step "
        "(Megatron-LM uses a running mean over micro-batches, which depends on the layout)\n"
        "none: no balance loss",
        **_TRAINING,
    )
    moe_aux_loss_coeff: float = flag(
        0.0,
        at_least=0,
        several="a run has one balance loss, so keep its coefficient",
        help="coefficient of the balance loss, which is added to the loss; 0: no balance loss",
        unused_with=("model.moe_router_load_balancing_type=none",),
        **_TRAINING,
    )
    moe_z_loss_coeff: float | None = flag(
        None,
        above=0,
        help="coefficient of the router's z-loss, which is added to the loss (default: no z-loss): the mean "
        "of logsumexp(logits)^2 over all tokens (arXiv:2202.08906)",
        **_TRAINING,
    )
    moe_router_force_load_balancing: bool = flag(
        False,
        help="for benchmarks: give equal numbers of tokens to all experts and ignore the scores. The "
        "experts of a token, and therefore the losses, then depend on the layout",
        excludes={
            "model.moe_router_enable_expert_bias": "the scores, which the bias changes, choose no experts"
        },
        **_TRAINING,
    )

    @property
    def expert_hidden_size(self) -> int:
        """Returns the hidden size of each expert."""
        if self.moe_ffn_hidden_size is None:
            raise ValueError("a dense model has no experts")
        return self.moe_ffn_hidden_size

    @property
    def experts_of_group_score(self) -> int:
        """Returns the number of expert scores whose sum is the score of a group."""
        groups = self.moe_router_group_topk or self.moe_router_num_groups or 1
        return self.moe_router_group_score_topk or self.moe_router_topk // groups

    @property
    def has_balance_loss(self) -> bool:
        """Returns whether a balance loss is added to the loss."""
        return self.moe_aux_loss_coeff > 0 and self.moe_router_load_balancing_type != "none"

    def router_mistakes(self) -> Iterator[str]:
        """Yields a sentence for each setting of the router that contradicts a different setting."""
        experts, chosen = self.num_experts, self.moe_router_topk
        groups, best = self.moe_router_num_groups, self.moe_router_group_topk
        top_k, of_groups = f"--moe-router-topk {chosen}", f"--moe-router-group-topk {best}"
        if experts is None:
            return
        if chosen > experts:
            yield f"{top_k} is larger than --num-experts {experts}: reduce the one, or increase the other"
        if groups is None or best is None:
            return
        yield from indivisible("--num-experts", experts, "--moe-router-num-groups", groups)
        if best > groups:
            yield (
                f"{of_groups} is larger than --moe-router-num-groups {groups}: reduce --moe-router-group-topk"
            )
        if (scored := self.moe_router_group_score_topk) is not None and scored > (experts // groups):
            yield (
                f"--moe-router-group-score-topk {scored} is larger than the {experts // groups} experts of a "
                "group: reduce it"
            )
        if scored is None and chosen % best:
            yield (
                f"{top_k} is not divisible by {of_groups}: the score of a group is a sum over their "
                "quotient; change one of them, or set --moe-router-group-score-topk"
            )
        elif chosen > (available := best * (experts // groups)) and best <= groups and chosen <= experts:
            yield (
                f"{top_k} is larger than the {available} experts in {of_groups} groups: reduce "
                "--moe-router-topk, or increase --moe-router-group-topk"
            )

    def unused_fields(self) -> set[str]:
        unused = super().unused_fields()
        if self.num_experts is None:
            return unused | OPTIONS_OF_EXPERTS
        return unused if DENSE in self.moe_layer_freq else unused | {"ffn_hidden_size"}

    @property
    def has_dense_mlp(self) -> bool:
        """Returns whether a layer has an MLP that each token uses: a dense MLP or a shared expert."""
        is_dense = self.num_experts is None or DENSE in self.moe_layer_freq
        return is_dense or self.moe_shared_expert_intermediate_size is not None

    def has_experts(self, layer: int) -> bool:
        """Returns whether a transformer layer has experts. layer: index, counted from 0."""
        return self.num_experts is not None and (
            self.moe_layer_freq[layer % len(self.moe_layer_freq)] == EXPERTS
        )


OPTIONS_OF_EXPERTS = frozenset(field.name for field in fields(ExpertConfig)) - {"num_experts"}
"""Fields that have no effect on a dense model."""
