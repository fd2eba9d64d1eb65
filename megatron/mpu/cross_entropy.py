"""Cross entropy over a vocabulary that is cut over the tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron.mpu.layout import TensorGroup
from megatron.mpu.mappings import sum_in_place


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    tensor: TensorGroup,
    vocab_size: int,
    *,
    overwrite_logits: bool = False,
) -> torch.Tensor:
    """Per-token loss in fp32, shape [...], the same on all tensor ranks.

    logits: [..., V / size], this rank's columns of the padded vocabulary, fp32, bf16 or fp16.
    labels: integers [...] in [0, vocab_size). The loss of any other label is NaN.
    vocab_size: the true size; columns from there on take no part and get a gradient of zero.
    overwrite_logits: use the memory of fp32 logits as work space, which saves a copy of them. Only where
        nothing reads them afterwards, neither the caller nor the backward pass of what made them.

    No rank sees more than its own columns: per token, three numbers are exchanged. Backward can run once.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, tensor, vocab_size, overwrite_logits)


def _local_probabilities(
    logits: torch.Tensor, used: int, overwrite: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax over the `used` first columns: probabilities (zero beyond), the largest logit, the sum of
    exp(logit - largest); of [..., columns], [...] and [...], all fp32."""
    columns = logits.shape[-1]
    if used <= 0:
        largest = torch.full(logits.shape[:-1], -torch.inf, device=logits.device)
        return torch.zeros_like(logits, dtype=torch.float32), largest, torch.zeros_like(largest)
    largest = logits[..., :used].amax(-1).float()
    if logits.dtype != torch.float32:
        probabilities = logits.to(torch.float32, memory_format=torch.contiguous_format)
    elif overwrite and logits.is_contiguous():
        probabilities = logits
    elif used == columns:
        probabilities = torch.empty_like(logits, memory_format=torch.contiguous_format)
        torch.softmax(logits, -1, out=probabilities)
        return probabilities, largest, probabilities.amax(-1).reciprocal_()
    else:
        probabilities = logits.clone(memory_format=torch.contiguous_format)
    probabilities[..., used:] = -torch.inf
    torch.softmax(probabilities, -1, out=probabilities)
    # The largest probability is exp(0) / sum, at least 1 / columns: its inverse loses no precision.
    return probabilities, largest, probabilities.amax(-1).reciprocal_()


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        tensor: TensorGroup,
        vocab_size: int,
        overwrite_logits: bool,
    ) -> torch.Tensor:
        columns = logits.shape[-1]
        first = tensor.rank * columns
        used = min(max(vocab_size - first, 0), columns)
        # Detached: overwriting them must not be an in-place operation of the graph, which would be refused.
        logits = logits.detach()

        own_label = (labels >= first) & (labels < first + used)
        target = (labels - first).masked_fill_(~own_label, 0).unsqueeze(-1)
        target_logit = logits.gather(-1, target).squeeze(-1).float().masked_fill_(~own_label, 0.0)
        probabilities, largest, exp_sum = _local_probabilities(logits, used, overwrite_logits)

        # To the whole vocabulary: p = exp(logit - whole_largest) / whole_sum = local p * scale.
        if tensor.size == 1:
            scale = torch.ones_like(exp_sum)
        else:
            local_largest, local_sum = largest.clone(), exp_sum
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tensor.group)
            shifted_sum = local_sum * torch.exp(local_largest - largest)
            exp_sum, target_logit = sum_in_place(torch.stack((shifted_sum, target_logit)), tensor)
            scale = shifted_sum / exp_sum

        ctx.probabilities, ctx.logits_dtype = probabilities, logits.dtype
        ctx.save_for_backward(target, own_label, scale)
        loss = (largest - target_logit).add_(exp_sum.log())
        return loss.masked_fill_((labels < 0) | (labels >= vocab_size), torch.nan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.probabilities is None:
            raise RuntimeError(
                "second backward pass through vocab_parallel_cross_entropy: the first one used its memory"
            )
        target, own_label, scale = ctx.saved_tensors
        # The gradient is made where the probabilities are: (p - [label]) * grad_loss.
        gradient, ctx.probabilities = ctx.probabilities, None
        gradient.mul_((scale * grad_loss).unsqueeze(-1))
        gradient.scatter_add_(-1, target, (-grad_loss.float() * own_label).unsqueeze(-1))
        return gradient.to(ctx.logits_dtype), None, None, None, None
