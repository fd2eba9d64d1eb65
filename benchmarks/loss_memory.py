#!/usr/bin/env python3
"""Memory and time of head and loss, fused (--loss-implementation fused, the default) and plain, side by side.

    python benchmarks/loss_memory.py            about a minute on one core
    python benchmarks/loss_memory.py --tokens 2048 --vocab 62592 --hidden 2048

First the peak memory at the size that made users' last stage run out: micro-batch 8, sequence 2048, hidden
2048, vocabulary 250368 over 4 tensor ranks, bf16. Without an accelerator that is counted tensor by tensor on
the meta device, where nothing is computed; with one it is measured. `gradients` are those of hidden (16 bits)
and weight (fp32) that the fused loss has made when it is at its peak; the plain one makes them afterwards.
Both add the weight's gradient to the fp32 sum that the run's optimizer gives it, which does not count.

Then the time of a micro-batch, forward and backward, on a CPU at a smaller size, in turns. `products` are the
three matrix products of head and loss and nothing else, each of the whole size.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if TYPE_CHECKING:
    import torch

FULL = (8 * 2048, 250368 // 4, 2048)
ON_CPU = (1024, 32768, 768)
MIB = 2**20
TARGET_MIB = 256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, help=f"of the timed size (default on a CPU: {ON_CPU[0]})")
    parser.add_argument("--vocab", type=int, help=f"rows of the weight on one rank (default: {ON_CPU[1]})")
    parser.add_argument("--hidden", type=int, help=f"width (default: {ON_CPU[2]})")
    parser.add_argument("--rounds", type=int, default=7, help="timed turns (default: 7)")
    arguments = parser.parse_args()
    import torch

    from benchmarks.machine import describe_machine
    from megatron.cluster.processes import configure_logging
    from megatron.config import LoggingConfig

    configure_logging(LoggingConfig())
    torch.set_num_threads(1)
    print(describe_machine(), flush=True)
    on_gpu = torch.cuda.is_available()
    print_memory(FULL, torch.device("cuda" if on_gpu else "meta"))
    given = (arguments.tokens, arguments.vocab, arguments.hidden)
    size = tuple(mine or default for mine, default in zip(given, FULL if on_gpu else ON_CPU, strict=True))
    for dtype in (torch.bfloat16,) if on_gpu else (torch.bfloat16, torch.float32):
        print_times(size, dtype, torch.device("cuda" if on_gpu else "cpu"), arguments.rounds)


def make_steps(
    size: tuple[int, int, int], dtype: "torch.dtype", device: "torch.device"
) -> dict[str, Callable[[], None]]:
    """Forward and backward pass of head and loss, by --loss-implementation."""
    import torch

    from megatron.model.gpt_model import CrossEntropy
    from megatron.mpu.layers import parallel_logits
    from megatron.mpu.layout import TPGroup

    tokens, vocab, width = size
    hidden = torch.randn(1, tokens, width, device=device).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocab, width, device=device)).to(dtype).requires_grad_()
    weight.main_grad = torch.zeros(vocab, width, device=device)
    labels = (torch.randint(0, vocab, (1, tokens), device=device), torch.ones(1, tokens, device=device))
    loss = CrossEntropy(TPGroup(), vocab)

    # What a step has made is let go of at its end, so that the next one's peak has all of it.
    def fused() -> None:
        loss.from_hidden(hidden, weight, labels).backward()
        hidden.grad = None

    def plain() -> None:
        loss(parallel_logits(hidden, weight, TPGroup()).float(), labels).backward()
        weight.main_grad.add_(weight.grad)
        hidden.grad = weight.grad = None

    return {"fused": fused, "plain": plain}


def print_memory(size: tuple[int, int, int], device: "torch.device") -> None:
    import torch

    tokens, vocab, width = size
    print(f"\n{tokens} tokens, {vocab} rows of the vocabulary, hidden {width}, bf16, on {device.type}")
    print(f"{'':6} {'peak, MiB':>10} {'gradients':>10} {'rest':>8} {'target':>8}")
    for name, step in make_steps(size, torch.bfloat16, device).items():
        peak = peak_mib(step, device)
        gradients = (tokens * width * 2 + vocab * width * 4) / MIB if name == "fused" else 0.0
        target = f"<= {TARGET_MIB}" if name == "fused" else ""
        print(f"{name:6} {peak:10.0f} {gradients:10.0f} {peak - gradients:8.0f} {target:>8}")


def peak_mib(step: Callable[[], None], device: "torch.device") -> float:
    """What the step allocates at most, beyond what was there before."""
    import torch

    if device.type == "cuda":
        step()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    from benchmarks.tracked_memory import TrackedMemory

    with TrackedMemory() as tracked:
        step()
    return tracked.peak / MIB


def print_times(
    size: tuple[int, int, int], dtype: "torch.dtype", device: "torch.device", rounds: int
) -> None:
    import torch

    tokens, vocab, width = size
    left, right, between = (
        torch.randn(shape, device=device).to(dtype)
        for shape in ((tokens, width), (vocab, width), (tokens, vocab))
    )

    def products() -> None:
        torch.mm(left, right.t())
        torch.mm(between, right)
        torch.mm(between.t(), left)

    work = {**make_steps(size, dtype, device), "products": products}
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + 1):
        for name, step in work.items():
            seconds = timed(step, device)
            if turn:
                times[name].append(seconds)
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"\n{tokens} tokens, {vocab} rows, hidden {width}, {str(dtype).split('.')[-1]}, on {device.type}")
    print(f"{'':8} {'ms':>8} {'of plain':>9} {'of products':>12}")
    for name, seconds in median.items():
        print(
            f"{name:8} {seconds * 1e3:8.1f} {seconds / median['plain']:9.2f} "
            f"{seconds / median['products']:12.2f}"
        )


def timed(step: Callable[[], None], device: "torch.device") -> float:
    import torch

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    finish()
    start = time.perf_counter()
    step()
    finish()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
