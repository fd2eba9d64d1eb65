"""Vocabulary-parallel cross entropy, from given logits or fused with the LM head.

The idea (Megatron-LM, arXiv 1909.08053, section 3): each tensor-parallel rank has V / size columns of the
logits. The ranks exchange only three numbers per token instead of the logits: the largest logit m,
sum(exp(logit - m)), and the logit of the label. Then

    loss = m + log(sum) - logit[label]        gradient = softmax - [label] = exp(logit - m) / sum - [label]

The fused function computes the logits of a chunk of tokens, overwrites them with their gradient, and adds the
chunk's part to the gradients of hidden and weight (as Liger Kernel does, arXiv 2410.10989). So the full
logits [tokens, V] are never stored. This requires the gradient of the loss in the forward pass. For hidden
the gradient is assumed to be 1 per token, times token_weights, and the backward pass rescales the result. For
the weight the caller passes the gradient in advance: the forward pass then adds directly to `main_grad` and
stores no gradient of the weight.

Invariant: the losses of both functions are bitwise equal on all tensor-parallel ranks. Padding columns do not
influence the loss, and their gradient is zero.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron.kernels.operators import first_order
from megatron.mpu.logit_chunks import LogitChunks, own_targets, own_tokens
from megatron.mpu.mappings import all_reduce_
from megatron.mpu.mesh import Axis
from megatron.mpu.parameters import has_main_grad, next_main_grad


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    tp_group: Axis,
    vocab_size: int,
    *,
    overwrite_logits: bool = False,
) -> torch.Tensor:
    """Returns the loss of each token, fp32 [...], equal on all tensor-parallel ranks.

    logits: [..., V / size], this rank's columns of the padded vocabulary, fp32, bf16 or fp16.
    labels: integers [...] in [0, vocab_size). The loss of any other label is NaN.
    vocab_size: size without padding; columns from this number on are ignored and have a gradient of zero.
    overwrite_logits: store the probabilities in the memory of fp32 logits, which saves a copy. Allowed only
        if neither the caller nor the backward pass of the previous layer reads the logits afterwards.

    The backward pass can run only once.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, tp_group, vocab_size, overwrite_logits)


def vocab_parallel_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    tp_group: Axis,
    vocab_size: int,
    *,
    token_weights: torch.Tensor | None = None,
    z_loss_weight: float = 0.0,
    loss_gradient: float = 1.0,
    softcapping: float | None = None,
) -> torch.Tensor:
    """Returns the loss of each token, fp32 [...], for the logits hidden @ weight.T; equal on all TP ranks.

    hidden: [..., h], replicated over the tensor-parallel ranks, fp32, bf16 or fp16.
    weight: [V / size, h], this rank's rows of the padded output embedding, in the dtype of hidden.
    labels, vocab_size: see `vocab_parallel_cross_entropy`.
    token_weights: [...], constant factors of the losses: a mask, or 1 / number of tokens for a mean.
    z_loss_weight: adds z_loss_weight * log(Z)^2 to the loss of a token, with Z = sum(exp(logits)). This keeps
        log(Z) close to 0 (PaLM, arXiv 2204.02311, section 5).
    loss_gradient: the gradient that the backward pass will have for each loss, before token_weights. It is
        used only if the weight has a `main_grad`. The backward pass checks it on a CPU; on a GPU the check
        would synchronize the host with the device.
    softcapping: the logits are softcapping * tanh(logit / softcapping).

    If the optimizer has given `weight` a `main_grad`, the forward pass adds the weight's gradient to it in
    fp32, and autograd gets None for the weight.

    The forward pass also computes the gradients of the summed losses, three matrix products in all. The
    backward pass therefore raises RuntimeError if the gradient of the losses differs between tokens: pass
    such factors as token_weights. Without autograd only the losses are computed. The backward pass can run
    only once. Raises ValueError for shapes and dtypes that do not match.
    """
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)}: "
            "expected [..., h], [rows, h] and [...]"
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"hidden is {hidden.dtype} and weight is {weight.dtype}: expected one dtype, fp32, bf16 or fp16"
        )
    if not labels.numel():  # no tokens: the losses are empty, the gradients zero
        return (hidden.sum(-1) + weight.sum() * 0.0).float()
    if token_weights is not None and token_weights.shape != labels.shape:
        raise ValueError(
            f"token_weights {tuple(token_weights.shape)} and labels {tuple(labels.shape)}: expected one shape"
        )
    return _VocabParallelLinearCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels,
        None if token_weights is None else token_weights.detach().reshape(-1).float(),
        loss_gradient,
        tp_group,
        vocab_size,
        z_loss_weight,
        softcapping,
        torch.is_grad_enabled(),  # inside Function.forward the result is always False
    )


