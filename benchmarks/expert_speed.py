#!/usr/bin/env python3
"""Times expert layers and a dense MLP of equal active FLOPs; on a GPU also prints their share of the peak
rate.

    python benchmarks/expert_speed.py           on a CPU a layer with 8 experts, top 2, in half a minute; on a
                                                GPU the layers of OLMoE and Qwen3-30B-A3B
    python benchmarks/expert_speed.py --tiny    tiny layers

Each time is of the forward and backward pass of an MLP with SwiGLU and without biases. `layer` includes
router and dispatch, `products` includes only the computation of the experts, and `dense` is an MLP whose
inner size is k times the inner size of an expert. The three take turns, and each figure is a median. Only the
FLOPs of the experts' matrices count. A GPU computes in bf16, and each expert gets an equal number of tokens
(--moe-router-force-load-balancing). A CPU computes in fp32, and the router chooses the experts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.machine import add_row, benchmark_parser, describe_machine, times_in_turns
from megatron.cluster.devices import gpu_of_process
from megatron.kernels.grouped_linear import Groups
from megatron.model.experts import ExpertMLP
from megatron.model.gpt_model import new_mlp
from megatron.model.layer_context import LayerContext
from megatron.mpu.mesh import ONE_RANK
from megatron.mpu.parameters import set_main_grad
from megatron.mpu.random import DropoutRNG
from tests.support.measured_worlds import config_of

LEAST_SHARE = 0.45
"""Target: minimum share of the GPU's peak rate that a layer reaches."""
LARGEST_RATIO = 1.35
"""Target: maximum time of a layer on a CPU, relative to the dense MLP."""


@dataclass(frozen=True)
class Shape:
    """Sizes of an expert layer. k: number of experts per token."""

    name: str
    tokens: int
    hidden: int
    size: int
    experts: int
    k: int

    @property
    def flops(self) -> float:
        """Returns the FLOPs of both passes: three products with three matrices of each chosen expert."""
        return 3 * 2.0 * self.tokens * self.k * 3 * self.hidden * self.size


GPU_SHAPES = (
    Shape("OLMoE", 16384, 2048, 1024, 64, 8),
    Shape("Qwen3-30B-A3B", 16384, 2048, 768, 128, 8),
    Shape("8 experts, top 2", 8192, 4096, 14336, 8, 2),
)
CPU_SHAPES = (Shape("8 experts, top 2", 2048, 512, 1024, 8, 2),)
TINY_SHAPES = (Shape("tiny", 12, 16, 24, 4, 2),)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="measure tiny layers once")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each time (default: 9)")
    new = Path(f"runs/experts/{time.strftime('%m%d-%H%M%S')}")
    parser.add_argument("--out", type=Path, default=new, help="folder of rows.jsonl (default: a new folder)")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(describe_machine(), flush=True)
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    for shape in TINY_SHAPES if arguments.tiny else shapes:
        seconds = measure(shape, device, 1 if arguments.tiny else arguments.rounds)
        add_row(arguments.out, "expert layers", **columns(shape, device, seconds))


def measure(shape: Shape, device: torch.device, rounds: int) -> dict[str, float]:
    """Returns the median seconds of 'layer', 'products' and 'dense'."""
    layers = {"layer": new_layer(shape, device), "dense": new_layer(shape, device, dense=True)}
    works = {name: passes(layer, layer, tokens_of(shape, device)) for name, layer in layers.items()}
    products = products_of(layers["layer"], shape)
    works["products"] = passes(products, layers["layer"], tokens_of(shape, device, shape.k))
    return {name: statistics.median(found) for name, found in times_in_turns(works, rounds, 2).items()}


def new_layer(shape: Shape, device: torch.device, dense: bool = False) -> nn.Module:
    """Returns the MLP of a model. On a GPU its parameters have the gradient buffers (`main_grad`) of an
    optimizer."""
    is_gpu = device.type == "cuda"
    experts = f"--num-experts {shape.experts} --moe-router-topk {shape.k} --moe-ffn-hidden-size {shape.size}"
    balance = "--moe-router-force-load-balancing" if is_gpu else ""
    config = config_of(
        f"--num-layers 1 --hidden-size {shape.hidden} --ffn-hidden-size {shape.k * shape.size} "
        "--num-attention-heads 1 --vocab-size 100 --seq-length 8 --micro-batch-size 1 --global-batch-size 1 "
        "--position-embedding-type rotary --glu-activation swiglu --disable-bias-linear "
        f"{'' if dense else f'{experts} {balance}'}"
    )
    with torch.device(device):
        layer = new_mlp(LayerContext(config, ONE_RANK, DropoutRNG(1, (5,))), 3)
    layer = layer.to(torch.bfloat16 if is_gpu else torch.float32)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=shape.hidden**-0.5)
        if is_gpu and parameter.dtype == torch.bfloat16:
            set_main_grad(parameter, torch.zeros(parameter.shape, device=device))
    return layer


def products_of(layer: nn.Module, shape: Shape) -> Callable[[Tensor], Tensor]:
    """Returns a function that applies only the experts, to rows that are sorted by expert."""
    assert isinstance(layer, ExpertMLP)
    first, second = layer.experts["dense_h_to_4h"], layer.experts["dense_4h_to_h"]
    groups = Groups((shape.tokens * shape.k // shape.experts,) * shape.experts)

    def products(rows: Tensor) -> Tensor:
        output: Tensor = second(layer.activation(first(rows.flatten(0, 1), groups)), groups)
        return output

    return products


def tokens_of(shape: Shape, device: torch.device, copies: int = 1) -> Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = (shape.tokens * copies, 1, shape.hidden)
    return torch.randn(size, dtype=dtype, device=device).requires_grad_()


def passes(function: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> Callable[[], None]:
    """Returns a function that runs a forward and a backward pass. It frees gradients that are not added to
    `main_grad`."""
    upstream = torch.randn_like(function(x))

    def work() -> None:
        function(x).backward(upstream)
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None

    return work


def columns(shape: Shape, device: torch.device, seconds: dict[str, float]) -> dict[str, object]:
    """Returns the row of a layer. On a GPU with a known peak rate, the verdict is about the share of the
    peak; on a CPU, it is about the ratio to the dense MLP."""
    gpu, ratio = gpu_of_process(), seconds["layer"] / seconds["dense"]
    share = gpu and shape.flops / seconds["layer"] / gpu.peak_flops["bf16"]
    met, target = ratio <= LARGEST_RATIO, f"at most {LARGEST_RATIO} times the dense MLP"
    if device.type == "cuda":
        met, target = share is None or share >= LEAST_SHARE, f"at least {LEAST_SHARE:.0%} of the peak"
    return {
        "layer": shape.name,
        "experts": f"{shape.experts}, top {shape.k}",
        "tokens": shape.tokens,
        **{f"{name}_ms": 1000 * value for name, value in seconds.items()},
        "ratio": ratio,
        "TFLOP/s": shape.flops / seconds["layer"] / 1e12,
        "share": share,
        "share of products": gpu and shape.flops / seconds["products"] / gpu.peak_flops["bf16"],
        "verdict": target if met else f"MISSED: {target}",
    }


if __name__ == "__main__":
    main()
