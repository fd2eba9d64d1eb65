#!/usr/bin/env python3
"""Times each Triton kernel on a GPU, its PyTorch reference and a library's function; compares the results.

    python benchmarks/kernel_speed.py                  one GPU, about three minutes

On a machine without a GPU, this command runs small tensors in triton's interpreter, in fp32, without times:

    TRITON_INTERPRET=1 MEGATRON_KERNELS=interpreter python benchmarks/kernel_speed.py --small

Sizes are from a layer of a 13B model: sequence 2048, hidden size 5120, 40 heads, vocabulary 50,304, bf16.
Times are medians, forward and backward pass together, by `triton.testing.do_bench`, which clears the cache of
the GPU between calls. `difference` is the largest difference between kernel and reference, in outputs and
gradients, relative to the largest value. `rate` counts the bytes that must be read and written once. For
attention it counts the FLOPs of the causal half, including those that document masks skip; the backward pass
counts 2.5 times the forward pass. A second table compares the implementations of attention without dropout,
which compute the same, and names the fastest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention_implementations import KINDS, Attend, implementations
from benchmarks.machine import benchmark_parser, describe_machine
from megatron.cluster.launch import temporary_environment
from megatron.config import Config
from megatron.kernels.selection import forget_decisions, reason_against_kernels, uses_kernels
from megatron.model.activations import gated_by
from megatron.model.core_attention import CoreAttention
from megatron.model.gpt_model import ParallelSelfAttention
from megatron.model.layer_context import LayerContext
from megatron.model.position import document_ids_of
from megatron.mpu.embedding import embedding
from megatron.mpu.layout import TPGroup
from megatron.mpu.logit_chunks import LogitChunks
from megatron.mpu.parameters import set_main_grad
from megatron.mpu.random import DropoutRNG, dropout_add
from megatron.mpu.weight_gradient import weight_gradient
from megatron.optimizer.flat_group import move_to_main_grad
from megatron.optimizer.gradient_norm import gradient_norms
from tests.support.measured_worlds import config_of

Work = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors of a layer, and of the loss of a chunk of tokens."""

    seq: int
    heads: int
    head_dim: int
    vocab: int
    tokens: int
    parameters: tuple[int, ...]
    """Numbers of elements of the gradients whose norms are computed."""

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


LARGE = Sizes(2048, 40, 128, 50304, 1024, (5120, 5120 * 5120, 4 * 5120 * 5120) * 8)
SMALL = Sizes(40, 2, 16, 100, 24, (7, 5000, 300))


@dataclass(frozen=True)
class Case:
    """A kernel. work: returns outputs and gradients, with the kernel or with its reference. library: the
    nearest function of a library, which may compute something else. moved: bytes. flops: 0 if the memory
    bandwidth is the limit."""

    name: str
    work: Work
    library_name: str
    library: Work
    moved: int
    flops: float = 0.0


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--small", action="store_true", help="small tensors on the CPU, no times")
    arguments = parser.parse_args()

    device = torch.device("cpu" if arguments.small else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU was found: --small compares the kernels on a CPU")
    reason = reason_against_kernels(device.type)
    if reason is not None:
        parser.error(f"the kernels are not used: {reason}")
    print(describe_machine(), flush=True)
    sizes, dtype = (SMALL, torch.float32) if arguments.small else (LARGE, torch.bfloat16)
    print_row("kernel", "difference", "PyTorch ms", "kernel ms", "ratio", "rate", "library ms", "library")
    for case in cases(sizes, dtype, device):
        with kernels_or_references("pytorch"):
            expected = [value.clone() for value in case.work()]
        difference = largest_difference([value.clone() for value in case.work()], expected)
        print_row(case.name, f"{difference:.1e}", *([] if arguments.small else times(case)))
    print_row("attention without dropout", "difference", "triton ms", "SDPA ms", "Flex ms", "fastest")
    for kind in KINDS:
        print_row(kind, *compared_attention(kind, sizes, dtype, device, timed=not arguments.small))


def compared_attention(
    kind: str, sizes: Sizes, dtype: torch.dtype, device: torch.device, timed: bool
) -> list[str]:
    """Returns the columns of a row: the largest difference from SDPA, the times, and the name of the fastest.
    Without times only outputs are compared: FlexAttention has no backward pass on CPUs."""
    groups = max(sizes.heads // 4, 1) if "share" in kind else sizes.heads
    shapes = [(sizes.seq, 1, count, sizes.head_dim) for count in (sizes.heads, groups, groups)]
    inputs = [some(shape, 3, dtype, device)[index] for index, shape in enumerate(shapes)]
    (grad,) = some(shapes[0], 1, dtype, device)

    def work(attend: Attend) -> list[Tensor]:
        y = attend(*(inputs if timed else (x.detach() for x in inputs)))
        return [y.detach(), *(torch.autograd.grad(y, inputs, grad) if timed else ())]

    found = implementations(kind, sizes.seq, sizes.heads, device)
    expected = work(found["SDPA"])
    differences = [largest_difference(work(attend), expected) for attend in found.values()]
    if not timed:
        return [f"{max(differences):.1e}"]
    measured = {name: milliseconds(partial(work, attend)) for name, attend in found.items()}
    return [
        f"{max(differences):.1e}",
        *(f"{time:.3f}" for time in measured.values()),
        min(measured, key=measured.__getitem__),
    ]


def print_row(name: str, *cells: str) -> None:
    """Prints a row as soon as it is measured."""
    widths = (10, 10, 9, 6, 13, 10)
    shown = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)]
    print(f"{name:38}", *shown, *cells[len(widths) :], sep="  ", flush=True)


