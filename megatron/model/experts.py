"""The expert layer: a router, the experts, and the shared expert (mixture of experts, arXiv 1701.06538).

A router scores all experts for each token and chooses k of them. The token's output is the sum of the chosen
experts' outputs, each times the router's weight for it, plus the output of the shared expert, if there is
one:

    scores   = softmax or sigmoid of the router's logits, fp32             Router
    experts  = the k best by score (+ bias); ties go to the lower id
    weights  = the scores of the chosen experts, see `_weights`
    output   = sum over k of weight * expert(token) + shared_expert(token)  ExpertMLP

A token's output does not depend on the layout: each token is scored alone, in fp32, and no expert has a
capacity. Sums over many tokens are either exact or taken over a fixed set of tokens:

- tokens per expert: int64 counts over the step's global batch (`RouterBalance`);
- balance loss: over the tokens of one sequence (seq_aux_loss), or with the previous step's counts
  (global_aux_loss);
- the z-loss, a mean over tokens.

Shapes: s, b, h as in gpt_model.py; E experts, k per token, f = --moe-ffn-hidden-size; T = s b tokens of this
rank. With expert parallelism (EP > 1) a rank holds E / EP experts and receives the rows of other ranks'
tokens (`mpu.token_dispatch`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.kernels.grouped_linear import Groups
from megatron.kernels.operators import first_order, keep_input, take_input
from megatron.model.layer_context import LayerContext
from megatron.model.layer_list import FIRST_TRANSFORMER_LAYER, first_mtp_layer_of
from megatron.mpu.compilation import not_compiled
from megatron.mpu.grouped_linear import grouped_linear
from megatron.mpu.mesh import Mesh
from megatron.mpu.parameter_spec import ParameterSpec, Shard
from megatron.mpu.parameters import new_parameter
from megatron.mpu.products import products_of
from megatron.mpu.recompute import recomputed
from megatron.mpu.step_metrics import Reduction
from megatron.mpu.token_dispatch import DISPATCHERS, Routing, count_experts

_TINY = 1e-20
"""Added to the sum of a token's sigmoid scores before the scores are divided by this sum, as in DeepSeek-V3
and Megatron-LM."""


class ExpertMLP(nn.Module):
    """Router, experts and shared expert, used instead of a dense MLP. Input and output are
    [seq, batch, hidden]."""

    skipped_bias = None
    """This layer returns no bias for the residual addition: it adds all of its biases itself."""

    def __init__(
        self,
        context: LayerContext,
        layer_index: int,
        activation: Callable[[Tensor], Tensor],
        shared_expert: nn.Module | None,
    ) -> None:
        """layer_index: the layer's index in the layer list. activation: the function between the two matrices
        of an expert. shared_expert: an MLP that computes every token, or None."""
        super().__init__()
        model, parallel = context.config.model, context.config.parallel
        assert model.num_experts is not None
        size, hidden, parts = model.expert_hidden_size, model.hidden_size, 2 if model.glu_activation else 1
        self.router = Router(context, layer_index)
        self.dispatcher = DISPATCHERS[parallel.moe_token_dispatcher_type](context.mesh.ep, model.num_experts)
        first = ExpertLinear(context, hidden, size, parts, init_std=model.matrix_init_std)
        second = ExpertLinear(context, size, hidden, init_std=model.output_init_std)
        self.experts = nn.ModuleDict({"dense_h_to_4h": first, "dense_4h_to_h": second})
        self.activation = activation
        self.recomputes_activation = context.config.training.recomputes("moe_act")
        self.shared_expert = shared_expert
        if model.moe_shared_expert_gate:
            spec = ParameterSpec((1, hidden), init_std=model.matrix_init_std, lr_mult=model.matrix_lr_mult)
            self.shared_expert_gate = nn.ParameterDict({"weight": new_parameter(spec)})

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the output [seq, batch, hidden] for this rank's tokens [seq, batch, hidden]."""
        output = self._routed(hidden)
        if self.shared_expert is None:
            return output
        shared = self.shared_expert(hidden)
        if hasattr(self, "shared_expert_gate"):
            shared = shared * F.linear(hidden, self.shared_expert_gate["weight"]).sigmoid()
        return output + shared

    @not_compiled  # the host reads the number of rows per expert
    def _routed(self, hidden: Tensor) -> Tensor:
        routing = self.router(hidden)
        rows, groups, state = self.dispatcher.dispatch(hidden.flatten(0, 1), routing)
        rows = self.experts["dense_h_to_4h"](rows, groups)
        activated = self.activation(rows)
        with recomputed(self.activation, rows, activated, self.recomputes_activation):
            rows = self.experts["dense_4h_to_h"](activated, groups)
        return self.dispatcher.combine(rows, routing, state).to(hidden.dtype).view(hidden.shape)


