"""Tests that no complete checkpoint is lost when a process dies at any time during a save.

    .venv/bin/python benchmarks/kills.py              # 200 kills: 10 minutes
    .venv/bin/python benchmarks/kills.py --kills 20
    .venv/bin/python benchmarks/kills.py --async-save --kills 50
    .venv/bin/python benchmarks/kills.py --local-save --kills 50

A tiny model trains on two data-parallel ranks with ZeRO-1 and saves after every step. Repeatedly, a random
rank is killed at a random time during a save, and the run is launched again. Each launch must find a
checkpoint at least as new as the last checkpoint that was reported as saved, verify it on loading, and
reproduce the losses of an uninterrupted run to the last bit. The exit code is 1 at the first failure.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.machine import benchmark_parser, describe_machine
from tests.support.kills import run_kill_test


def main() -> None:
    """Prints the result; exits with 1 if a resume failed."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--async-save", action="store_true", help="save in the background, kill writers too")
    parser.add_argument(
        "--local-save",
        action="store_true",
        help="two of three saves are local, and one of the two nodes loses its disk before each start",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random times (default: 0)")
    arguments = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_kill_test(
            Path(folder), arguments.kills, arguments.seed, arguments.async_save, arguments.local_save
        )
    print(
        f"{outcome.kills} kills, {outcome.unfinished} of them with an unfinished save; "
        f"{outcome.starts} launches, {outcome.good_resumes} good resumes over {outcome.steps} steps, "
        f"{outcome.seconds:.0f} s"
    )
    for fault in outcome.failures:
        print(f"FAULT: {fault}")
    sys.exit(1 if outcome.failures else 0)


if __name__ == "__main__":
    main()
