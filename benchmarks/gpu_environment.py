#!/usr/bin/env python3
"""Prints versions and settings on which the figures of the benchmarks depend, and the back ends that PyTorch
selects for attention.

    python benchmarks/gpu_environment.py --out FOLDER     adds rows to FOLDER/rows.jsonl

Exits with 1 if this program or a library cannot be imported.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.machine import add_row, benchmark_parser, describe_machine
from megatron.cluster.devices import set_library_defaults
from megatron.cluster.processes import use_exact_products
from megatron.kernels.selection import reason_against_kernels
from megatron.model.attention.self_test import AttentionCase, sdpa_backend
from megatron.mpu.weight_gradient import supports_fused_accumulation

PACKAGES = ("triton", "transformers", "numpy", "bitsandbytes")
# Name -> (sequence length, number of query heads, number of key heads, head size).
SHAPES = {
    "GPT 1.3B": (2048, 16, 16, 128),
    "Llama 1B": (4096, 32, 8, 64),
    "Llama 8B": (4096, 32, 8, 128),
    "heads of 80": (2048, 16, 16, 80),
}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    folder = parser.parse_args().out
    set_library_defaults()
    use_exact_products()
    entries: dict[str, object] = {
        "machine": describe_machine(),
        "Python": platform.python_version(),
        "driver": driver(),
    }
    entries |= {name: installed(name) for name in PACKAGES}
    entries |= settings()
    for name, value in entries.items():
        add_row(folder, "environment", name=name, value=str(value))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for name, shape in SHAPES.items():
        add_row(
            folder,
            "attention back ends",
            shape=name,
            sizes=str(shape),
            sdpa=sdpa_backend(AttentionCase(*shape, dtype), device),
        )


def settings() -> dict[str, object]:
    """Returns settings that change results or speed, and what the Triton launcher needs."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    device, matmul = accelerator.current_device_name(), torch.backends.cuda.matmul
    reason = reason_against_kernels(accelerator.device_name())
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return {
        "accelerator": f"{accelerator.device_name()}, {accelerator.communication_backend_name()}",
        "kernels": reason or "triton",
        "weight gradients into fp32": supports_fused_accumulation(torch.ones(1, device=device).bfloat16()),
        "fp32 products": getattr(matmul, "fp32_precision", "unknown"),  # 'tf32' rounds the inputs
        "bf16 sums within a product": matmul.allow_bf16_reduced_precision_reduction,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "NCCL": torch.cuda.nccl.version() if torch.cuda.is_available() else None,
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "Python.h": header.exists(),
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def driver() -> str:
    """Returns name and memory of the card, and the version of its driver, from nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({type(error).__name__})"


if __name__ == "__main__":
    main()
