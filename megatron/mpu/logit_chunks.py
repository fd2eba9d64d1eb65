"""The logits of the fused loss and their gradient, one chunk of tokens at a time (`mpu.cross_entropy`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.kernels.cross_entropy import (
    logit_statistics_and_gradient_op,
    logit_statistics_op,
    write_logit_gradient_op,
)
from megatron.kernels.selection import uses_kernels
from megatron.mpu import weight_gradient
from megatron.mpu.mesh import Axis

MIB = 2**20
# Maximum size of the logits of a chunk of tokens, in bytes.
CPU_LOGITS_BYTES, LOGITS_BYTES = 128 * MIB, 1024 * MIB
# Tokens per chunk, by bytes per element. For each element of the weight, a chunk of n tokens computes 6 n
# FLOPs, and reads and writes the element's fp32 gradient once, 8 bytes. On a GPU with r FLOPs per byte of
# bandwidth, this traffic takes 4 r / 3 n of the time of the products. For 16 bits r is 153 on an A100, 295 on
# an H100 and 312 on a GB200 (data sheets): the traffic takes at most 10 % with 4096 tokens. For fp32 r is
# below 20. On a CPU larger chunks would not fit in the caches.
CPU_CHUNK_TOKENS, CHUNK_TOKENS = {4: 256, 2: 1024}, {4: 256, 2: 4096}
# The number of tokens in a chunk is a multiple of this number, unless there are fewer tokens. Tensor cores
# compute whole tiles, and are slower with lengths that are not multiples of 8.
TILE_TOKENS = 128
# Size of the fp32 work buffer of a softmax, in bytes. On a CPU it fits in a core's cache. On a GPU it is
# larger, since fewer and larger kernels are faster.
CPU_WORK_BYTES, WORK_BYTES = 1 * MIB, 32 * MIB
# Size in bytes of each part of the 16-bit product that a separate kernel adds to the weight's fp32 gradient.
CPU_PRODUCT_BYTES, PRODUCT_BYTES = 8 * MIB, 32 * MIB


@dataclass(frozen=True)
class ChunkSizes:
    """The sizes of the fused loss's work buffers: tokens in a chunk of logits, rows of its fp32 softmax, and
    rows of the 16-bit product that is added to the weight's gradient."""

    tokens: int
    softmax_rows: int
    product_rows: int


