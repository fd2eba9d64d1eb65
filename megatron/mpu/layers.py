"""Tensor-parallel layers: vocabulary-parallel embedding, column-parallel and row-parallel linear layers.

The idea (Megatron-LM, arXiv 1909.08053, section 3): a column-parallel layer shards its outputs, a
row-parallel layer its inputs. A column-parallel layer, an elementwise function and a row-parallel layer in
sequence need one all-reduce in the forward pass and one in the backward pass. With sequence parallelism
(arXiv 2205.05198) each all-reduce becomes a reduce-scatter and an all-gather along the sequence, and the
activations between such blocks are sharded along the sequence.

With --tp-comm-overlap (a flag of Megatron-LM) these collectives overlap with the neighboring matrix product.
The product is computed in chunks along the sequence. After an all-gather, one chunk is multiplied while the
next chunk is gathered. Before a reduce-scatter, one chunk is reduced while the next chunk is multiplied. Only
the communication of the first chunk (all-gather) or of the last chunk (reduce-scatter) is exposed.

A chunk holds a part of every rank's shard: a full tensor [seq, batch, ...] is viewed as
[rank, chunk, row of the chunk, batch, ...]. The products are batched over the ranks, with the weight as a
common factor. Products and reduced chunks are therefore written directly to their places in the result,
without a copy. (If there is a bias, cuBLAS first copies it into the result of a batched product.) Chunks do
not change which terms a sum over ranks adds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kernels.grouped_linear import Groups, sum_groups
from megatron.kernels.operators import first_order, keep_input, take_input
from megatron.kernels.selection import uses_kernels
from megatron.mpu.compilation import not_compiled
from megatron.mpu.compiled_operators import compiled_linear
from megatron.mpu.embedding import embedding
from megatron.mpu.mappings import (
    all_gather_sequence,
    all_reduce_,
    reduce_scatter_sequence,
    reduce_scatter_to_sequence_region,
)
from megatron.mpu.mesh import Axis
from megatron.mpu.parameter_spec import ParameterSpec, Shard
from megatron.mpu.parameters import new_parameter, spec_of
from megatron.mpu.products import PLAIN, Fp8, Products, products_of
from megatron.mpu.weight_gradient import (
    DeferredGradients,
    Gradient,
    ensure_requires_grad,
    fuses_accumulation,
    weight_gradient,
)
from megatron.torch_versions import all_gather_single, reduce_scatter_single

_ONE_RANK = Axis("tp")


class VocabParallelEmbedding(nn.Module):
    """Maps token ids [batch, seq] to vectors [batch, seq, hidden], which all tensor-parallel ranks hold.

    Each rank holds `padded_vocab / size` rows of the table. Rows from `num_valid_rows` on are padding.
    sequence_parallel: the output is this rank's shard [seq / size, batch, hidden].
    """

    norm: nn.Module
    """The norm after the embedding (--embed-layernorm). The model sets it and calls it."""

    def __init__(
        self,
        padded_vocab: int,
        hidden: int,
        tp_group: Axis,
        *,
        num_valid_rows: int,
        init_std: float,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.sequence_parallel = sequence_parallel
        spec = ParameterSpec(
            (padded_vocab, hidden), (Shard(0),), init_std=init_std, num_valid_rows=num_valid_rows
        )
        self.weight = new_parameter(spec, tp_group)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.tp_group.size == 1:
            return embedding(token_ids, self.weight)
        rows = spec_of(self.weight).segments((self.tp_group,))[0][0]
        elsewhere = (token_ids < rows.start) | (token_ids >= rows.stop)
        # Tokens of other ranks read an arbitrary row, and their result is set to zero. The modulo spreads
        # these tokens over all rows, so that the backward pass does not add all of their zeros to a single
        # row.
        vectors = embedding((token_ids - rows.start).remainder_(rows.stop - rows.start), self.weight)
        vectors = vectors.masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_region(vectors.transpose(0, 1).contiguous(), self.tp_group)
        return _AllReduceInPlace.apply(vectors, self.tp_group)


class _ParallelLinear(nn.Module):
    """The common part of column-parallel and row-parallel layers: weight, bias, and the way they communicate.

    lr_mult: multiplier of the weight's learning rate.
    num_fused_parts: number of equal matrices that are stored as one (a gated MLP has 2); each is sharded.
    matrix_rows: `ParameterSpec.matrix_rows` of the weight; by default the fused parts are its matrices.
    deferred: queue for the weight's gradient (zero-bubble); None: the backward pass computes it.
    overlap_chunks: with sequence_parallel, maximum number of chunks (see `gather_and_multiply`).
    fp8: if given, the layer multiplies FP8 matrices, except for the weight's gradient; excludes chunks.
    """

    weight_shard_dim: int | None

    def __init__(
        self,
        n_in: int,
        n_out: int,
        tp_group: Axis,
        *,
        init_std: float,
        lr_mult: float = 1.0,
        bias: bool = True,
        num_fused_parts: int = 1,
        matrix_rows: tuple[int, ...] = (),
        sequence_parallel: bool = False,
        deferred: DeferredGradients | None = None,
        overlap_chunks: int = 1,
        fp8: Fp8 | None = None,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.sequence_parallel = sequence_parallel
        self.deferred = deferred
        self.overlap_chunks = overlap_chunks if sequence_parallel and tp_group.size > 1 else 1
        dim = self.weight_shard_dim
        weight = ParameterSpec(
            (n_out, n_in),
            () if dim is None else (Shard(dim, parts=num_fused_parts),),
            init_std=init_std,
            lr_mult=lr_mult,
            matrix_rows=matrix_rows or (n_out // num_fused_parts,) * num_fused_parts,
        )
        # A column-parallel layer shards its outputs and therefore its bias. A row-parallel layer does not
        # shard its bias.
        bias_spec = ParameterSpec((n_out,), weight.sharding if dim == 0 else (), weight_decay=False)
        self.weight = new_parameter(weight, tp_group)
        self.bias = new_parameter(bias_spec, tp_group) if bias else None
        self.products = products_of(fp8, self.weight)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product with this rank's shard of the weight, plus the bias. It communicates with no
        rank: the gradient of `x` is this rank's part of a sum over the ranks."""
        return linear(x, self.weight, self.bias, self.deferred, products=self.products)


