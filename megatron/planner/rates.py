"""Predicts how long a kernel runs on a GPU, from fractions of the peak rates in the GPU's data sheet.

    matrix product    each multiprocessor computes one tile of the result at a time; a last round that does
                      not fill all multiprocessors takes as long as a full one (NVIDIA, "Matrix Multiplication
                      Background User's Guide"); starting and writing a tile takes `Rates.tile_s`
    fused attention   a fraction of the peak, which depends on implementation, pass, head size and sequence
                      length
    other kernels     a fraction of the memory bandwidth

No kernel is faster than its memory traffic allows, nor shorter than `Rates.shortest_s`.

This repository has not measured any of the rates. `products`, `tile_s` and `contention` were fitted to
published training runs; `benchmarks/planner_accuracy.py --fit` repeats the fit. The fitted `products` are
below the best single matrix product: 0.87 of the peak on an A100, 0.80 on an H100 and 0.78 on a B200 (S.
Bekman, "Machine Learning Engineering", maximum achievable matmul FLOPS). No GPU sustains that rate for hours
at its power limit. `fp8_products` are assumptions. The best published product with block scales, DeepGEMM's,
reaches 0.78 of the FP8 peak on an H800 (1,550 TFLOP/s, its README); the power limit lowers this rate as it
lowers the rate of 16-bit products. cuBLAS multiplies matrices with block scales only on Hopper; on Blackwell,
Triton does. Attention rates are from arXiv 2307.08691, figures 4 to 7 (A100), and arXiv 2407.08608, figures 5
to 7 (H100). The rates of attention on the B200, of the Triton kernels' backward pass, and `memory` are
assumptions.

This program belongs to the plain PyTorch programs: it uses eager PyTorch, cuBLAS, and its own Triton kernels
for attention, norms, dropout and loss, without CUDA graphs and without Transformer Engine's cuDNN attention.
The best published MFU of such programs is 46.4 % on an H100 (7B), where Transformer Engine reaches 62.5 %.
The norms and the loss of this program move fewer bytes than the norms and the loss of those programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from megatron.cluster.devices import GPU
from megatron.planner.simulation.passes import Kernel

NO_TENSOR_CORES = 0
UNALIGNED = {8: 1.0, 4: 0.7, 2: 0.5, 1: 0.35, NO_TENSOR_CORES: 1 / 16}
"""Alignment of a matrix's rows in elements -> rate of 16-bit matrix products, relative to rows of multiples
of 16 bytes. The rates are assumptions: since cuBLAS 11, tensor cores also multiply less aligned rows, but
load them in smaller parts (NVIDIA, "Matrix Multiplication Background User's Guide"). Without tensor cores an
A100 reaches 19.5 instead of 312 TFLOP/s, and a V100 loses about the same factor
(`megatron.cluster.devices`)."""
LAUNCH_S = 8e-6
"""Assumed host time per kernel in eager PyTorch. A pass takes as long as the slower of host and device.
--host-us-per-kernel sets this time to the value that `benchmarks/host_time.py` has measured."""
EAGER_TRAFFIC = 1.55
"""Factor for the time of an eager PyTorch kernel that is neither a matrix product nor attention, relative to
the time that its bytes predict. It was fitted on 2026-11-23 to published runs of MosaicML's llm-foundry."""

_TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.92),
    (128, 64, 0.75),
    (64, 128, 0.75),
    (64, 64, 0.55),
)
"""(rows, columns, assumed relative rate) of each tile size. Smaller tiles read more bytes per FLOP."""
_LARGEST_TILE = 256 * 128


@dataclass(frozen=True)
class AttentionRate:
    """Fractions of the peak that a fused attention kernel reaches with heads of 128 elements and long
    sequences.

    half_length: sequence length at which the kernel reaches half of these fractions. narrow: factor for heads
    of 64 elements.
    """

    forward: float
    backward: float
    half_length: float
    narrow: float


