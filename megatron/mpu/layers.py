"""The layers whose parameters are cut over the tensor ranks: vocabulary, columns, rows.

Names follow Megatron: a linear layer is column-parallel where its outputs are cut, row-parallel where its
inputs are. A column-parallel layer followed by a row-parallel one needs a single sum over the ranks each way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from megatron.mpu.embedding import embedding
from megatron.mpu.layout import TensorGroup
from megatron.mpu.mappings import (
    all_of_sequence,
    part_of_summed_sequence,
    sum_and_scatter_sequence,
    sum_in_place,
)
from megatron.mpu.parameters import ParameterSpec, local_slices, new_parameter, spec_of


class VocabParallelEmbedding(nn.Module):
    """Token ids [...] -> their vectors [..., hidden], the same on all tensor ranks.

    Each rank holds `padded_vocab / size` rows of the table. Rows from `used_rows` on are padding.
    """

    def __init__(
        self, padded_vocab: int, hidden: int, tensor: TensorGroup, *, used_rows: int, init_std: float
    ) -> None:
        super().__init__()
        self.tensor = tensor
        spec = ParameterSpec((padded_vocab, hidden), shard_dim=0, init_std=init_std, used_rows=used_rows)
        self.weight = new_parameter(spec, tensor)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.tensor.size == 1:
            return embedding(token_ids, self.weight)
        (rows,) = local_slices(spec_of(self.weight), self.tensor)
        elsewhere = (token_ids < rows.start) | (token_ids >= rows.stop)
        # Other ranks' tokens read rows that are spread out, so that no row has a long sum of zeros.
        vectors = embedding((token_ids - rows.start).remainder_(rows.stop - rows.start), self.weight)
        vectors = vectors.masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        return _SumOwned.apply(vectors, self.tensor)


class ColumnParallelLinear(nn.Module):
    """A replicated [..., n_in] -> [..., n_out / size], this rank's part of the outputs.

    rate_factor: what the learning rate of the weight is multiplied by.
    blocks: the outputs are this many equal blocks, of each of which a rank holds a part (a gated MLP has 2).
    cut_sequence: the input is this rank's [seq / size, ..., n_in], and is gathered; the output is whole.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        tensor: TensorGroup,
        *,
        init_std: float,
        rate_factor: float = 1.0,
        bias: bool = True,
        blocks: int = 1,
        cut_sequence: bool = False,
    ) -> None:
        super().__init__()
        self.tensor = tensor
        self.cut_sequence = cut_sequence
        self.weight = new_parameter(
            ParameterSpec(
                (n_out, n_in), shard_dim=0, blocks=blocks, init_std=init_std, rate_factor=rate_factor
            ),
            tensor,
        )
        self.bias = (
            new_parameter(ParameterSpec((n_out,), shard_dim=0, blocks=blocks, weight_decay=False), tensor)
            if bias
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _column_linear(x, self.weight, self.bias, self.tensor, self.cut_sequence)


class RowParallelLinear(nn.Module):
    """[..., n_in / size], this rank's part of the inputs -> [..., n_out], the same on all tensor ranks.

    rate_factor: what the learning rate of the weight is multiplied by.
    cut_sequence: the output is this rank's [seq / size, ..., n_out] of the whole.
    """

    def __init__(
        self,
        n_in: int,
        n_out: int,
        tensor: TensorGroup,
        *,
        init_std: float,
        rate_factor: float = 1.0,
        bias: bool = True,
        cut_sequence: bool = False,
    ) -> None:
        super().__init__()
        self.tensor = tensor
        self.cut_sequence = cut_sequence
        self.weight = new_parameter(
            ParameterSpec((n_out, n_in), shard_dim=1, init_std=init_std, rate_factor=rate_factor), tensor
        )
        self.bias = new_parameter(ParameterSpec((n_out,), weight_decay=False), tensor) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tensor.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = _sum_over_ranks(F.linear(x, self.weight), self.tensor, self.cut_sequence)
        # After the sum, so that it is added once.
        return y if self.bias is None else y + self.bias


def parallel_logits(hidden: torch.Tensor, weight: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
    """Replicated [..., hidden] and this rank's rows of the embedding -> its logits [..., vocab / size]."""
    return _column_linear(hidden, weight, None, tensor, cut_sequence=False)


def _column_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tensor: TensorGroup,
    cut_sequence: bool,
) -> torch.Tensor:
    if tensor.size == 1:
        return F.linear(x, weight, bias)
    return _column_linear_over_ranks(x, weight, bias, tensor, cut_sequence)


# Collectives stay outside of compiled graphs, where they overlap with products as written here.
@torch.compiler.disable
def _column_linear_over_ranks(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tensor: TensorGroup,
    cut_sequence: bool,
) -> torch.Tensor:
    function = _SequenceColumnLinear if cut_sequence else _ColumnLinear
    return function.apply(x, weight, bias, tensor)


@torch.compiler.disable
def _sum_over_ranks(y: torch.Tensor, tensor: TensorGroup, cut_sequence: bool) -> torch.Tensor:
    """The sum of each rank's `y`, which nothing else may use; of a cut sequence this rank's part of it."""
    return sum_and_scatter_sequence(y, tensor) if cut_sequence else _SumOwned.apply(y, tensor)


class _ColumnLinear(torch.autograd.Function):
    """F.linear whose input gradient is summed over the ranks while the weight's gradient is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tensor: TensorGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tensor = tensor
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = pending = None
        if needs_x:
            grad_x = grad.matmul(weight)
            pending = dist.all_reduce(grad_x, group=ctx.tensor.group, async_op=True)
        grad_rows = grad.reshape(-1, grad.shape[-1])
        if needs_weight:
            grad_weight = grad_rows.t().matmul(x.reshape(-1, x.shape[-1]))
        if needs_bias:
            grad_bias = grad_rows.sum(0)
        if pending is not None:
            pending.wait()
        return grad_x, grad_weight, grad_bias, None


class _SequenceColumnLinear(torch.autograd.Function):
    """F.linear of an input whose sequence is cut over the ranks.

    Only this rank's part of the input is kept. The backward pass gathers it again while it computes the
    input's gradient, and sums and cuts that while it computes the weight's (Korthikanti et al., 2022).
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tensor: TensorGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tensor = tensor
        whole, pending = all_of_sequence(x, tensor)
        pending.wait()
        return F.linear(whole, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        whole, gathered = all_of_sequence(x, ctx.tensor)
        grad_whole = grad.matmul(weight)
        gathered.wait()
        grad_x, summed = part_of_summed_sequence(grad_whole, ctx.tensor)
        grad_weight = grad_bias = None
        grad_rows = grad.reshape(-1, grad.shape[-1])
        if needs_weight:
            grad_weight = grad_rows.t().matmul(whole.view(-1, whole.shape[-1]))
        if needs_bias:
            grad_bias = grad_rows.sum(0)
        summed.wait()
        return grad_x, grad_weight, grad_bias, None


class _SumOwned(torch.autograd.Function):
    """Sum over the ranks in place of a tensor that nothing else uses: the fresh output of the call before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
        ctx.mark_dirty(x)
        return sum_in_place(x, tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
