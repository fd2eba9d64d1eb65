#!/usr/bin/env python3
"""Measures the memory of head and loss, and of conversions from and to Hugging Face.

    python benchmarks/memory.py loss            about a minute on one core
    python benchmarks/memory.py loss --tokens 2048 --vocab 62592 --hidden 2048
    python benchmarks/memory.py conversion --folder /scratch               2 and 4 layers: 35 GB of free disk
    python benchmarks/memory.py conversion --folder /scratch --layers 80

loss: compares head and loss with --loss-implementation fused (the default) and plain. The first table has the
peak memory at a size that is critical for last stages: micro-batch 8, sequence 2048, hidden 2048, vocabulary
250368 over 4 TP ranks, bf16. With an accelerator the memory is measured; without an accelerator it is counted
tensor by tensor on the meta device. `gradient` is the gradient of the hidden states (16 bits): the fused loss
holds it at its peak, and the plain loss computes it later. Both add the gradient of the weight to
`main_grad`, which is not counted. The second table has the time of the forward and backward pass of a
micro-batch on a CPU at a smaller size; both implementations take turns. `products` is the time of only the
three GEMMs of head and loss, each at full size.

conversion: measures the resident memory of tools/convert_huggingface.py on models with the layer sizes of
Llama 70B. For each depth the benchmark writes a Hugging Face model with hidden size 8192, FFN 28672, 64
heads, 8 groups and 128,256 tokens as bf16 safetensors of about 5 GB each. It converts the model to a
universal checkpoint, and this checkpoint back. The input consists of sparse files of zeros, which take no
space on the disk and are read like all files; the output is complete. The table has the largest sampled
resident memory of each conversion, including mapped file pages and without the page cache. If the peak does
not grow with the depth, the whole model can be converted in this memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.machine import benchmark_parser, describe_machine, peak_bytes_of, times_in_turns
from megatron.cluster.processes import configure_logging
from megatron.config import LoggingConfig
from megatron.model.loss import CrossEntropy
from megatron.mpu.layers import parallel_logits
from megatron.mpu.mesh import Axis
from tests.support.tracked_memory import TrackedMemory

MIB = 2**20
FULL = (8 * 2048, 250368 // 4, 2048)
"""The sizes of the first table: (tokens, vocabulary rows on one rank, hidden size), with BLOOM's vocabulary
on 4 TP ranks."""
TARGET_MIB = 640
"""Maximum memory in MiB that the fused loss may allocate at the sizes `FULL`, without the gradient that it
returns."""
ON_CPU = (1024, 32768, 768)

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "convert_huggingface.py"
HIDDEN, FFN, HEADS, GROUPS, VOCAB = 8192, 28672, 64, 8, 128_256
FILE_BYTES = 5 * 10**9
GB = 1e9

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def main() -> None:
    parser = benchmark_parser(__doc__)
    kinds = parser.add_subparsers(required=True, metavar="{loss,conversion}")
    loss = kinds.add_parser("loss", help="head and loss, fused and plain")
    loss.add_argument("--tokens", type=int, help=f"tokens of the timed size (default on a CPU: {ON_CPU[0]})")
    loss.add_argument("--vocab", type=int, help=f"rows of the weight on one rank (default: {ON_CPU[1]})")
    loss.add_argument("--hidden", type=int, help=f"hidden size (default: {ON_CPU[2]})")
    loss.add_argument("--rounds", type=int, default=7, help="number of timed turns (default: 7)")
    loss.set_defaults(measure=measure_loss)
    conversion = kinds.add_parser("conversion", help="conversions from and to Hugging Face")
    conversion.add_argument(
        "--folder", required=True, help="folder for the files, which are deleted afterwards"
    )
    conversion.add_argument(
        "--layers", type=int, nargs="+", default=[2, 4], help="numbers of layers (default: 2 4)"
    )
    conversion.set_defaults(measure=measure_conversions)
    arguments = parser.parse_args()
    arguments.measure(arguments)


# --- Head and loss ---


def measure_loss(arguments: argparse.Namespace) -> None:
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
    size: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], None]]:
    """Returns value of --loss-implementation -> function that runs the forward and backward pass of head and
    loss."""
    tokens, vocab, width = size
    hidden = torch.randn(1, tokens, width, device=device).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocab, width, device=device)).to(dtype).requires_grad_()
    weight.main_grad = torch.zeros(vocab, width, device=device)
    labels = (torch.randint(0, vocab, (1, tokens), device=device), torch.ones(1, tokens, device=device))
    loss = CrossEntropy(Axis("tp"), vocab)

    # A step frees all memory that it has allocated, so that the peak of the next step includes all
    # allocations.
    def fused() -> None:
        loss.from_hidden(hidden, weight, labels).backward()
        hidden.grad = None

    def plain() -> None:
        loss(parallel_logits(hidden, weight, Axis("tp")).float(), labels).backward()
        weight.main_grad.add_(weight.grad)
        hidden.grad = weight.grad = None

    return {"fused": fused, "plain": plain}


def peak_mib(step: Callable[[], None], device: torch.device) -> float:
    """Returns the peak memory of the step minus the memory in use before it, in MiB."""
    if device.type == "cuda":
        step()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    with TrackedMemory() as tracked:
        step()
    return tracked.peak / MIB


def print_memory(size: tuple[int, int, int], device: torch.device) -> None:
    tokens, vocab, width = size
    print(f"\n{tokens} tokens, {vocab} rows of the vocabulary, hidden {width}, bf16, on {device.type}")
    print(f"{'':6} {'peak, MiB':>10} {'gradient':>10} {'rest':>8} {'target':>8}")
    for name, step in make_steps(size, torch.bfloat16, device).items():
        peak = peak_mib(step, device)
        gradient = tokens * width * 2 / MIB if name == "fused" else 0.0
        target = f"<= {TARGET_MIB}" if name == "fused" else ""
        print(f"{name:6} {peak:10.0f} {gradient:10.0f} {peak - gradient:8.0f} {target:>8}")


def print_times(size: tuple[int, int, int], dtype: torch.dtype, device: torch.device, rounds: int) -> None:
    tokens, vocab, width = size
    left, right, between = (
        torch.randn(shape, device=device).to(dtype)
        for shape in ((tokens, width), (vocab, width), (tokens, vocab))
    )

    def products() -> None:
        torch.mm(left, right.t())
        torch.mm(between, right)
        torch.mm(between.t(), left)

    works = {**make_steps(size, dtype, device), "products": products}
    times = times_in_turns(works, rounds)
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"\n{tokens} tokens, {vocab} rows, hidden {width}, {str(dtype).split('.')[-1]}, on {device.type}")
    print(f"{'':8} {'ms':>8} {'of plain':>9} {'of products':>12}")
    for name, seconds in median.items():
        print(
            f"{name:8} {seconds * 1e3:8.1f} {seconds / median['plain']:9.2f} "
            f"{seconds / median['products']:12.2f}"
        )


# --- Conversions ---


def write_model(folder: Path, layers: int) -> int:
    """Writes a Hugging Face model to the folder; returns the bytes of its weights."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    with torch.device("meta"):
        weights = LlamaForCausalLM(LlamaConfig(**CONFIG, num_hidden_layers=layers)).bfloat16().state_dict()
    shards = split_torch_state_dict_into_shards(weights, max_shard_size=FILE_BYTES)
    for file, names in shards.filename_to_tensors.items():
        header, end = {}, 0
        for name in names:
            start, end = end, end + weights[name].nbytes
            header[name] = {"dtype": "BF16", "shape": weights[name].shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return shards.metadata["total_size"]


def convert(*flags: str) -> tuple[float, float]:
    """Runs the conversion tool. Returns its peak memory in GB, and its seconds."""
    started = time.monotonic()
    peak = peak_bytes_of([sys.executable, str(TOOL), *flags], stdout=subprocess.DEVNULL)
    return peak / GB, time.monotonic() - started


def measure_conversions(arguments: argparse.Namespace) -> None:
    """Converts models, and prints a row for each depth and direction."""
    print("| layers | direction | bf16 GB | peak GB | seconds |\n|---|---|---|---|---|")
    for layers in arguments.layers:
        folder = Path(arguments.folder) / f"conversion-{layers}"
        try:
            size = write_model(folder / "theirs", layers) / GB
            there, back = str(folder / "theirs"), str(folder / "ours")
            to_universal = convert("--from", there, "--to", back, "--vocab-size", str(VOCAB))
            shutil.rmtree(there)
            to_hugging_face = convert("--from", back, "--to", str(folder / "again"), "--no-tokenizer")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for direction, (peak, seconds) in (("import", to_universal), ("export", to_hugging_face)):
            print(f"| {layers} | {direction} | {size:.1f} | {peak:.2f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
