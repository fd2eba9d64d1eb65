#!/usr/bin/env python3
"""Measures tokens per second of the trainer's step, the fraction of the hardware's peak, and peak memory.

    python benchmarks/throughput.py --preset cpu-small        layouts on two cores, about three minutes
    python benchmarks/throughput.py --preset 1.3B             one GPU
    python benchmarks/throughput.py --fits h100-80gb          which presets fit this card

cpu-small measures five rows: one process, DP=2, PP=2 (--partition-method time), TP=2 and --bf16, with one
thread and one core per process. The rows take turns, one step each. Each row is compared with a plain PyTorch
eager loop of the run; --bf16 is compared with fp32. A CPU without bf16 instructions skips --bf16, whose
GEMMs would take 30 times as long as fp32. The other presets are one process on an accelerator, in bf16; on a
machine without accelerator they run slowly on the CPU. 6.7B-slice has 12 of a 6.7B model's 32 layers,
13B-slice 10 of a 13B model's 40 layers, with embedding and head. 250k-last-stage is the last of many stages,
with one of 4 shards of a 250k vocabulary. All presets except 6.7B fit 80 GB.

Model FLOPs follow Megatron's formula (megatron/model/flops.py) without recomputation. They are compared with
the card's peak, if it is known, and with a GEMM that the process measures in turns with the steps: [tokens of
a micro-batch, hidden] x [hidden, 4 hidden] in the run's precision.

By default, glibc's malloc returns large blocks to the kernel after each use, and the kernel clears them
again. MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ prevent this, which makes all CPU rows and the plain
loop about 9 % faster.
"""

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.machine import benchmark_parser, describe_machine

if TYPE_CHECKING:
    import torch

    from megatron.config import Config

WARM_UP = 2
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**34)}

# PyTorch's name of a card -> peak FLOP/s of dense bf16 GEMMs, from NVIDIA's data sheets.
KNOWN_CARDS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
}


