#!/usr/bin/env python3
"""Prints the rows of gpu.sh as Markdown tables, for benchmarks/RESULTS.md.

    python benchmarks/gpu_table.py runs/gpu

A phase that did not run has no rows, and a phase that was killed has some of its rows. The tables have the
planner's figures beside the measured figures. `/ compiled` is the speed divided by the speed of the compiled
plain loop with an equal micro-batch. Targets are checked only on a card whose peak rate is known. The MFU
uses Megatron-LM's FLOPs (docs/performance.md).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import read_rows

MAX_MEMORY_ERROR = 0.03
"""Target: maximum relative error of the planned peak memory."""
# Tables that are printed as they are. `throughput` combines all other tables.
TABLES = (
    *("phases", "losses", "kernels", "kernel times", "attention times", "attention back ends", "tiles"),
    *("expert layers", "environment"),
)

Row = dict[str, Any]


def main() -> None:
    folder = Path(sys.argv[1])
    machine = [
        row["value"] for row in read_rows(folder, "environment") if row["name"] in ("machine", "driver")
    ]
    print("; ".join(machine))
    tables = {name: read_rows(folder, name) for name in TABLES}
    tables = {"throughput": throughput(read_rows(folder, "throughput"), read_rows(folder, "plans")), **tables}
    for name, rows in tables.items():
        if rows:
            print(f"\n### {name.capitalize()}\n\n{markdown(rows)}")


def throughput(rows: list[Row], plans: list[Row]) -> list[Row]:
    """Returns a row for each measurement (the last row if it was repeated), with plan, comparison and
    targets."""
    last = {key_of(row): row for row in rows}
    planned = {key_of(row): row for row in plans}
    compiled = {
        (row["model"], row["micro_batch"]): row["tokens_per_s"]
        for row in last.values()
        if row["implementation"] == "plain-compile" and "error" not in row
    }
    found = []
    for key, row in last.items():
        shown: Row = dict(zip(("model", "implementation", "micro-batch"), key, strict=True))
        found.append(shown)
        if "error" in row:
            shown["verdict"] = f"no result: {row['error']}"
            continue
        plan = planned.get(key, {})
        ours = row["implementation"].startswith("ours")
        compiled_speed = compiled.get((row["model"], row["micro_batch"])) if ours else None
        shown |= {
            "tokens/s": row["tokens_per_s"],
            "planned tokens/s": plan.get("tokens_per_s"),
            "/ compiled": ratio(row["tokens_per_s"], compiled_speed),
            "TFLOP/s": row["tflops"],
            "Megatron-LM's MFU, %": percent(row["mfu"]),
            "planned MFU, %": percent(plan.get("mfu")),
            "PaLM's MFU, %": percent(row["mfu_palm"]),
            "causal, %": percent(row["mfu_causal"]),
            "peak GiB": row["peak_gib"],
            "planned GiB": plan.get("peak_gib"),
            "busy, %": percent(row.get("busy")),
            "verdict": "; ".join(targets(row, plan, compiled_speed)) if row["mfu"] else None,
        }
    return found


def key_of(row: Row) -> tuple[str, str, int]:
    return row["model"], row["implementation"], row["micro_batch"]


def targets(row: Row, plan: Row, compiled_speed: float | None) -> list[str]:
    """Returns a text for each target of a row."""
    found = []

    def judge(met: bool, text: str) -> None:
        found.append(text if met else f"MISSED: {text}")

    if least := row["min_tokens_per_s"]:
        judge(row["tokens_per_s"] >= least, f"tokens/s >= {least:,.0f}")
    if least := row["min_mfu"]:
        judge(row["mfu"] >= least, f"Megatron-LM's MFU >= {least:.0%}")
    if problem := row.get("profile_error"):
        judge(False, f"profile ({problem})")
    if compiled_speed and row["implementation"] in ("ours", "ours-compile"):
        judge(row["tokens_per_s"] >= compiled_speed, "not slower than the compiled loop")
    if plan:
        error = abs(row["peak_gib"] / plan["peak_gib"] - 1)
        judge(error <= MAX_MEMORY_ERROR, f"memory within {MAX_MEMORY_ERROR:.0%} of the plan")
    return found


def ratio(measured: float, other: float | None) -> float | None:
    return None if other is None else round(measured / other, 3)


def percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)


def markdown(rows: list[Row]) -> str:
    """Returns a table with a column for each name in the rows, in the order of their first appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    columns.sort(key=lambda name: name == "verdict")  # the sort is stable; the verdict comes last
    lines = [columns, ["---"] * len(columns)]
    lines += [[cell(row.get(name)) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "/").replace("\n", "; ")


if __name__ == "__main__":
    main()