class ReplicatedLinear(_ParallelLinear):
    """A linear layer from [..., n_in] to [..., n_out] with the whole weight on each rank. With
    sequence_parallel, the caller passes shards of the sequence, and each rank's gradient of the weight is a
    partial sum."""

    weight_shard_dim = None
    forward = _ParallelLinear.multiply


class ColumnParallelLinear(_ParallelLinear):
    """Maps replicated [..., n_in] to this rank's shard of the outputs, [..., n_out / size].

    sequence_parallel: the input is this rank's shard [seq / size, ..., n_in], which is first all-gathered.
    """

    weight_shard_dim = 0

    def forward(self, x: torch.Tensor, bias_gradient: bool = True) -> torch.Tensor:
        """Returns this rank's shard of the outputs. bias_gradient: False if the next operation computes the
        gradient of the bias."""
        bias = self.bias if bias_gradient or self.bias is None else self.bias.detach()
        if self.overlap_chunks > 1:
            arguments = (x, self.weight, bias, self.tp_group, None, PLAIN, self.overlap_chunks)
            return _overlapped(_SequenceColumnLinear, *arguments)
        function = (
            _SequenceColumnLinear if self.sequence_parallel and self.tp_group.size > 1 else LinearFunction
        )
        return linear(x, self.weight, bias, self.deferred, self.tp_group, function, products=self.products)


