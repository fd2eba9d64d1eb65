"""pretrain_gpt.py in which rank 1 runs out of device memory in the second step."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.engine.pipeline_engine import GPTEngine  # noqa: E402

train_step, steps = GPTEngine.train_step, []


def failing_step(self, *args, **options):
    steps.append(1)
    if os.environ["RANK"] == "1" and len(steps) == 2:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    return train_step(self, *args, **options)


if __name__ == "__main__":
    GPTEngine.train_step = failing_step
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
