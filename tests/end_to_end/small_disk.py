"""pretrain_gpt.py on file systems with $FREE_BYTES bytes free for users, and more for root."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def statvfs(path: str) -> SimpleNamespace:
    """Returns the figures of a file system that keeps half of its free space for root."""
    free = int(os.environ["FREE_BYTES"])
    real = original(path)
    return SimpleNamespace(
        f_frsize=1, f_bsize=4096, f_bavail=free, f_bfree=2 * free, f_blocks=4 * free + 1, f_flag=real.f_flag
    )


original = os.statvfs

if __name__ == "__main__":
    os.statvfs = statvfs
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