@dataclass(frozen=True)
class Preset:
    """A model and its batches."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    micro_batch: int
    global_batch: int
    eight_bit: bool = False


PRESETS = {
    "cpu-small": Preset(4, 256, 8, 512, 8192, 2, 8),
    "125M": Preset(12, 768, 12, 2048, 50304, 8, 32),
    "1.3B": Preset(24, 2048, 16, 2048, 50304, 8, 32),
    "6.7B-slice": Preset(12, 4096, 32, 2048, 50304, 4, 16),
    "6.7B": Preset(32, 4096, 32, 2048, 50304, 4, 16, eight_bit=True),
    "13B-slice": Preset(10, 5120, 40, 2048, 50304, 4, 16),
    "250k-last-stage": Preset(4, 2048, 16, 2048, 250368 // 4, 8, 32),
}


@dataclass(frozen=True)
class Row:
    """A measured layout. target: the least ratio to the row named `against`."""

    name: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    precision: str = "fp32"
    against: str = ""
    target: float = 0.0

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline * self.data


CPU_ROWS = [
    Row("1 process", against="plain", target=1.28),
    Row("DP=2", data=2, against="plain", target=2.34),
    Row("PP=2", pipeline=2, against="plain", target=1.92),
    Row("TP=2", tensor=2, against="plain", target=1.84),
    Row("--bf16", precision="bf16", against="1 process", target=2.0),
]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="cpu-small")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps per row (default: 10)")
    parser.add_argument("--micro-batch", type=int, help="micro-batch size (default: the preset's)")
    parser.add_argument("--compile", action="store_true", help="measure with --compile")
    parser.add_argument(
        "--dropout", type=float, default=0.0, help="dropout of hidden states and attention (default: 0)"
    )
    parser.add_argument("--fits", metavar="CARD", help="only print whether each preset fits a card")
    parser.add_argument("--worker", metavar="ROW", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fits:
        print_fits(arguments.fits)
        return
    preset = PRESETS[arguments.preset]
    if arguments.micro_batch:
        accumulation = preset.global_batch // preset.micro_batch
        size = arguments.micro_batch
        preset = dataclasses.replace(preset, micro_batch=size, global_batch=size * accumulation)
    if arguments.worker:
        if arguments.worker == "plain":
            run_plain(preset)
        else:
            (row,) = (row for row in rows_of(arguments.preset) if row.name == arguments.worker)
            run_worker(preset, row, arguments.compile, arguments.dropout)
        return

    print(f"{describe_machine()}, load {os.getloadavg()[0]:.1f}", flush=True)
    rows = rows_of(arguments.preset)
    measured = measure(arguments.preset, arguments.rounds, [*sys.argv[1:]])
    print_rows(preset, rows, measured)
    if arguments.preset == "cpu-small" and len(rows) < len(CPU_ROWS):
        print("--bf16 was skipped: this CPU has no bf16 instructions")


def print_fits(card: str) -> None:
    """Prints a line per preset: whether it fits a GPU, by the plan of its memory."""
    from megatron.pipeline.stages import plan_stages
    from megatron.planner.memory import fit_summary, plan_memory

    for name in PRESETS.keys() - {"cpu-small"}:
        preset, (row,) = PRESETS[name], rows_of(name)
        config = make_config(preset, row, False, 0.0)
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, gpu=card))
        memory = plan_memory(config, preset.vocab, plan_stages(config, preset.vocab))
        print(f"{name} {fit_summary(config, preset.vocab, memory)[1]}")


def rows_of(name: str) -> list[Row]:
    import torch

    if name != "cpu-small":
        return [Row(name, precision="bf16")]
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return [row for row in CPU_ROWS if row.precision != "bf16" or has_bf16]


def measure(name: str, rounds: int, words: list[str]) -> dict[str, float]:
    """Returns medians: 'ROW' -> seconds per step, 'ROW product' -> seconds per GEMM, 'ROW peak' -> bytes."""
    from tests.support.measured_worlds import ON_CPU, World

    rows = rows_of(name)
    if name == "cpu-small":
        settings = {**MALLOC, **ON_CPU}
        plain = World(__file__, "plain", 1, settings, words)
    else:
        settings = {**MALLOC, "KEEP_THREADS": "1"}
    worlds = {row.name: World(__file__, row.name, row.processes, settings, words) for row in rows}
    work: dict[str, Callable[[], float]] = {}
    for row in rows:
        work[row.name] = partial(worlds[row.name].run, "step")
        work[f"{row.name} product"] = partial(worlds[row.name].run, "product")
    if name == "cpu-small":
        work["plain"] = partial(plain.run, "step")
    times: dict[str, list[float]] = {key: [] for key in work}
    for turn in range(rounds + WARM_UP):
        for key, run in work.items():
            seconds = run()
            if turn >= WARM_UP:
                times[key].append(seconds)
    measured = {key: statistics.median(values) for key, values in times.items()}
    for row in rows:
        measured[f"{row.name} peak"] = worlds[row.name].run("peak memory")
        worlds[row.name].end()
    if name == "cpu-small":
        plain.end()
    return measured


def print_rows(preset: Preset, rows: list[Row], measured: dict[str, float]) -> None:
    import torch

    tokens = preset.global_batch * preset.seq
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "this CPU"
    peak = KNOWN_CARDS.get(card)
    if peak is None:
        print(f"the peak FLOP/s of {card} is unknown: the column 'of peak' is empty")
    print(
        f"{'':16} {'tokens/s':>9} {'TFLOP/s':>8} {'of peak':>8} {'of product':>10} {'peak GiB':>9}"
        f"  {'ratio':>6} {'target':>6} against"
    )
    if "plain" in measured:
        print(f"{'plain loop':16} {tokens / measured['plain']:9.0f}")
    for row in rows:
        seconds = measured[row.name]
        speed = step_flops(preset) / seconds / row.processes
        product = product_flops(preset) / measured[f"{row.name} product"]
        share = "-" if peak is None else f"{100 * speed / peak:.1f} %"
        line = (
            f"{row.name:16} {tokens / seconds:9.0f} {speed / 1e12:8.3f} {share:>8} "
            f"{100 * speed / product:8.1f} % {measured[f'{row.name} peak'] / 2**30:9.2f}"
        )
        if row.against:
            ratio = measured[row.against] / seconds
            line += f"  {ratio:6.2f} {row.target:6.2f} {row.against}"
        print(line)


def step_flops(preset: Preset) -> float:
    from megatron.model.flops import iteration_flops

    return iteration_flops(
        num_layers=preset.layers,
        hidden_size=preset.hidden,
        seq_length=preset.seq,
        padded_vocab_size=preset.vocab,
        batch_size=preset.global_batch,
        recompute=False,
    )


def product_flops(preset: Preset) -> float:
    return 2.0 * preset.micro_batch * preset.seq * preset.hidden * 4 * preset.hidden


def make_batch(preset: Preset) -> "torch.Tensor":
    """Returns the tokens of a step, [global batch, seq + 1]."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, preset.vocab, (preset.global_batch, preset.seq + 1), generator=generator)