class RowParallelLinear(_ParallelLinear):
    """Maps this rank's shard of the inputs, [..., n_in / size], to replicated [..., n_out].

    sequence_parallel: the output is this rank's shard [seq / size, ..., n_out].
    skip_bias_add: with several ranks or with kernels, the caller adds `skipped_bias` in its next fused
        operation, whose backward pass also computes the bias gradient. A single rank without kernels adds
        the bias in the matrix product.
    """

    weight_shard_dim = 1

    def __init__(
        self, n_in: int, n_out: int, tp_group: Axis, *, skip_bias_add: bool = False, **settings: Any
    ) -> None:
        super().__init__(n_in, n_out, tp_group, **settings)
        self.skip_bias_add = skip_bias_add

    @property
    def skipped_bias(self) -> torch.Tensor | None:
        """The bias, if the caller has to add it to the output."""
        if self.bias is None or not self.skip_bias_add:
            return None
        fuses = self.tp_group.size > 1 or (not torch.compiler.is_compiling() and uses_kernels(self.bias))
        return self.bias if fuses else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias if self.skipped_bias is None else None
        if self.tp_group.size == 1:
            return linear(x, self.weight, bias, self.deferred, products=self.products)
        if self.overlap_chunks > 1:
            y = _overlapped(_OverlappedRowLinear, x, self.weight, self.tp_group, self.overlap_chunks)
        else:
            y = linear(x, self.weight, None, self.deferred, products=self.products)
            y = _reduce_output(y, self.tp_group, self.sequence_parallel)
        # The bias is added after the all-reduce, so that it is added only once.
        return y if bias is None else y + bias


def parallel_logits(hidden: torch.Tensor, weight: torch.Tensor, tp_group: Axis) -> torch.Tensor:
    """Returns logits [..., vocab / size] from hidden [..., hidden] and this rank's rows of the embedding."""
    return linear(hidden, weight, None, tp_group=tp_group)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    deferred: DeferredGradients | None = None,
    tp_group: Axis = _ONE_RANK,
    function: type[torch.autograd.Function] | None = None,
    products: Products = PLAIN,
) -> torch.Tensor:
    """Runs F.linear with the given products. The gradient of `x` is summed over the ranks of `tp_group`. The
    backward pass computes `weight_gradient`, or queues it in `deferred`. If autograd's own gradients suffice,
    this is a plain PyTorch operation. function: None stands for `LinearFunction`."""
    if tp_group.size == 1 and products is PLAIN:
        if not torch.is_grad_enabled():
            return products.output(x, weight, bias)
        if deferred is None:
            if torch.compiler.is_compiling():
                return compiled_linear(x, weight, bias)
            if not fuses_accumulation(weight):
                return F.linear(x, weight, bias)
            return LinearFunction.apply(x, weight, bias, tp_group, None, products)
    return apply_linear(function or LinearFunction, x, weight, bias, deferred, tp_group, products)


# The function is not compiled, so that collectives overlap with matrix products in the written order. A
# compiled graph would also compute deferred gradients at once.
@not_compiled
def apply_linear(
    function: type[torch.autograd.Function],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    deferred: DeferredGradients | None,
    tp_group: Axis,
    products: Products,
    *groups: Groups,
) -> torch.Tensor:
    """Runs `function`, a linear layer. groups: the number of rows of each expert, only for
    `LinearFunction`."""
    if deferred is None:
        return function.apply(x, weight, bias, tp_group, None, products, *groups)
    defer = partial(deferred.add, weight)
    return function.apply(ensure_requires_grad(x), weight.detach(), bias, tp_group, defer, products, *groups)