@dataclass(frozen=True)
class Rates:
    """Rates that kernels reach on one kind of GPU.

    processors: number of multiprocessors. products: fraction of the peak rate within the tiles of large
    matrix products. fp8_products: the same fraction for FP8 matrices. tile_s: seconds to start and to write a
    tile of the largest size. memory: fraction of the memory bandwidth. shortest_s: seconds of the smallest
    kernel. contention: seconds that one second of a concurrent collective adds to the kernels, because both
    share multiprocessors and bandwidth.
    """

    processors: int
    products: float
    attention: Mapping[str, AttentionRate]
    memory: float = 0.78
    tile_s: float = 5e-6
    shortest_s: float = 3e-6
    contention: float = 0.37
    fp8_products: float = 0.6


_FLASH, _CUDNN, _TRITON, _EFFICIENT = "flash", "cudnn", "triton", "efficient"

_V100_ATTENTION = {_EFFICIENT: AttentionRate(0.35, 0.25, 350, 0.90)}
_A100_ATTENTION = {
    _FLASH: AttentionRate(0.64, 0.56, 350, 0.87),
    _TRITON: AttentionRate(0.55, 0.42, 350, 0.87),
    _EFFICIENT: AttentionRate(0.40, 0.30, 350, 0.90),
}
_H100_ATTENTION = {
    _FLASH: AttentionRate(0.345, 0.315, 350, 0.87),
    _CUDNN: AttentionRate(0.60, 0.52, 700, 0.68),
    _TRITON: AttentionRate(0.35, 0.27, 350, 0.80),
    _EFFICIENT: AttentionRate(0.25, 0.18, 350, 0.90),
}
_B200_ATTENTION = {
    _FLASH: AttentionRate(0.14, 0.125, 350, 0.87),
    _CUDNN: AttentionRate(0.58, 0.42, 1000, 0.70),
    _TRITON: AttentionRate(0.25, 0.18, 350, 0.80),
    _EFFICIENT: AttentionRate(0.10, 0.07, 350, 0.90),
}

RATES = {
    "v100": Rates(80, 0.79, _V100_ATTENTION),
    "a100": Rates(108, 0.81, _A100_ATTENTION),
    "h100": Rates(132, 0.71, _H100_ATTENTION),
    "h200": Rates(132, 0.71, _H100_ATTENTION),
    "b200": Rates(148, 0.56, _B200_ATTENTION, fp8_products=0.35),
    "gb200": Rates(152, 0.56, _B200_ATTENTION, fp8_products=0.35),
}
"""Kind of GPU -> its rates. The kind is the value of --gpu up to the first dash: a100 for a100-80gb."""


def kernel_seconds(kernel: Kernel, gpu: GPU, rates: Rates, dtype: str) -> float:
    """Returns the seconds of a kernel whose operands have this dtype: 'fp32', 'tf32', 'fp16' or 'bf16'.

    For fused attention, `flops` are the FLOPs that the kernel computes: with causal attention half of the
    full products, and in the backward pass 2.5 times as many as in the forward pass. `product` is then
    (queries, keys, elements of a head); None stands for a long sequence and heads of 128 elements.
    """
    seconds = max(kernel.bytes / (rates.memory * gpu.bandwidth), rates.shortest_s)
    if not kernel.flops:
        return seconds
    peak = gpu.peak_flops[dtype]
    if is_attention(kernel):
        return max(seconds, kernel.flops / (peak * attention_part(kernel, rates)))
    if kernel.name == "multiply_fp8":
        return max(
            seconds, _product_seconds(kernel, gpu.peak_flops["fp8"] * rates.fp8_products, rates, "fp8")
        )
    return max(seconds, _product_seconds(kernel, peak * rates.products, rates, dtype))


def is_attention(kernel: Kernel) -> bool:
    """Returns whether the kernel is a fused attention kernel, judged by its name."""
    return "attention" in kernel.name


