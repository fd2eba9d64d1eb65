#!/usr/bin/env python3
"""Measures the host time to launch the passes of a layer and of the loss, in us per call.

    python benchmarks/host_time.py     a minute, no GPU needed

A GPU waits for the host if a pass takes the host longer than the device. The tensors are tiny and on the CPU,
so the time of a call is the time of Python, of PyTorch's dispatcher and autograd, and of a small kernel for
each operation. Triton kernels run Triton's code up to the launch, with a driver that launches nothing. One
matrix product computes each weight gradient and adds it to `main_grad`, as on a GPU. Layers are measured as a
stack, so that the dropout keys are computed once for all layers, as in a run.

Each row also has the time of plain PyTorch modules with equal work. Both run in turns, and each figure is the
minimum of all rounds, because other load on the machine only adds time. The attention of plain modules has no
dropout, because PyTorch has no fused kernel with dropout without a GPU. The last line has the host time per
kernel, for --host-us-per-kernel of a plan.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("TRITON_INTERPRET", None)

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.machine import LLAMA, benchmark_parser, describe_machine
from benchmarks.plain_model import Model, PlainLayer, rotary_tables
from megatron.arguments import parse_args
from megatron.kernels import selection
from megatron.model.gpt_model import ParallelTransformerLayerPipe
from megatron.model.layer_context import LayerContext
from megatron.model.loss import CrossEntropy
from megatron.mpu import weight_gradient
from megatron.mpu.compilation import compile_in_place
from megatron.mpu.mesh import ONE_RANK, Axis
from megatron.mpu.parameters import set_main_grad
from megatron.mpu.random import DropoutRNG
from megatron.optimizer.flat_group import add_to_main_grad
from megatron.text_table import format_table

SEQ, HIDDEN, HEADS, GROUPS, VOCAB, LAYERS = 8, 32, 4, 2, 64, 4
GOAL = 1.2
NO_DROPOUT = "layer, no dropout"

Times = tuple[float, float]
Call = Callable[[], Times]
"""A function that runs the work once and returns the seconds of the forward and the backward pass."""


@contextmanager
def launches_without_device(launch: Callable[..., None] = lambda *_: None) -> Iterator[None]:
    """Makes operations on CPU tensors use the Triton kernels, up to the launch: `launch` is called instead of
    the driver's function."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    kernel = CompiledKernel.__new__(CompiledKernel)
    kernel.name = kernel.src = kernel.module = kernel.function = kernel.packed_metadata = ""
    kernel._run = launch
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )

    def compiled(self: Any, key: Any, _signature: Any, device: int, *_: Any) -> Any:
        return self.device_caches[device][0].setdefault(key, kernel)

    def add(total: Tensor, a: Tensor, b: Tensor, beta: float) -> Tensor:
        return total.addmm_(a, b, beta=beta)

    with (
        patch.object(JITFunction, "_do_compile", compiled),
        patch.object(selection, "_device_uses_kernels", lambda _: True),
        patch.object(weight_gradient, "supports_fused_accumulation", lambda _: True),
        patch.object(weight_gradient, "add_product", add),
    ):
        yield


def both_passes(forward: Callable[[], Tensor], layers: int = 1) -> Call:
    """Returns a function that measures the passes of `layers` equal layers, in seconds per layer."""
    gradient = torch.ones_like(forward())

    def call() -> Times:
        start = perf_counter()
        output = forward()
        middle = perf_counter()
        output.backward(gradient)
        return (middle - start) / layers, (perf_counter() - middle) / layers

    return call


def own_layers(flags: str) -> Call:
    """Returns transformer layers, with the optimizer's hooks."""
    sizes = (
        f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --vocab-size {VOCAB} "
        f"--seq-length {SEQ} --max-position-embeddings {SEQ} --micro-batch-size 1 --global-batch-size 1 "
    )
    config = parse_args(f"--dry-run --lr 1 --train-iters 1 {sizes} {flags}".split(), {})
    rng = DropoutRNG(1)
    context = LayerContext(config, ONE_RANK, rng)
    layers = nn.Sequential(*(ParallelTransformerLayerPipe(context, 3 + index) for index in range(LAYERS)))
    for parameter in layers.parameters():
        nn.init.constant_(parameter, 0.1)
        set_main_grad(parameter, torch.zeros(parameter.shape))
        parameter.register_post_accumulate_grad_hook(add_to_main_grad)
    for layer in layers if config.training.compile else ():
        compile_in_place(layer)
    hidden = torch.randn(SEQ, 1, HIDDEN, requires_grad=True)

    def forward() -> Tensor:
        with rng.use_samples((5,)):
            return layers(hidden)

    return both_passes(forward, LAYERS)