@not_compiled
def _overlapped(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    return function.apply(*arguments)


@not_compiled
def _reduce_output(y: torch.Tensor, tp_group: Axis, sequence_parallel: bool) -> torch.Tensor:
    """Returns the sum of `y` over the ranks, or with sequence_parallel this rank's shard of the sum.
    Nothing else may use `y`."""
    return (
        reduce_scatter_to_sequence_region(y, tp_group)
        if sequence_parallel
        else _AllReduceInPlace.apply(y, tp_group)
    )


@first_order
class LinearFunction(torch.autograd.Function):
    """F.linear, or with `groups` the linear layer of experts. The input's gradient is all-reduced while the
    backward pass computes the weight's gradient, or while it passes that computation to `defer`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tp_group: Axis,
        defer: Callable[[Gradient], None] | None,
        products: Products,
        groups: Groups | None = None,
    ) -> torch.Tensor:
        keep_input(ctx, x)
        ctx.tp_group, ctx.weight, ctx.defer, ctx.products = tp_group, weight, defer, products
        ctx.groups = groups
        return products.output(x, weight, bias, groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, rows, groups = take_input(ctx), grad.reshape(-1, grad.shape[-1]), ctx.groups
        if groups is not None:
            rows = rows.contiguous()  # products of groups do not support the strides of an expanded tensor
        grad_x = pending = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.products.input_gradient(rows, ctx.weight, groups).view(x.shape)
            if ctx.tp_group.size > 1:
                pending = dist.all_reduce(grad_x, group=ctx.tp_group.group, async_op=True)
        compute = partial(weight_gradient, x=x.detach() if ctx.defer else x, groups=groups)
        others = _weight_and_bias_gradients(ctx, rows, compute, groups)
        if pending is not None:
            pending.wait()
        return grad_x, *others, None, None, None, None


@first_order
class _SequenceColumnLinear(torch.autograd.Function):
    """F.linear of an input that is sharded along the sequence (arXiv 2205.05198, section 4.2.2).

    Only this rank's shard of the input is stored. The backward pass all-gathers the input while it computes
    the input's gradient, and reduce-scatters this gradient while it computes the weight's gradient. With
    `defer` the all-gather and the weight's gradient are part of the later weight-gradient pass. max_chunks:
    if above 1, the all-gather of the forward pass overlaps with the product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tp_group: Axis,
        defer: Callable[[Gradient], None] | None,
        products: Products,
        max_chunks: int = 1,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp_group, ctx.weight, ctx.defer, ctx.products = tp_group, weight, defer, products
        if max_chunks > 1:
            return gather_and_multiply(x, weight.t(), bias, tp_group, max_chunks)[0]
        full, pending = all_gather_sequence(x, tp_group)
        pending.wait()
        return products.output(full, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        compute = partial(_gathered_weight_gradient, x=x.detach(), tp_group=ctx.tp_group)
        gathered = None if ctx.defer else all_gather_sequence(x, ctx.tp_group)
        grad_full = ctx.products.input_gradient(grad, weight)
        if gathered is not None:
            full, pending = gathered
            pending.wait()
            compute = partial(weight_gradient, x=full)
        grad_x, summed = reduce_scatter_sequence(grad_full, ctx.tp_group)
        others = _weight_and_bias_gradients(ctx, grad.reshape(-1, grad.shape[-1]), compute)
        summed.wait()
        return grad_x, *others, None, None, None, None


def _weight_and_bias_gradients(
    ctx: Any, rows: torch.Tensor, compute: Callable[..., torch.Tensor | None], groups: Groups | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the gradients of weight and bias. rows: the gradient of the output, [rows, n_out]. compute:
    returns the weight's gradient from the weight and the rows. If `ctx.defer` is set, it gets `compute`, and
    the returned gradient of the weight is None. groups: the number of rows of each expert."""
    grad_weight = None
    if ctx.defer is not None:
        ctx.defer(partial(compute, grad=rows))
    elif ctx.needs_input_grad[1]:
        grad_weight = compute(ctx.weight, grad=rows)
    if not ctx.needs_input_grad[2]:
        return grad_weight, None
    return grad_weight, rows.sum(0) if groups is None else sum_groups(rows, groups)


def _gathered_weight_gradient(
    weight: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, tp_group: Axis
) -> torch.Tensor | None:
    """All-gathers an input that is sharded along the sequence, and then computes `weight_gradient`."""
    full, pending = all_gather_sequence(x, tp_group)
    pending.wait()
    return weight_gradient(weight, grad, full)


@first_order
class _OverlappedRowLinear(torch.autograd.Function):
    """F.linear, and then the sum over the ranks, sharded along the sequence. The reduce-scatter of the
    forward pass and the all-gather of the backward pass overlap with the neighboring products."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, tp_group: Axis, max_chunks: int
    ) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.tp_group, ctx.weight, ctx.max_chunks = tp_group, weight, max_chunks
        return multiply_and_reduce(x, weight.t(), tp_group, max_chunks)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, gathered = gather_and_multiply(grad, weight, None, ctx.tp_group, ctx.max_chunks)
        rows = rows_in_chunk_order(x, len(gathered), ctx.tp_group)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(ctx.weight, gathered.flatten(0, 2), rows)
        return grad_x, grad_weight, None, None


@first_order
class _AllReduceInPlace(torch.autograd.Function):
    """All-reduces a tensor in place; nothing else may use the tensor. The gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp_group: Axis) -> torch.Tensor:
        ctx.mark_dirty(x)
        return all_reduce_(x, tp_group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def number_of_chunks(length: int, maximum: int) -> int:
    """Returns the number of chunks of a shard of `length` positions: the largest divisor up to `maximum`."""
    return next(chunks for chunks in range(maximum, 0, -1) if length % chunks == 0)


def gather_and_multiply(
    x: Tensor, factor: Tensor, bias: Tensor | None, tp_group: Axis, max_chunks: int
) -> tuple[Tensor, Tensor]:
    """Returns the product of the all-gathered `x` with `factor`, plus `bias`, and the gathered `x` in chunks.

    x: [seq / size, batch, n_in]. factor: [n_in, n_out]. The results are [seq, batch, n_out] and
    [chunk, rank, rows, n_in]. No autograd.
    """
    chunks = number_of_chunks(len(x), max_chunks)
    gathered = x.new_empty(chunks, tp_group.size, x[..., 0].numel() // chunks, x.shape[-1])
    result = x.new_empty(len(x) * tp_group.size, *x.shape[1:-1], factor.shape[1])
    parts = x.contiguous().view(chunks, -1, x.shape[-1]).unbind()
    factor = factor.expand(tp_group.size, -1, -1)
    pending = _start_gather(gathered[0], parts[0], tp_group)
    for index, place in enumerate(_blocks(result, chunks, tp_group).unbind(1)):
        current = pending
        if index + 1 < chunks:
            pending = _start_gather(gathered[index + 1], parts[index + 1], tp_group)
        current.wait()
        if bias is None:
            torch.bmm(gathered[index], factor, out=place)
        else:
            torch.baddbmm(bias, gathered[index], factor, out=place)
    return result, gathered


def _start_gather(full: Tensor, part: Tensor, tp_group: Axis) -> dist.Work:
    return all_gather_single(full.flatten(0, 1), part, group=tp_group.group, async_op=True)


def rows_in_chunk_order(x: Tensor, chunks: int, tp_group: Axis) -> Tensor:
    """Returns the rows of a contiguous [seq, batch, n] in the order of `gather_and_multiply`'s second result,
    as [seq x batch, n]. It is a copy if there are several chunks."""
    return _blocks(x, chunks, tp_group).transpose(0, 1).reshape(-1, x.shape[-1])


def multiply_and_reduce(x: Tensor, factor: Tensor, tp_group: Axis, max_chunks: int) -> Tensor:
    """Returns this rank's shard, [seq / size, batch, n_out], of the sum over ranks of `x` [seq, batch, n_in]
    times `factor` [n_in, n_out]. No autograd."""
    length = len(x) // tp_group.size
    chunks = number_of_chunks(length, max_chunks)
    result = x.new_empty(length, *x.shape[1:-1], factor.shape[1])
    factor = factor.expand(tp_group.size, -1, -1)
    pending = []
    for part, rows in zip(result.chunk(chunks), _blocks(x, chunks, tp_group).unbind(1), strict=True):
        partial = torch.bmm(rows, factor).view(tp_group.size * len(part), *part.shape[1:])
        pending.append(reduce_scatter_single(part, partial, group=tp_group.group, async_op=True))
    for work in pending:
        work.wait()
    return result


def _blocks(full: Tensor, chunks: int, tp_group: Axis) -> Tensor:
    """Returns a view [rank, chunk, rows of the chunk x batch, n] of a contiguous [seq, batch, n]."""
    return full.view(tp_group.size, chunks, -1, full.shape[-1])
