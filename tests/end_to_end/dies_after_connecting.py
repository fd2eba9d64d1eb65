"""pretrain_gpt.py that is killed after all processes have connected, and before the process group exists."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.cluster import processes  # noqa: E402


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    processes.init_distributed = die
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