def plain_layers(dropout: float = 0.0, groups: int = 0) -> Call:
    model = Model(LAYERS, HIDDEN, HEADS, SEQ, VOCAB, groups)
    layers = [PlainLayer(model, dropout) for _ in range(LAYERS)]
    hidden, tables = torch.randn(1, SEQ, HIDDEN, requires_grad=True), rotary_tables(model, torch.float32)

    def forward() -> Tensor:
        x = hidden
        for layer in layers:
            x = layer(x, *tables)
        return x

    return both_passes(forward, LAYERS)


def own_loss() -> Call:
    """Returns the head and the loss, fused."""
    weight, hidden = head()
    set_main_grad(weight, torch.zeros(weight.shape))
    labels_and_mask = torch.zeros(1, SEQ, dtype=torch.int64), torch.ones(1, SEQ)
    loss = CrossEntropy(Axis("tp"), VOCAB)
    return both_passes(lambda: loss.from_hidden(hidden, weight, labels_and_mask))


def plain_loss() -> Call:
    weight, hidden = head()
    labels, mask = torch.zeros(SEQ, dtype=torch.int64), torch.ones(SEQ)

    def forward() -> Tensor:
        losses = F.cross_entropy(F.linear(hidden, weight).float().view(SEQ, VOCAB), labels, reduction="none")
        return (losses * (mask / mask.sum())).sum()

    return both_passes(forward)


def head() -> tuple[nn.Parameter, Tensor]:
    return nn.Parameter(torch.randn(VOCAB, HIDDEN)), torch.randn(1, SEQ, HIDDEN, requires_grad=True)


def comparisons(with_compiled: bool) -> list[tuple[str, Call, Call]]:
    """Returns rows of the table: name, this program's call and the plain one."""
    no_dropout = "--attention-dropout 0 --hidden-dropout 0"
    compiled, llama = f"{no_dropout} --compile", f"{LLAMA} --num-query-groups {GROUPS} {no_dropout}"
    return [
        (NO_DROPOUT, own_layers(no_dropout), plain_layers()),
        ("layer, hidden dropout", own_layers("--attention-dropout 0"), plain_layers(0.1)),
        ("layer, both dropouts", own_layers(""), plain_layers(0.1)),
        ("Llama layer", own_layers(llama), plain_layers(groups=GROUPS)),
        ("head and loss", own_loss(), plain_loss()),
        *([("compiled layer", own_layers(compiled), plain_layers())] if with_compiled else []),
    ]


class Kernels(TorchDispatchMode):
    """Counts the operations that would launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += not func.is_view and not name.startswith(
            ("empty", "new_empty", "detach", "_unsafe_view")
        )
        return func(*args, **(kwargs or {}))


def least_times(own: Call, plain: Call, rounds: int, calls: int) -> tuple[Times, Times]:
    """Returns the least mean time of a round of calls, which run in turns."""
    least = [[float("inf")] * 2, [float("inf")] * 2]
    gc.disable()
    for _ in range(rounds):
        for work, found in zip((own, plain), least, strict=True):
            for index, seconds in enumerate(zip(*(work() for _ in range(calls)), strict=True)):
                found[index] = min(found[index], sum(seconds) / calls)
    gc.enable()
    (a, b), (c, d) = least
    return (a, b), (c, d)


def cells(what: str, own: float, plain: float, goal: float | None) -> tuple[str, ...]:
    verdict = "-" if goal is None else "met" if own <= goal * plain else "MISSED"
    return what, f"{1e6 * own:.0f}", f"{1e6 * plain:.0f}", f"{own / plain:.2f}", verdict


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=10, help="calls of each row in a round")
    parser.add_argument("--compile", action="store_true", help="also measure a layer of a run with --compile")
    arguments = parser.parse_args()
    rounds, calls = arguments.rounds, arguments.calls
    torch.set_num_threads(1)
    print(describe_machine())
    rows: list[tuple[str, ...]] = [("us per call", "this program", "plain modules", "ratio", f"goal {GOAL}")]
    with launches_without_device():
        for what, own_call, plain_call in comparisons(arguments.compile):
            own, plain = least_times(own_call, plain_call, rounds, calls)
            if what == NO_DROPOUT:
                with Kernels() as kernels:
                    own_call()
                us_per_kernel = 1e6 * sum(own) / (kernels.count / LAYERS)
            for index, name in enumerate(("forward", "backward")):
                goal = GOAL if "layer" in what else None
                rows.append(cells(f"{what}, {name}", own[index], plain[index], goal))
    print(format_table(rows))
    print(f"{NO_DROPOUT}: {us_per_kernel:.1f} us per kernel (--host-us-per-kernel of a plan)")


if __name__ == "__main__":
    main()
