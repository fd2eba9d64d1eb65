"""The linear layer of experts: one product per expert, with gradients as in `layers.linear`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels.grouped_linear import Groups
from megatron.mpu.layers import LinearFunction, apply_linear
from megatron.mpu.mesh import ONE_RANK
from megatron.mpu.products import PLAIN, Products
from megatron.mpu.weight_gradient import DeferredGradients


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    deferred: DeferredGradients | None = None,
    products: Products = PLAIN,
) -> Tensor:
    """Returns x_e @ weight[e].T + bias[e] for the rows x_e of each expert e, [N, n_out].

    x: [N, n_in], sorted by expert, with the number of rows per expert in `groups`. weight:
    [experts, n_out, n_in]. bias: [experts, n_out]. An expert without rows gets a gradient of zero. deferred:
    a queue for the weight's gradient; None: the backward pass computes it.
    """
    if sum(groups.counts) != len(x) or len(groups.counts) != len(weight):
        raise ValueError(f"{len(x)} rows of {len(weight)} experts, but the groups are {groups.counts}")
    x = x.contiguous()
    if not torch.is_grad_enabled():
        return products.output(x, weight, bias, groups)
    return apply_linear(LinearFunction, x, weight, bias, deferred, ONE_RANK.tp, products, groups)