def chunk_sizes(tokens: int, columns: int, width: int, element_size: int, *, on_cpu: bool) -> ChunkSizes:
    """Returns the sizes for hidden [tokens, width] and weight [columns, width]. element_size: bytes per
    element."""
    chunk_tokens = (CPU_CHUNK_TOKENS if on_cpu else CHUNK_TOKENS)[element_size]
    limit = (CPU_LOGITS_BYTES if on_cpu else LOGITS_BYTES) // (columns * element_size)
    if limit > TILE_TOKENS:
        limit -= limit % TILE_TOKENS
    per_chunk = max(min(chunk_tokens, limit, tokens), 1)
    work = CPU_WORK_BYTES if on_cpu else WORK_BYTES
    product = CPU_PRODUCT_BYTES if on_cpu else PRODUCT_BYTES
    return ChunkSizes(
        tokens=per_chunk,
        softmax_rows=max(min(work // (columns * 4), per_chunk), 1),
        product_rows=max(min(product // (width * element_size), columns), 1),
    )


def own_tokens(columns: int, tp_group: Axis, vocab_size: int) -> range:
    """Returns the tokens of the vocabulary that this rank's logits columns stand for, possibly none. All
    later columns are padding."""
    first = tp_group.rank * columns
    return range(first, first + min(max(vocab_size - first, 0), columns))


def own_targets(labels: torch.Tensor, own: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns whether each label [...] is in `own`, and the label's column [..., 1], which is 0 if it is
    not."""
    is_own = (labels >= own.start) & (labels < own.stop)
    return is_own, (labels - own.start).masked_fill_(~is_own, 0).unsqueeze(-1)


class LogitChunks:
    """This rank's columns of the logits, one chunk of tokens at a time, in one reused buffer.

    The gradient of a chunk's losses overwrites its logits. With Triton, one kernel does this. PyTorch
    overwrites fp32 logits directly; it converts 16-bit logits to fp32 a few rows at a time, in a work buffer
    that fits in a cache. With capped logits (`softcapping`) a second buffer stores the derivatives of the
    cap.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        tp_group: Axis,
        vocab_size: int,
        z_loss_weight: float,
        softcapping: float | None = None,
    ) -> None:
        tokens, columns = hidden.shape[0], weight.shape[0]
        self.hidden, self.weight, self.tp_group, self.z_loss_weight = hidden, weight, tp_group, z_loss_weight
        own = own_tokens(columns, tp_group, vocab_size)
        self.num_valid_columns = len(own)
        self.own_label, self.target = own_targets(labels, own)
        size = hidden.element_size()
        self.sizes = chunk_sizes(tokens, columns, hidden.shape[1], size, on_cpu=hidden.device.type == "cpu")
        per_chunk, self.rows = self.sizes.tokens, self.sizes.softmax_rows
        self.chunks = [slice(i, min(i + per_chunk, tokens)) for i in range(0, tokens, per_chunk)]
        self.buffer = hidden.new_empty(per_chunk, columns)
        self.softcapping = softcapping
        self.slopes = None if softcapping is None else torch.empty_like(self.buffer)
        self.in_kernel = uses_kernels(hidden)
        self.work = (
            None if size == 4 or self.in_kernel else hidden.new_empty(self.rows, columns, dtype=torch.float32)
        )
        # The range of fp16 is too small for a large vocabulary: probabilities of 1e-6 are subnormal, and sums
        # over a chunk overflow. These scales keep both in range, and powers of two are exact. Sums that the
        # product accumulates in fp32 do not overflow, but one token may have the weight of all tokens.
        fp16 = hidden.dtype == torch.float16
        self.fuses_accumulation = weight_gradient.supports_fused_accumulation(hidden)
        self.gradient_scale = 64.0 if fp16 else 1.0
        bits = (tokens - 1).bit_length() // 2 if self.fuses_accumulation else (per_chunk - 1).bit_length()
        self.hidden_scale = 0.5**bits if fp16 else 1.0
        if self.in_kernel:
            self.kernel_target = self.target.squeeze(-1).masked_fill(~self.own_label, -1)
        else:
            self.minus_label = self.own_label.unsqueeze(-1) * -self.gradient_scale
        self.product: torch.Tensor | None = None

    def losses(self, chunk: slice, with_gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the losses of the chunk's n tokens, fp32 [n]. If with_gradient, it also returns
        gradient_scale * gradient [n, columns]."""
        logits = self._make_logits(chunk)
        compute = self._statistics_in_kernel if self.in_kernel else self._statistics
        largest, exp_sum, target_logit = compute(logits, chunk, with_gradient)
        if with_gradient and self.slopes is not None:
            logits.mul_(self.slopes[: len(logits)])
        log_sum = exp_sum.log()
        losses = (largest - target_logit).add_(log_sum)
        if self.z_loss_weight:
            losses.add_((largest + log_sum).square(), alpha=self.z_loss_weight)
        return losses, logits

    def _statistics(
        self, logits: torch.Tensor, chunk: slice, with_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the largest logit, sum(exp(logit - largest)) and the label's logit over the full
        vocabulary, each fp32 [n]. If with_gradient, it overwrites the logits with their gradient."""
        alone = self.tp_group.size == 1
        target_logit = logits.gather(-1, self.target[chunk]).squeeze(-1).float()
        target_logit.masked_fill_(~self.own_label[chunk], 0.0)
        # The clamp is for ranks whose columns are all padding: exp(-inf - largest) is then 0 instead of NaN.
        largest = local = logits.amax(-1).float().clamp_(min=torch.finfo(torch.float32).min)
        exp_sum = torch.empty_like(local)
        for rows in self._row_blocks(logits):
            exponentials = self._exponentials(logits[rows], local[rows])
            torch.sum(exponentials, -1, out=exp_sum[rows])
            if with_gradient and alone:
                factor = self._factor(local[rows], exp_sum[rows])
                self._write_gradient(logits, chunk, rows, exponentials, factor)
        if not alone:
            largest, exp_sum, target_logit = self._combine_ranks(local, exp_sum, target_logit)
        if with_gradient and not alone:
            factor = self._factor(largest, exp_sum) * torch.exp(local - largest)
            for rows in self._row_blocks(logits):
                in_place = self.work is None
                exponentials = logits[rows] if in_place else self._exponentials(logits[rows], local[rows])
                self._write_gradient(logits, chunk, rows, exponentials, factor[rows])
        return largest, exp_sum, target_logit

    def _statistics_in_kernel(
        self, logits: torch.Tensor, chunk: slice, with_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes `_statistics` in one kernel launch, or with several ranks in two launches."""
        targets = self.kernel_target[chunk]
        if self.tp_group.size == 1 and with_gradient:
            scale, z_loss_weight = self.gradient_scale, self.z_loss_weight
            largest, exp_sum, target_logit = logit_statistics_and_gradient_op(
                logits, targets, self.num_valid_columns, scale, z_loss_weight
            ).unbind()
            return largest, exp_sum, target_logit
        largest, exp_sum, target_logit = logit_statistics_op(logits, targets, self.num_valid_columns).unbind()
        if self.tp_group.size > 1:
            largest, exp_sum, target_logit = self._combine_ranks(largest, exp_sum, target_logit)
            if with_gradient:
                settings = self.num_valid_columns, self.gradient_scale, self.z_loss_weight
                write_logit_gradient_op(logits, targets, largest, exp_sum, *settings)
        return largest, exp_sum, target_logit

    def add_to_weight_gradient(
        self,
        total: torch.Tensor,
        chunk: slice,
        gradient: torch.Tensor,
        relative: torch.Tensor | None,
        factor: float,
        beta: float,
    ) -> None:
        """Adds a chunk's product: total = beta * total + factor * gradient.T @ (relative * hidden)
        * hidden_scale.

        total: fp32 or the dtype of `hidden`. relative: a factor for each token, [tokens]; its values are at
        most the number of tokens. beta: 0 or 1; with 0 the values of `total` may be undefined."""
        hidden = self.hidden[chunk]
        if relative is not None:
            hidden = (hidden.float() * (relative[chunk].unsqueeze(-1) * self.hidden_scale)).to(hidden.dtype)
        elif self.hidden_scale != 1.0:
            hidden = hidden * self.hidden_scale
        if total.dtype == hidden.dtype:
            total.addmm_(gradient.t(), hidden, beta=beta, alpha=factor)
            return
        if self.fuses_accumulation:
            weight_gradient.add_product(total, gradient.t(), hidden, factor, beta)
            return
        # The product is rounded to 16 bits. It is computed in parts, and each part is added to the fp32
        # total.
        if beta == 0.0:
            total.zero_()
        columns, width = total.shape
        per_part = self.sizes.product_rows
        if self.product is None:
            self.product = hidden.new_empty(per_part, width)
        for first in range(0, columns, per_part):
            part = slice(first, min(first + per_part, columns))
            product = self.product[: part.stop - first]
            torch.mm(gradient[:, part].t(), hidden, out=product)
            total[part].add_(product, alpha=factor)

    def _make_logits(self, chunk: slice) -> torch.Tensor:
        logits = self.buffer[: chunk.stop - chunk.start]
        torch.mm(self.hidden[chunk], self.weight.t(), out=logits)
        if self.slopes is not None:
            self._cap(logits, self.slopes)
        if self.num_valid_columns < logits.shape[-1] and not self.in_kernel:
            logits[:, self.num_valid_columns :] = -torch.inf
        return logits

    def _cap(self, logits: torch.Tensor, slopes: torch.Tensor) -> None:
        """Caps the logits, and writes the derivatives of the cap to `slopes`, in fp32 a few rows at a
        time."""
        assert self.softcapping is not None
        for rows in self._row_blocks(logits):
            tanh = logits[rows].float().div_(self.softcapping).tanh_()
            slopes[rows] = 1.0 - tanh.square()
            logits[rows] = tanh * self.softcapping

    def _row_blocks(self, logits: torch.Tensor) -> list[slice]:
        count = logits.shape[0]
        return [slice(i, min(i + self.rows, count)) for i in range(0, count, self.rows)]

    def _exponentials(self, logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """Returns exp(logits - largest), fp32 [rows, columns]. It overwrites fp32 logits."""
        work = logits if self.work is None else self.work[: logits.shape[0]].copy_(logits)
        return work.sub_(largest.unsqueeze(-1)).exp_()

    def _combine_ranks(
        self, largest: torch.Tensor, exp_sum: torch.Tensor, target_logit: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = torch.stack((largest, exp_sum, target_logit))
        of_ranks = [torch.empty_like(own) for _ in range(self.tp_group.size)]
        dist.all_gather(of_ranks, own, group=self.tp_group.group)
        all_largest, all_sums, all_targets = torch.stack(of_ranks, dim=1)
        largest = all_largest.amax(0)
        return largest, (all_sums * torch.exp(all_largest - largest)).sum(0), all_targets.sum(0)

    def _factor(self, largest: torch.Tensor, exp_sum: torch.Tensor) -> torch.Tensor:
        """Returns the factor f of the equation gradient_scale * gradient = f * exp(logit - largest) -
        gradient_scale * [label].

        The loss log(Z) + w log(Z)^2 - logit[label] has the gradient softmax * (1 + 2 w log(Z)) - [label].
        """
        factor = self.gradient_scale / exp_sum
        if self.z_loss_weight:
            factor.mul_(1.0 + 2.0 * self.z_loss_weight * (largest + exp_sum.log()))
        return factor

    def _write_gradient(
        self,
        logits: torch.Tensor,
        chunk: slice,
        rows: slice,
        exponentials: torch.Tensor,
        factor: torch.Tensor,
    ) -> None:
        exponentials.mul_(factor.unsqueeze(-1))
        exponentials.scatter_add_(-1, self.target[chunk][rows], self.minus_label[chunk][rows])
        if self.work is not None:
            logits[rows].copy_(exponentials)
