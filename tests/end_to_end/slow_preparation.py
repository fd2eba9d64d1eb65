"""pretrain_gpt.py whose rank 0 computes, before it connects, until the file $FINISH_PREPARATION exists.

The other ranks print every 0.5 s that they wait.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.cluster import rendezvous  # noqa: E402
from megatron.training import data  # noqa: E402

compute_report = data.data_report


def slow_report(*arguments: object) -> str:
    while not os.path.exists(os.environ["FINISH_PREPARATION"]):
        sum(range(100_000))
    return compute_report(*arguments)


if __name__ == "__main__":
    rendezvous._REPORT_INTERVAL_S = 0.5
    data.data_report = slow_report
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