def run_plain(preset: Preset) -> None:
    """Runs a step of the plain loop for each line of the input."""
    from tests.support.measured_worlds import begin_worker, serve

    answers = begin_worker()
    step = make_plain_step(preset)
    serve(lambda name: step(), answers)


def make_plain_step(preset: Preset) -> Callable[[], None]:
    """Returns a step in plain PyTorch with an equal model, optimizer, clipping and accumulation."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    hidden = preset.hidden

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch_size, seq, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch_size, seq, 3, preset.heads, hidden // preset.heads)
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(context.transpose(1, 2).reshape(batch_size, seq, hidden))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(preset.vocab, hidden)
            self.positions = nn.Embedding(preset.seq, hidden)
            self.blocks, self.norm = (
                nn.ModuleList(Block() for _ in range(preset.layers)),
                nn.LayerNorm(hidden),
            )

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.norm(x) @ self.words.weight.T

    model, batch = GPT(), make_batch(preset)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        for part in batch.split(preset.micro_batch):
            logits = model(part[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, preset.vocab), part[:, 1:].reshape(-1))
            (loss * preset.micro_batch / preset.global_batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def run_worker(preset: Preset, row: Row, compiles: bool, dropout: float) -> None:
    """Does the work that each line of the input names, and prints an answer."""
    from tests.support.measured_worlds import begin_worker, connect, make_engine, micro_batches, serve

    answers = begin_worker()
    import torch
    from deepspeed.accelerator import get_accelerator

    from megatron.cluster.processes import destroy_distributed
    from megatron.model.layer_list import PARAMETER_DTYPES
    from megatron.training.startup_report import local_memory

    if "KEEP_THREADS" in os.environ:
        torch.set_num_threads(os.cpu_count() or 1)
    config = make_config(preset, row, compiles, dropout)
    layout, tp_group = connect(config)
    engine = make_engine(config, layout, tp_group, preset.vocab)
    batch = make_batch(preset)
    size = preset.micro_batch
    dtype, device = PARAMETER_DTYPES[row.precision], get_accelerator().current_device_name()
    left, right = (
        torch.randn(shape, device=device).to(dtype)
        for shape in ((size * preset.seq, preset.hidden), (preset.hidden, 4 * preset.hidden))
    )

    def step() -> None:
        engine.train_step(micro_batches(batch, layout, size), preset.global_batch, 1e-4)
        get_accelerator().synchronize()

    def product() -> None:
        torch.mm(left, right)
        get_accelerator().synchronize()

    work: dict[str, Callable[[], object]] = {
        "step": step,
        "product": product,
        "peak memory": lambda: float(peak_bytes(local_memory())),
    }
    serve(lambda name: work[name](), answers)
    destroy_distributed()


def peak_bytes(found: dict[str, int]) -> int:
    return found.get("peak allocated") or found["peak resident"]


def make_config(preset: Preset, row: Row, compiles: bool, dropout: float) -> "Config":
    from tests.support.measured_worlds import config_of

    return config_of(
        f"--num-layers {preset.layers} --hidden-size {preset.hidden} --num-attention-heads {preset.heads} "
        f"--seq-length {preset.seq} --max-position-embeddings {preset.seq} --make-vocab-size-divisible-by 1 "
        f"--hidden-dropout {dropout} --attention-dropout {dropout} --partition-method time "
        f"--micro-batch-size {preset.micro_batch} --global-batch-size {preset.global_batch} "
        f"--tensor-model-parallel-size {row.tensor} --pipeline-model-parallel-size {row.pipeline} "
        + " ".join(
            flag
            for flag, given in {
                "--compile": compiles,
                "--bf16": row.precision == "bf16",
                "--use-bnb-optimizer": preset.eight_bit,
            }.items()
            if given
        ),
        row.processes,
    )


if __name__ == "__main__":
    main()
