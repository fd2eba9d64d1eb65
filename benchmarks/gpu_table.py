#!/usr/bin/env python3
"""Prints the figures in the logs of gpu.sh as tables: throughput, kernels, losses of one run on many devices.

    python benchmarks/gpu_table.py runs/gpu

A part that did not run, or failed before it printed figures, has no rows. `difference` is the largest
relative difference between the losses of a run and the losses of `nccl` at equal steps. The losses of steps
that `nccl` did not reach are compared with `cpu`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from megatron.planner.sweep.run_log import parse_steps

# Runs of the trainer with one model and equal data.
_RUNS = ("nccl", "resumed", "cpu", "bf16", "adam-8bit")


def main() -> None:
    folder = Path(sys.argv[1])
    logs = {path.stem: path.read_text().splitlines() for path in sorted(folder.glob("*.log"))}
    for title, lines in (
        ("Throughput", throughput(logs)),
        ("Kernels", kernels(logs)),
        ("Losses", losses(logs)),
    ):
        if lines:
            print(f"\n## {title}\n\n```")
            print("\n".join(lines))
            print("```")


def throughput(logs: dict[str, list[str]]) -> list[str]:
    """Returns the rows of throughput.py, under one line of column heads."""
    found: list[str] = []
    for part, lines in logs.items():
        rows = _after(lines, lambda line: "tokens/s" in line and "TFLOP/s" in line)
        found += [*([] if found else rows[:1]), *(f"{row}   ({part})" for row in rows[1:])]
    return found


def kernels(logs: dict[str, list[str]]) -> list[str]:
    """Returns the table of kernel_speed.py."""
    return _after(logs.get("kernels", []), lambda line: line.startswith("kernel ") and "difference" in line)


def losses(logs: dict[str, list[str]]) -> list[str]:
    """Returns a line per run of the trainer: its steps, first and last loss, and the difference from
    `nccl`."""
    runs: dict[str, dict[int, float]] = {}
    for part in _RUNS:
        logged = parse_steps("\n".join(logs.get(part, [])))
        runs[part] = {step["iteration"]: step["loss"] for step in logged if step["loss"] is not None}
    # `resumed` continues where `nccl` has stopped.
    expected = {**runs.get("cpu", {}), **runs.get("nccl", {})}
    found = []
    for part, steps in runs.items():
        if steps:
            first, last = min(steps), max(steps)
            both = [abs(loss / expected[step] - 1) for step, loss in steps.items() if step in expected]
            difference = f"{max(both):.1e}" if both else "-"
            found.append(
                f"{part:10} iterations {first:>2} to {last:>2}   loss {steps[first]:.6f} to "
                f"{steps[last]:.6f}   difference {difference}"
            )
    return found


def _after(lines: list[str], is_head: Callable[[str], bool]) -> list[str]:
    """Returns the line of column heads and all lines after it; none without such a line."""
    start = next((index for index, line in enumerate(lines) if is_head(line)), len(lines))
    return lines[start:]


if __name__ == "__main__":
    main()
