"""Norms of queries and keys (--qk-layernorm).

These norms bound the attention scores (arXiv 2302.05442, section 2). All tensor-parallel ranks hold their
full parameters. Each rank applies the norms to its own heads, so each rank's gradients are partial sums.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kernels.operators import first_order
from megatron.kernels.rotary import NO_NORMS, HeadNorms
from megatron.model.layer_context import LayerContext
from megatron.model.norm import norm_arguments, norm_class
from megatron.mpu.compilation import not_compiled
from megatron.mpu.mappings import all_reduce_
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec
from megatron.mpu.parameters import mark_sequence_parallel_grad, new_parameter


def head_norms(context: LayerContext) -> tuple[nn.Module, nn.Module]:
    """Returns the norms for --qk-layernorm-scope head, which apply --normalization to each query and key
    head."""
    norm = norm_class(context.config)
    arguments = norm_arguments(context.config, context.config.model.kv_channels)
    return _with_partial_gradients(context, norm(*arguments), norm(*arguments))


def head_norm_vectors(queries: Any, keys: Any) -> HeadNorms:
    """Returns the parameters of two modules of `head_norms` for the kernel that also rotates; without norms,
    none."""
    if queries is None:
        return NO_NORMS
    vectors = queries.weight, keys.weight, queries.bias, keys.bias
    return HeadNorms(*vectors, queries.epsilon, queries.zero_centered)


def projection_norms(context: LayerContext) -> tuple[nn.Module, nn.Module]:
    """Returns the norms for --qk-layernorm-scope projection: RMS norms over all query heads and over all key
    heads."""
    model, tp_group = context.config.model, context.tp_group
    queries = ProjectionNorm(model.query_width, model.layernorm_epsilon, tp_group)
    replicas = max(tp_group.size // model.query_groups, 1)
    keys = ProjectionNorm(model.key_width, model.layernorm_epsilon, tp_group, replicas)
    return _with_partial_gradients(context, queries, keys)


def _with_partial_gradients(
    context: LayerContext, queries: nn.Module, keys: nn.Module
) -> tuple[nn.Module, nn.Module]:
    if context.tp_group.size > 1:
        for parameter in (*queries.parameters(), *keys.parameters()):
            mark_sequence_parallel_grad(parameter)
    return queries, keys


class ProjectionNorm(nn.Module):
    """RMS norm over the heads of all tensor-parallel ranks. Its statistics are in fp32.

    The ranks all-reduce their sums of squares, and in the backward pass their sums of gradient x input.
    """

    def __init__(self, width: int, epsilon: float, tp_group: Axis, replicas: int = 1) -> None:
        """width: number of elements of all heads. replicas: number of consecutive ranks that hold the same
        heads."""
        super().__init__()
        self.epsilon, self.tp_group, self.replicas = epsilon, tp_group, replicas
        self.width = width
        spec = ParameterSpec((width,), init_value=1.0, weight_decay=False)
        self.weight = new_parameter(spec)

    def forward(self, heads: Tensor) -> Tensor:
        """Returns the norm of [seq, batch, heads / TP, head_dim], in the dtype of the parameter."""
        x = heads.flatten(2)
        if self.tp_group.size == 1:
            normed = F.rms_norm(x, (self.width,), self.weight, self.epsilon)
        else:
            first = self.tp_group.rank // self.replicas * x.shape[-1]
            normed = _norm_over_ranks(x, self.weight.narrow(0, first, x.shape[-1]), self)
        return normed.view(heads.shape)


@not_compiled  # keeps the collectives as they are written
def _norm_over_ranks(x: Tensor, weight: Tensor, norm: ProjectionNorm) -> Tensor:
    return _NormOverRanks.apply(x, weight, norm)


@first_order
class _NormOverRanks(torch.autograd.Function):
    """Maps x [seq, batch, n] and weight [n], which are this rank's parts, to x * r * weight.

    r = (sum(x^2) / width + epsilon)^(-1/2), where the sum is over all ranks. If g is the gradient of the
    output, the gradient of x is r * weight * g - r^3 * x * sum(g * weight * x) / width.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: ProjectionNorm) -> Tensor:
        squares = all_reduce_(x.float().square().sum(-1, keepdim=True), norm.tp_group)
        rate = torch.rsqrt(squares / (norm.replicas * norm.width) + norm.epsilon)
        ctx.save_for_backward(x, weight, rate)
        ctx.norm = norm
        return (x * rate * weight).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rate = ctx.saved_tensors
        norm, grad = ctx.norm, grad.float()
        scaled = grad * x * rate
        grad_weight = scaled.flatten(0, -2).sum(0)
        # Ranks with the same heads have different parts of the gradient, so each subtracts only its share.
        inner = all_reduce_((scaled * weight).sum(-1, keepdim=True), norm.tp_group)
        grad_x = rate * (grad * weight - x * rate * (inner / (norm.replicas * norm.width)))
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None
