"""pretrain_gpt.py whose processes see one device each, as with srun --gpus-per-task=1.

A device index above 0 is an error, like CUDA's "invalid device ordinal".
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from deepspeed.accelerator import get_accelerator

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def set_device(index: int) -> None:
    if index >= 1:
        raise RuntimeError(f"invalid device ordinal {index}")


if __name__ == "__main__":
    accelerator = get_accelerator()
    accelerator.device_count, accelerator.set_device = (lambda: 1), set_device
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