def _local_probabilities(
    logits: torch.Tensor, num_valid_columns: int, overwrite: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the softmax over this rank's first `num_valid_columns` columns. All results are fp32.

    Returns the probabilities [..., columns] (zero from `num_valid_columns` on), the largest logit [...], and
    sum(exp(logit - largest)) [...].
    """
    columns = logits.shape[-1]
    if num_valid_columns <= 0:
        largest = torch.full(logits.shape[:-1], -torch.inf, device=logits.device)
        return torch.zeros_like(logits, dtype=torch.float32), largest, torch.zeros_like(largest)
    largest = logits[..., :num_valid_columns].amax(-1).float()
    if logits.dtype != torch.float32:
        probabilities = logits.to(torch.float32, memory_format=torch.contiguous_format)
    elif overwrite and logits.is_contiguous():
        probabilities = logits
    elif num_valid_columns == columns:
        probabilities = torch.empty_like(logits, memory_format=torch.contiguous_format)
        torch.softmax(logits, -1, out=probabilities)
        return probabilities, largest, probabilities.amax(-1).reciprocal_()
    else:
        probabilities = logits.clone(memory_format=torch.contiguous_format)
    probabilities[..., num_valid_columns:] = -torch.inf
    torch.softmax(probabilities, -1, out=probabilities)
    # The largest probability is exp(0) / sum >= 1 / columns. Its reciprocal is therefore an accurate sum.
    return probabilities, largest, probabilities.amax(-1).reciprocal_()


@first_order
class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        tp_group: Axis,
        vocab_size: int,
        overwrite_logits: bool,
    ) -> torch.Tensor:
        own = own_tokens(logits.shape[-1], tp_group, vocab_size)
        # The tensor is detached, because autograd would reject the in-place overwrite of its input.
        logits = logits.detach()

        own_label, target = own_targets(labels, own)
        target_logit = logits.gather(-1, target).squeeze(-1).float().masked_fill_(~own_label, 0.0)
        probabilities, largest, exp_sum = _local_probabilities(logits, len(own), overwrite_logits)

        # Converts the local softmax to the global one: exp(logit - global max) / global sum = local
        # probability * scale.
        if tp_group.size == 1:
            scale = torch.ones_like(exp_sum)
        else:
            local_largest, local_sum = largest.clone(), exp_sum
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group.group)
            shifted_sum = local_sum * torch.exp(local_largest - largest)
            exp_sum, target_logit = all_reduce_(torch.stack((shifted_sum, target_logit)), tp_group)
            scale = shifted_sum / exp_sum

        ctx.probabilities, ctx.logits_dtype = probabilities, logits.dtype
        ctx.save_for_backward(target, own_label, scale)
        loss = (largest - target_logit).add_(exp_sum.log())
        return loss.masked_fill_((labels < 0) | (labels >= vocab_size), torch.nan)

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.probabilities is None:
            raise RuntimeError(
                "second backward pass through vocab_parallel_cross_entropy: the first one freed its buffers"
            )
        target, own_label, scale = ctx.saved_tensors
        # In place, the probabilities p become (p - [label]) * grad_loss.
        gradient, ctx.probabilities = ctx.probabilities, None
        gradient.mul_((scale * grad_loss).unsqueeze(-1))
        gradient.scatter_add_(-1, target, (-grad_loss.float() * own_label).unsqueeze(-1))
        return gradient.to(ctx.logits_dtype), None, None, None, None


@first_order
class _VocabParallelLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        token_weights: torch.Tensor | None,
        loss_gradient: float,
        tp_group: Axis,
        vocab_size: int,
        z_loss_weight: float,
        softcapping: float | None,
        grad_enabled: bool,
    ) -> torch.Tensor:
        needs_hidden, needs_weight = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        flat_labels = labels.reshape(-1)
        chunks = LogitChunks(hidden, weight, flat_labels, tp_group, vocab_size, z_loss_weight, softcapping)
        losses = hidden.new_empty(flat_labels.shape, dtype=torch.float32)
        grad_hidden = (
            torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs_hidden else None
        )
        relative, largest_weight = _normalized(token_weights)
        grad_weight, factor, beta = None, 1.0, 0.0
        is_added = needs_weight and has_main_grad(weight)
        if needs_weight and not is_added:
            grad_weight = torch.empty_like(weight, dtype=torch.float32)
        elif is_added:
            # `relative` has the weights relative to the weight 1 / tokens of a plain mean, so that fp16 can
            # hold them.
            mean = 1.0 / len(flat_labels) if token_weights is not None else 1.0
            relative = None if token_weights is None else token_weights / mean
            factor = loss_gradient * mean / (chunks.gradient_scale * chunks.hidden_scale)
            grad_weight, beta = next_main_grad(weight)
        pending = []
        for chunk in chunks.chunks:
            losses[chunk], gradient = chunks.losses(chunk, needs_hidden or needs_weight)
            if grad_hidden is not None:
                part = torch.mm(gradient, weight, out=grad_hidden[chunk])
                if tp_group.size > 1:
                    pending.append(dist.all_reduce(part, group=tp_group.group, async_op=True))
            if grad_weight is not None:
                chunks.add_to_weight_gradient(grad_weight, chunk, gradient, relative, factor, beta)
                beta = 1.0
        for work in pending:
            work.wait()

        ctx.save_for_backward(token_weights)
        ctx.gradients = grad_hidden, None if is_added else grad_weight
        ctx.loss_gradient = loss_gradient if is_added else None
        ctx.largest_weight, ctx.weight_dtype = largest_weight, weight.dtype
        ctx.scales = (chunks.gradient_scale, chunks.gradient_scale * chunks.hidden_scale)
        losses.masked_fill_((flat_labels < 0) | (flat_labels >= vocab_size), torch.nan)
        return (losses if token_weights is None else losses * token_weights).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "second backward pass through vocab_parallel_linear_cross_entropy: the first one freed its "
                "buffers"
            )
        (token_weights,) = ctx.saved_tensors
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        hidden_made_for, weight_made_for = ctx.scales
        per_token = grad_losses.reshape(-1)
        if token_weights is not None:
            per_token = per_token * token_weights
        if ctx.loss_gradient is not None and grad_losses.device.type == "cpu":
            _check_gradient(grad_losses, ctx.loss_gradient)
        if grad_hidden is not None:
            grad_hidden.mul_((per_token / hidden_made_for).unsqueeze(-1))
        if grad_weight is not None:
            if not _is_uniform(grad_losses):
                raise RuntimeError("the losses have different gradients: multiply them by token_weights")
            factor = ctx.largest_weight * grad_losses.reshape(-1)[:1]
            grad_weight = grad_weight.mul_(factor / weight_made_for).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, *[None] * 8


def _normalized(weights: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | float]:
    """Returns weights / w and w [1], where w is the weight of the largest magnitude. The quotients fit in the
    range of fp16."""
    if weights is None or not weights.numel():
        return weights, 1.0
    largest = weights.abs().amax().clamp_min(torch.finfo(torch.float32).tiny).reshape(1)
    return weights / largest, largest


def _check_gradient(gradient: torch.Tensor, expected: float) -> None:
    """Raises RuntimeError if the gradient of the losses differs from `expected`, which the forward pass
    used."""
    if not torch.allclose(gradient, torch.tensor(expected, dtype=gradient.dtype), rtol=1e-5, atol=0.0):
        raise RuntimeError(
            f"the losses have gradients of {gradient.min():g} to {gradient.max():g}: expected {expected:g}, "
            "the loss_gradient with which the weight's gradient was added to main_grad"
        )


def _is_uniform(gradient: torch.Tensor) -> bool:
    """Returns whether all elements are equal. The gradient of a sum is one expanded element, which its
    strides show without synchronizing with the device."""
    if all(stride == 0 or size == 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True)):
        return True
    return bool((gradient == gradient.reshape(-1)[:1]).all())