def attention_part(kernel: Kernel, rates: Rates) -> float:
    """Returns the fraction of the peak rate that a fused attention kernel reaches."""
    rate = rates.attention[_implementation(kernel.name, rates)]
    part = rate.backward if "backward" in kernel.name else rate.forward
    if kernel.product is None:
        return part
    _, keys, head = kernel.product
    # Between heads of 64 and 128 elements the rate grows with their size.
    width = min(rate.narrow + (1 - rate.narrow) * (head - 64) / 64, 1.0)
    padded = 8 * math.ceil(head / 8)  # kernels pad heads to a multiple of 8 elements
    return part * width * keys / (keys + rate.half_length) * head / padded


def _implementation(name: str, rates: Rates) -> str:
    """Returns the implementation of an attention kernel. The name of a PyTorch kernel contains its
    implementation; all other kernels are Triton kernels. If the GPU has no rates for this implementation,
    returns the first implementation that has rates."""
    kinds = (_FLASH, _CUDNN, _EFFICIENT)
    kind = next((kind for kind in kinds if kind in name), _TRITON)
    return kind if kind in rates.attention else next(iter(rates.attention))


def _product_seconds(kernel: Kernel, rate: float, rates: Rates, dtype: str) -> float:
    """Returns the seconds of a matrix product, or of a batch of equal products, at `rate` FLOP/s within a
    tile."""
    if kernel.product is None:
        return kernel.flops / rate
    rows, columns, inner = kernel.product
    batch = max(round(kernel.flops / (2 * rows * columns * inner)), 1)
    elements = _elements_per_processor(rates.processors, rows, columns, batch)
    part = UNALIGNED[kernel.alignment] if dtype in ("fp16", "bf16") else 1.0
    flops = 2 * inner * rates.processors / part
    return elements * (flops / rate + rates.tile_s / _LARGEST_TILE)


@cache
def _elements_per_processor(processors: int, rows: float, columns: float, batch: int) -> float:
    """Returns how many elements of the result each multiprocessor computes, one tile after the other, with
    the best tile size. Elements of tiles with a lower rate count more."""
    return min(
        math.ceil(batch * math.ceil(rows / height) * math.ceil(columns / width) / processors)
        * (height * width / part)
        for height, width, part in _TILES
    )


_MOSAICML = "MosaicML's llm-foundry"
_NEMO = "NVIDIA's NeMo"
_BEST_A100 = (
    (1.3e9, 60.7, _MOSAICML),
    (2.7e9, 63.7, _MOSAICML),
    (7e9, 64.2, _MOSAICML),
    (13e9, 61.1, _MOSAICML),
    (30e9, 56.4, _MOSAICML),
    (70e9, 53.3, _MOSAICML),
    (175e9, 56.4, "NVIDIA's Pax"),
)
_BEST_H100 = (
    (1.3e9, 43.2, _MOSAICML),
    (8e9, 62.5, _NEMO),
    (15e9, 58.5, _NEMO),
    (70e9, 54.5, _NEMO),
    (175e9, 49.9, _NEMO),
    (340e9, 50.0, _NEMO),
    (405e9, 55.8, _NEMO),
)
_BEST_GB200 = ((340e9, 43.0, _NEMO), (405e9, 47.4, _NEMO))
_BEST = {
    "a100": _BEST_A100,
    "h100": _BEST_H100,
    "h200": _BEST_H100,
    "b200": _BEST_GB200,
    "gb200": _BEST_GB200,
}


def best_published_mfu(gpu: str, parameters: float) -> tuple[float, str] | None:
    """Returns the best published model FLOPs utilization in percent and its source, for a kind of GPU and the
    model size nearest to `parameters`; None for kinds without published runs.

    The runs are 16-bit runs published until 2026 that state their layout. MFU counts the full attention
    products, not the causal half, and no recomputation. The H200 has the H100's runs, and the B200 the
    GB200's.

    gpu: the kind, such as 'a100', or a value of --gpu.
    """
    rows = _BEST.get(gpu.partition("-")[0])
    if rows is None:
        return None
    size, percent, source = min(rows, key=lambda row: abs(math.log(row[0] / parameters)))
    return percent, f"{source}, {size / 1e9:g}B"