class ExpertLinear(nn.Module):
    """One linear layer per expert. It maps rows [N, n_in], sorted by expert, to [N, n_out]. A rank holds only
    its own experts."""

    def __init__(
        self, context: LayerContext, n_in: int, n_out: int, num_fused_parts: int = 1, *, init_std: float
    ) -> None:
        """n_out: output size of each of the `num_fused_parts` parts."""
        super().__init__()
        self.deferred = context.deferred
        model, sharding = context.config.model, (Shard(0, "ep"),)
        assert model.num_experts is not None
        rows = (model.num_experts, num_fused_parts * n_out)
        weight = ParameterSpec(
            (*rows, n_in),
            sharding,
            init_std=init_std,
            lr_mult=model.matrix_lr_mult,
            matrix_rows=(n_out,) * num_fused_parts,
        )
        bias = None if model.disable_bias_linear else ParameterSpec(rows, sharding, weight_decay=False)
        self.weight = new_parameter(weight, context.mesh.ep)
        self.bias = None if bias is None else new_parameter(bias, context.mesh.ep)
        self.products = products_of(context.fp8, self.weight)

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        return grouped_linear(rows, self.weight, self.bias, groups, self.deferred, self.products)


class Router(nn.Module):
    """Chooses the experts of each token. It maps hidden [seq, batch, hidden] to the `Routing` of seq x batch
    tokens.

    The choice is made once: a recomputed forward pass uses the choice of the first pass and counts no tokens.
    """

    tokens_per_expert: Tensor
    """Number of this rank's tokens per expert, int64 [E], in the training passes since
    `RouterBalance.begin_step`."""

    def __init__(self, context: LayerContext, layer_index: int) -> None:
        super().__init__()
        model = context.config.model
        assert model.num_experts is not None
        self.model, self.num_experts, self.layer_index = model, model.num_experts, layer_index
        self.samples_of, self.metrics = context.dropout_rng, context.metrics
        self.records_layer = context.config.logging.moe_per_layer_logging
        self.keeps_choice = context.config.training.recomputes_layers
        self.shards = context.mesh.sequence if context.sequence_parallel else context.cp_group
        self.cp_size = context.cp_group.size
        spec = ParameterSpec(
            (self.num_experts, model.hidden_size),
            init_std=model.matrix_init_std,
            lr_mult=model.matrix_lr_mult,
        )
        self.weight = new_parameter(spec)
        bias = ParameterSpec((self.num_experts,), weight_decay=False)
        self.bias = None if model.disable_bias_linear else new_parameter(bias)
        uses_last_step = model.has_balance_loss and model.moe_router_load_balancing_type == "global_aux_loss"
        self.expert_bias = self._state(0.0) if model.moe_router_enable_expert_bias else None
        self.expert_load = self._state(1.0) if uses_last_step else None
        counts = torch.zeros(self.num_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    def _state(self, value: float) -> nn.Parameter:
        """Returns a parameter with one fp32 value per expert, which only `RouterBalance` changes."""
        spec = ParameterSpec((self.num_experts,), init_value=value, weight_decay=False, has_gradient=False)
        return new_parameter(spec, dtype=torch.float32)

    def _apply(self, fn: Callable, recurse: bool = True) -> Router:
        """Overrides torch's method, which `to` calls, so that the per-expert state stays fp32 in a 16-bit
        model."""
        state = [each for each in (self.expert_bias, self.expert_load) if each is not None]
        values = [each.data for each in state]
        super()._apply(fn, recurse)
        for each, value in zip(state, values, strict=True):
            # `fn` may have rounded the value to 16 bits.
            each.data = each.data.float() if value.is_meta else value.to(each.device)
        return self

    def forward(self, hidden: Tensor) -> Routing:
        logits = _Fp32Linear.apply(hidden, self.weight)  # [s, b, E]
        if self.bias is not None:
            logits = logits + self.bias.float()
        experts, tokens, load, read = self._choice(logits.detach())
        weights = self._weights(logits, experts)
        for name, loss, coefficient in self._losses(logits, load):
            # A rank's loss is CP times its tokens' part of the loss, as in `CrossEntropy`.
            loss_of_rank = loss.detach() * (self.shards.size / self.cp_size)
            self.metrics.record(name, loss_of_rank)
            self.record_of_layer(name, loss_of_rank)
            weights = _AddLoss.apply(weights, loss * coefficient, self.samples_of.samples.loss_gradient)
        counts = None
        if self._is_forced:
            counts = balanced_counts(weights.shape[0] * weights.shape[1], experts.shape[-1], self.num_experts)
        return Routing(experts.flatten(0, 1), weights.flatten(0, 1), tokens, counts, read)

    def record_of_layer(self, name: str, value: Tensor, reduce: Reduction = "mean") -> None:
        """Records a metric of this layer if --moe-per-layer-logging is given."""
        if self.records_layer:
            later = self.layer_index - first_mtp_layer_of(self.model.num_layers)
            layer = f"layer {self.layer_index - FIRST_TRANSFORMER_LAYER}" if later < 0 else f"mtp_{later + 1}"
            self.metrics.record(f"{layer} {name}", value, reduce)

    # --- choice of experts ---

    @property
    def _is_forced(self) -> bool:
        """Whether the tokens are distributed evenly over the experts (--moe-router-force-load-balancing). It
        is false outside of training, so evaluations measure the real routing."""
        return self.model.moe_router_force_load_balancing and self.training

    @torch.no_grad()
    def _choice(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None, list[Any]]:
        """Returns four values: the experts of each token, int64 [s, b, k], in ascending order; the number of
        tokens per expert, int64 [E]; the factors that the balance loss multiplies the scores with, fp32
        [b or 1, E], or None; and the list for `Routing.read`. The first forward pass of training also adds
        the tokens to `tokens_per_expert`."""
        kept, key = self.samples_of.samples.kept, f"{self.layer_index}.router"
        if self.training and key in kept:
            found: tuple[Tensor, Tensor, Tensor | None, list[Any]] = kept.pop(key)
            return found
        read = list[Any]()
        if self._is_forced:
            experts = balanced_experts(logits, self.model.moe_router_topk)
        else:
            experts = top_k(within_best_groups(self._ranking(logits), self.model), self.model.moe_router_topk)
        experts = experts.sort(dim=-1).values
        tokens, load = count_experts(experts.flatten(), self.num_experts), None
        if self.training:
            self.tokens_per_expert += tokens
            if self.expert_load is not None:
                load = self.expert_load.detach().clone().unsqueeze(0)
            elif self.model.has_balance_loss:
                load = self._load_of_sequences(logits, experts)
            if self.keeps_choice:
                kept[key] = experts, tokens, load, read
        return experts, tokens, load, read

    def _ranking(self, logits: Tensor) -> Tensor:
        """Returns the values by which experts and groups of experts are ranked: the scores plus the bias, or
        the logits if softmax is applied after the choice (as in Megatron-LM)."""
        if self.model.moe_router_score_function == "softmax" and not self.model.moe_router_pre_softmax:
            return logits
        scores = self._scores(logits)
        return scores if self.expert_bias is None else scores + self.expert_bias

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.model.moe_router_score_function == "softmax" else logits.sigmoid()

    def _weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Returns the weights of the chosen experts, fp32 [s, b, k]."""
        model = self.model
        if model.moe_router_score_function == "sigmoid":
            weights = logits.gather(-1, experts).sigmoid()
            if model.moe_router_topk > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        elif model.moe_router_pre_softmax:
            weights = logits.softmax(-1).gather(-1, experts)
        else:
            weights = logits.gather(-1, experts).softmax(-1)
        factor = model.moe_router_topk_scaling_factor
        return weights if factor is None else weights * factor

    # --- losses ---

    def _losses(self, logits: Tensor, load: Tensor | None) -> list[tuple[str, Tensor, float]]:
        """Returns (name, this rank's part of the loss of its samples, coefficient) for each auxiliary
        loss."""
        if not self.training:
            return []
        found = []
        per_token = self.cp_size / (logits.shape[0] * self.shards.size * logits.shape[1])
        if load is not None:
            scores = self._scores(logits)
            if self.model.moe_router_score_function == "sigmoid":
                scores = scores / (scores.sum(-1, keepdim=True) + _TINY)
            balance = (scores * load).sum() * per_token
            found.append(("load balancing loss", balance, self.model.moe_aux_loss_coeff))
        if self.model.moe_z_loss_coeff is not None:
            z_loss = logits.logsumexp(-1).square().sum() * per_token
            found.append(("router z-loss", z_loss, self.model.moe_z_loss_coeff))
        return found

    def _load_of_sequences(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Returns fp32 [b, E]: the number of a sequence's tokens per expert, divided by the mean over the
        experts. The tokens are counted for the k experts with the best scores, without bias and groups, as in
        the balance loss of DeepSeek-V3 (arXiv 2412.19437, equation 18)."""
        if self.expert_bias is not None or self.model.moe_router_num_groups is not None:
            experts = top_k(logits, self.model.moe_router_topk)
        counts = count_experts(experts.transpose(0, 1).flatten(1), self.num_experts)
        if self.shards.size > 1:
            dist.all_reduce(counts, group=self.shards.group)
        return counts.float() * (self.num_experts / (experts.shape[0] * self.shards.size * experts.shape[2]))


@first_order
class _Fp32Linear(torch.autograd.Function):
    """Computes F.linear in fp32. It saves the 16-bit input for the backward pass instead of an fp32 copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        keep_input(ctx, x)
        ctx.weight = weight
        return F.linear(x.float().flatten(0, -2), weight.float()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, rows, weight = take_input(ctx), grad.flatten(0, -2), ctx.weight
        grad_x = rows.mm(weight.float()).view(x.shape).to(x.dtype)
        return grad_x, rows.t().mm(x.float().flatten(0, -2)).to(weight.dtype)


@first_order
class _AddLoss(torch.autograd.Function):
    """Returns the weights unchanged. In the backward pass the auxiliary loss gets the gradient of the model's
    loss."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, gradient: float) -> Tensor:
        ctx.gradient, ctx.like = gradient, loss.detach()
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full_like(ctx.like, ctx.gradient), None


def top_k(scores: Tensor, k: int) -> Tensor:
    """Returns the indices of the k largest scores along the last dimension, best first. If scores are equal,
    the lower index comes first; torch.topk does not promise this order."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def within_best_groups(scores: Tensor, model: ModelConfig) -> Tensor:
    """Returns the scores, with -inf for experts outside of a token's best groups
    (--moe-router-group-topk)."""
    if model.moe_router_num_groups is None:
        return scores
    groups = scores.unflatten(-1, (model.moe_router_num_groups, -1))
    chosen = model.moe_router_group_topk or model.moe_router_num_groups
    best = groups.sort(dim=-1, descending=True).values[..., : model.experts_of_group_score].sum(-1)
    keep = torch.zeros_like(best).scatter_(-1, top_k(best, chosen), 1.0).bool()
    return groups.masked_fill(~keep.unsqueeze(-1), -torch.inf).flatten(-2)


def balanced_experts(logits: Tensor, k: int) -> Tensor:
    """Returns k experts for each token, int64 [s, b, k], such that the experts' numbers of tokens differ by
    at most one. Token t of this rank gets the experts t k to t k + k - 1, modulo E."""
    tokens, num_experts = logits[..., 0].numel(), logits.shape[-1]
    experts = torch.arange(tokens * k, device=logits.device).remainder_(num_experts)
    return experts.view(*logits.shape[:-1], k)


def balanced_counts(tokens: int, k: int, num_experts: int) -> tuple[int, ...]:
    """Returns the number of rows that each expert gets from `balanced_experts`."""
    each, more = divmod(tokens * k, num_experts)
    return tuple(each + (expert < more) for expert in range(num_experts))


class RouterBalance:
    """Counts the tokens per expert of a step's global batch, and computes the changes of the routers' bias
    and load."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        """module: the module with this rank's pipeline stages."""
        self._routers = [child for child in module.modules() if isinstance(child, Router)]
        self._mesh = mesh

    def begin_step(self) -> None:
        """Sets the counts to zero, so that passes outside of a step (such as measurements) have no effect."""
        for router in self._routers:
            router.tokens_per_expert.zero_()

    @torch.no_grad()
    def end_step(self) -> dict[nn.Parameter, Tensor]:
        """Sums the counts over all ranks, records metrics, and returns the change of each router's state. It
        is collective over the ranks with this rank's pipeline rank."""
        if not self._routers:
            return {}
        counts = torch.stack([router.tokens_per_expert for router in self._routers])
        if self._mesh.stage.size > 1:
            dist.all_reduce(counts, group=self._mesh.stage.group)
        above_mean = (counts * counts.shape[1] - counts.sum(1, keepdim=True)).sign().float()
        loads = (counts.double() / counts.double().mean(1, keepdim=True)).float()
        changes: dict[nn.Parameter, Tensor] = {}
        for router, sign, load in zip(self._routers, above_mean, loads, strict=True):
            if router.expert_bias is not None:
                changes[router.expert_bias] = -router.model.moe_router_bias_update_rate * sign
            if router.expert_load is not None:
                changes[router.expert_load] = load - router.expert_load
        self._record(counts)
        return changes

    def _record(self, counts: Tensor) -> None:
        """Records the tokens per expert, the excess of the largest count over the mean (MaxVio, arXiv
        2408.15664, equation 4), the number of experts without tokens, and the norm of the bias. counts:
        [layers, E]."""
        numbers = counts.double()
        mean, largest = numbers.mean(1), numbers.amax(1)
        values: dict[str, tuple[Tensor, Reduction]] = {
            "tokens per expert, min": (numbers.amin(1), "min"),
            "tokens per expert, mean": (mean, "mean"),
            "tokens per expert, max": (largest, "max"),
            "MaxVio": (largest / mean - 1.0, "mean"),
            "experts without tokens": ((counts == 0).sum(1), "mean"),
        }
        states = (router.expert_bias for router in self._routers)
        biases: list[Tensor] = [bias for bias in states if bias is not None]
        if biases:
            values["expert bias norm"] = (torch.stack(biases).norm(dim=1), "mean")
        first, *_ = self._routers
        for name, (of_layers, reduce) in values.items():
            first.metrics.record(name, of_layers, reduce)
            for router, value in zip(self._routers, of_layers, strict=True) if first.records_layer else ():
                router.record_of_layer(name, value, reduce)
