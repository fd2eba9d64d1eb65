"""tools/evaluate.py on a host with fewer devices than ranks: rank 1 has no device."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.cluster import devices  # noqa: E402
from megatron.cluster.devices import device_index  # noqa: E402
from megatron.commands import evaluate  # noqa: E402


def index_among_few(local_rank: int, *_: object) -> int:
    return device_index(local_rank and 2, 2)


if __name__ == "__main__":
    devices.device_index = index_among_few
    evaluate.PROGRAM = [__file__]  # the other ranks run this file
    evaluate.main()
