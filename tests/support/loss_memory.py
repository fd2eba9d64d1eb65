"""Head and loss of a last pipeline stage alone: a step of each implementation, and its peak memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MIB = 2**20
FULL = (8 * 2048, 250368 // 4, 2048)
"""(tokens, rows of the vocabulary on one rank, hidden) of BLOOM's vocabulary on 4 TP ranks."""
TARGET_MIB = 256
"""What the fused loss may allocate at `FULL` beside the gradients that it returns."""


def make_steps(
    size: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], None]]:
    """Forward and backward pass of head and loss, by --loss-implementation."""
    import torch

    from megatron.model.loss import CrossEntropy
    from megatron.mpu.layers import parallel_logits
    from megatron.mpu.layout import TPGroup

    tokens, vocab, width = size
    hidden = torch.randn(1, tokens, width, device=device).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocab, width, device=device)).to(dtype).requires_grad_()
    weight.main_grad = torch.zeros(vocab, width, device=device)
    labels = (torch.randint(0, vocab, (1, tokens), device=device), torch.ones(1, tokens, device=device))
    loss = CrossEntropy(TPGroup(), vocab)

    # A step frees what it has allocated at its end, so that the next step's peak includes all of it.
    def fused() -> None:
        loss.from_hidden(hidden, weight, labels).backward()
        hidden.grad = None

    def plain() -> None:
        loss(parallel_logits(hidden, weight, TPGroup()).float(), labels).backward()
        weight.main_grad.add_(weight.grad)
        hidden.grad = weight.grad = None

    return {"fused": fused, "plain": plain}


def peak_mib(step: Callable[[], None], device: torch.device) -> float:
    """Peak memory of the step above the memory in use before it, in MiB."""
    import torch

    if device.type == "cuda":
        step()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    from tests.support.tracked_memory import TrackedMemory

    with TrackedMemory() as tracked:
        step()
    return tracked.peak / MIB