@contextmanager
def kernels_or_references(setting: str) -> Iterator[None]:
    """Sets MEGATRON_KERNELS."""
    forget_decisions()
    try:
        with temporary_environment({"MEGATRON_KERNELS": setting}):
            yield
    finally:
        forget_decisions()


def times(case: Case) -> list[str]:
    """Returns the columns of a row after the difference."""
    kernel = milliseconds(case.work)
    with kernels_or_references("pytorch"):
        reference = milliseconds(case.work)
    if case.flops:
        rate = f"{case.flops / kernel / 1e9:.0f} TFLOP/s"
    else:
        rate = f"{case.moved / kernel / 1e6:.0f} GB/s"
    library = milliseconds(case.library)
    return [
        f"{reference:.3f}",
        f"{kernel:.3f}",
        f"{reference / kernel:.1f}",
        rate,
        f"{library:.3f}",
        case.library_name,
    ]


def milliseconds(work: Work) -> float:
    """Returns the median time of a call."""
    from triton.testing import do_bench

    return statistics.median(do_bench(work, return_mode="all"))


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest difference, relative to the largest value of each tensor."""
    return max(
        float((a - b).detach().double().abs().max() / b.detach().double().abs().max())
        for a, b in zip(found, expected, strict=True)
    )


def cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yields one case at a time, so that the tensors of only one case are in memory."""
    yield dropout_case(sizes, dtype, device)
    for name, flags in (
        ("attention, dropout 0.1", "--attention-dropout 0.1"),
        ("attention, ALiBi", "--attention-dropout 0 --position-embedding-type alibi"),
        ("attention, documents", "--attention-dropout 0 --reset-attention-mask"),
        ("attention, all three", "--position-embedding-type alibi --reset-attention-mask"),
    ):
        yield attention_case(name, flags, sizes, dtype, device)
    yield rotary_case(sizes, dtype, device)
    yield gated_case(sizes, dtype, device)
    yield weight_gradient_case(sizes, dtype, device)
    yield loss_case(sizes, dtype, device)
    yield embedding_case(sizes, dtype, device)
    yield norms_case(sizes, device)
    yield copied_gradient_case(sizes, dtype, device)


