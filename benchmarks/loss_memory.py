#!/usr/bin/env python3
"""Memory and time of head and loss, fused (--loss-implementation fused, the default) and plain, side by side.

    python benchmarks/loss_memory.py            about a minute on one core
    python benchmarks/loss_memory.py --tokens 2048 --vocab 62592 --hidden 2048

First the peak memory at a size at which users' last stages ran out of memory: micro-batch 8, sequence 2048,
hidden 2048, vocabulary 250368 over 4 TP ranks, bf16. With an accelerator it is measured; without
one it is counted tensor by tensor on the meta device. `gradients` are those of hidden (16 bits) and weight
(fp32): the fused loss holds them at its peak, the plain loss makes them later. Both add the weight's gradient
to `main_grad`, which does not count.

Then the time of a micro-batch, forward and backward, on a CPU at a smaller size, in turns. `products` are the
three matrix products of head and loss alone, each at full size.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.support.loss_memory import FULL, MIB, TARGET_MIB, make_steps, peak_mib

if TYPE_CHECKING:
    import torch

ON_CPU = (1024, 32768, 768)


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