def dropout_case(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    x, residual, grad = some((sizes.seq, 1, sizes.hidden), 3, dtype, device)
    rng = DropoutRNG(1, (5,))

    def work() -> list[Tensor]:
        y = dropout_add(x, residual, 0.1, rng, "4.mlp", batch_dim=1, tp_group=TPGroup())
        return [y.detach(), *torch.autograd.grad(y, (x, residual), grad)]

    def library() -> list[Tensor]:
        y = residual + F.dropout(x, 0.1)
        return [y.detach(), *torch.autograd.grad(y, (x, residual), grad)]

    moved = 5 * x.numel() * x.element_size()  # x, residual, output; gradient, gradient of x
    return Case("dropout and residual", work, "torch dropout, +", library, moved)


def layer_config(sizes: Sizes, flags: str) -> Config:
    """Returns the configuration of a model with one layer of these sizes."""
    return config_of(
        f"--num-layers 1 --hidden-size {sizes.hidden} --num-attention-heads {sizes.heads} --vocab-size 100 "
        f"--seq-length {sizes.seq} --max-position-embeddings {sizes.seq} --micro-batch-size 1 "
        f"--global-batch-size 1 {flags}"
    )


def attention_case(name: str, flags: str, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    config = layer_config(sizes, flags)
    core = CoreAttention(LayerContext(config, TPGroup(), DropoutRNG(1, (5,))), 0)
    q, k, v = some((sizes.seq, 1, sizes.heads, sizes.head_dim), 3, dtype, device)
    (grad,) = some((sizes.seq, 1, sizes.hidden), 1, dtype, device)
    tokens = torch.ones(1, sizes.seq, dtype=torch.int64, device=device)
    tokens[:, :: sizes.seq // 4] = 0
    document_ids = document_ids_of(tokens, 0) if config.data.reset_attention_mask else None

    def work() -> list[Tensor]:
        y = core(q, k, v, document_ids)
        return [y.detach(), *torch.autograd.grad(y, (q, k, v), grad)]

    def library() -> list[Tensor]:
        heads_first = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        y = F.scaled_dot_product_attention(*heads_first, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        return [y.detach(), *torch.autograd.grad(y, (q, k, v), grad)]

    # 2 GEMMs of [seq, seq / 2, head_dim], and 5 in the backward pass, with 2 FLOPs per element.
    flops = 3.5 * 2 * 2 * sizes.heads * sizes.head_dim * sizes.seq**2 / 2
    return Case(name, work, "torch SDPA, plain causal", library, 0, flops)


def rotary_case(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    config = layer_config(sizes, "--position-embedding-type rotary")
    with torch.device(device):
        attention = ParallelSelfAttention(LayerContext(config, TPGroup(), DropoutRNG(1)), 3)
    (projected,) = some((sizes.seq, 1, 3 * sizes.hidden), 1, dtype, device)
    grads = some((sizes.seq, 1, sizes.heads, sizes.head_dim), 3, dtype, device)

    def work() -> list[Tensor]:
        parts = attention._split(projected, None)
        return [*(part.detach() for part in parts), *torch.autograd.grad(parts, projected, grads)]

    def library() -> list[Tensor]:
        return [projected.detach().clone(), projected.detach().clone()]

    moved = 4 * projected.numel() * projected.element_size()
    return Case("split and rotary positions", work, "torch clone, twice", library, moved)


def gated_case(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    (wide,) = some((sizes.seq, 1, 8 * sizes.hidden), 1, dtype, device)
    (grad,) = some((sizes.seq, 1, 4 * sizes.hidden), 1, dtype, device)
    swiglu = gated_by("swiglu")

    def work() -> list[Tensor]:
        y = swiglu(wide)
        return [y.detach(), *torch.autograd.grad(y, wide, grad)]

    def library() -> list[Tensor]:
        value, gate = wide.chunk(2, dim=-1)
        y = value * F.silu(gate)
        return [y.detach(), *torch.autograd.grad(y, wide, grad)]

    # Values, gates and output; these and the gradient of the output, and the gradients of values and gates.
    moved = (3 + 5) * grad.numel() * grad.element_size()
    return Case("gated activation, SwiGLU", work, "torch silu, *", library, moved)


def weight_gradient_case(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    """Returns the gradient of the MLP's first matrix, added to its fp32 sum. The GEMM of the reference is in
    fp32."""
    (weight,) = some((4 * sizes.hidden, sizes.hidden), 1, dtype, device)
    (x,) = some((sizes.seq, sizes.hidden), 1, dtype, device)
    (grad,) = some((sizes.seq, 4 * sizes.hidden), 1, dtype, device)
    weight.keeps_main_grad = True
    weight.main_grad = torch.zeros(weight.shape, device=device)

    @torch.no_grad()
    def work() -> list[Tensor]:
        weight.main_grad.zero_()
        if not uses_kernels(weight):
            weight.main_grad.addmm_(grad.float().t(), x.float())
        elif (gradient := weight_gradient(weight, grad, x)) is not None:
            weight.main_grad.add_(gradient)  # this device has no GEMM that accumulates
        return [weight.main_grad]

    @torch.no_grad()
    def library() -> list[Tensor]:
        weight.main_grad.zero_()
        return [weight.main_grad.add_(grad.t() @ x)]

    flops = 2.0 * sizes.seq * 4 * sizes.hidden**2
    return Case("weight gradient into main_grad", work, "torch matmul, add", library, 0, flops)


def loss_case(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    """Computes the logits of a chunk, the losses, and the gradient in place. The times include the GEMM of
    the logits."""
    (hidden,) = some((sizes.tokens, 64), 1, dtype, device)
    (weight,) = some((sizes.vocab, 64), 1, dtype, device)
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, sizes.vocab, (sizes.tokens,), generator=generator).to(device)

    def work() -> list[Tensor]:
        with torch.no_grad():
            chunks = LogitChunks(hidden, weight, labels, TPGroup(), sizes.vocab, 0.0)
            losses, _, _, gradient = chunks.losses(chunks.chunks[0], with_gradient=True)
        return [losses, gradient]

    def library() -> list[Tensor]:
        logits = (hidden @ weight.T).detach().requires_grad_()
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        return [losses.detach(), *torch.autograd.grad(losses.sum(), logits)]

    moved = 3 * sizes.tokens * sizes.vocab * hidden.element_size()  # written, read, written
    return Case("cross entropy of a chunk", work, "torch cross_entropy", library, moved)


def embedding_case(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    (weight,) = some((sizes.vocab, sizes.hidden), 1, dtype, device)
    (grad,) = some((sizes.seq, sizes.hidden), 1, dtype, device)
    generator = torch.Generator().manual_seed(2)
    # Frequent tokens repeat, as in text.
    ids = (torch.rand(sizes.seq, generator=generator) ** 4 * sizes.vocab).long().to(device)
    weight.main_grad = torch.zeros(weight.shape, device=device)

    def work() -> list[Tensor]:
        weight.main_grad.zero_()
        embedding(ids, weight).backward(grad)
        return [weight.main_grad]

    def library() -> list[Tensor]:
        weight.main_grad.zero_()
        return [weight.main_grad.index_add_(0, ids, grad.float())]

    moved = sizes.seq * sizes.hidden * (2 * weight.element_size() + 8) + 4 * weight.numel()
    return Case("embedding's gradient, cleared before", work, "torch index_add_", library, moved)


def norms_case(sizes: Sizes, device: torch.device) -> Case:
    gradients = [some((count,), 1, torch.float32, device)[0].detach() for count in sizes.parameters]

    def work() -> list[Tensor]:
        return [gradient_norms(gradients, device)]

    def library() -> list[Tensor]:
        return [torch.nn.utils.get_total_norm(gradients)]

    return Case("norms of gradients", work, "torch get_total_norm", library, 4 * sum(sizes.parameters))


def copied_gradient_case(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Case:
    weight, gradient = some((max(sizes.parameters),), 2, dtype, device)
    total, norm = (
        torch.zeros(weight.shape, device=device),
        torch.zeros((), dtype=torch.float64, device=device),
    )
    set_main_grad(weight, total, stays_allocated=False)

    def work() -> list[Tensor]:
        weight.grad = gradient.detach()
        move_to_main_grad(weight, norm)
        return [total, norm * 0.0]

    def library() -> list[Tensor]:
        return [total.copy_(gradient.detach())]

    moved = total.numel() * (4 + weight.element_size())
    return Case("norms of copied gradients: finite or not", work, "torch copy_", library, moved)


def some(shape: tuple[int, ...], count: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Returns random tensors that require a gradient."""
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype).requires_grad_()
        for seed in range(count)
    ]


if __name__ == "__main__":
    main()
