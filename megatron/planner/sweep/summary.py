"""Summarizes a sweep as one JSON object. The table, the files and the plot are made from it.

docs/sweep.md describes the object.

Layout, partition, schedule, micro-batch size and recomputation do not change the losses
(docs/equal_losses.md). Rows that differ only in these settings therefore form a group, and their losses are
compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.planner.sweep.axes import Row
from megatron.planner.sweep.folder import FORMAT, Record

Results = Mapping[tuple[int, int], dict[str, Any]]
# Kinds of logged memory that are shown beside the plan: of PyTorch's allocator, or of a process on a CPU.
_PROCESS_PEAK = "peak resident"
_PEAKS = ("peak allocated", _PROCESS_PEAK)


def summarize(record: Record, results: Results) -> dict[str, Any]:
    """Returns the summary of a sweep, which may be unfinished. results: (row, repeat) -> result of the
    run."""
    groups = group_numbers(record.rows)
    rows = [_summary_of(row, record, results, groups.get(row.index)) for row in record.rows]
    _add_ratios(rows)
    times = [_compare_times(group, rows) for group in sorted(set(groups.values()))]
    losses = [found for found in check_losses(record.rows, results) if found["runs"]]
    sweep = {name: value for name, value in vars(record).items() if name not in ("rows", "format")}
    # A sweep may have been continued with a different commit, or on a different host.
    for key in ("commit", "host"):
        sweep[f"{key}s"] = sorted({result[key] for result in results.values() if key in result})
    return {
        "format": FORMAT,
        "sweep": sweep,
        "axes": list(dict.fromkeys(flag for row in record.rows for flag in row.settings)),
        "rows": rows,
        "times": [found for found in times if found is not None],
        "losses": losses,
    }


def _summary_of(row: Row, record: Record, results: Results, group: int | None) -> dict[str, Any]:
    runs = [result for (index, _), result in sorted(results.items()) if index == row.index]
    good = [run for run in runs if run["status"] == "ok"]
    bad = [run for run in runs if run["status"] != "ok"]
    if row.refused is not None:
        status, reason = "refused", row.refused
    elif bad:
        status, reason = bad[-1]["status"], bad[-1]["reason"]
    elif len(good) >= record.repeat:
        status, reason = "ok", None
    else:
        status, reason = "pending", f"{len(good)} of {record.repeat} runs are done"
    return {
        "row": row.index,
        "settings": row.settings,
        "label": row.label,
        "processes": row.processes,
        "group": group,
        "status": status,
        "reason": reason,
        "predicted": row.predicted,
        "measured": _measured(row, good),
    }


def _measured(row: Row, runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the measured values of a row: median, fastest and slowest repeat, and the largest memory of all
    repeats. Returns None if the row has no run."""
    if not runs:
        return None
    seconds = [float(run["step_s"]) for run in runs]
    median = statistics.median(seconds)
    bubbles = [run["bubble"] for run in runs if run.get("bubble") is not None]
    return {
        "repeats": len(runs),
        "step_s": median,
        "step_s_least": min(seconds),
        "step_s_most": max(seconds),
        "spread": (max(seconds) - min(seconds)) / median,
        "tokens_per_s": row.tokens_per_step / median,
        "loss": runs[-1]["steps"][-1]["loss"],
        "memory_bytes": peak_memory(runs),
        "is_process_memory": any(entry["name"] == _PROCESS_PEAK for run in runs for entry in run["memory"]),
        "bubble": statistics.median(bubbles) if bubbles else None,
    }


def peak_memory(runs: Sequence[dict[str, Any]]) -> list[float] | None:
    """Returns for each pipeline rank the largest peak of its devices in all runs, in bytes; None if it was
    not logged."""
    largest: dict[int, float] = {}
    for run in runs:
        for entry in run["memory"]:
            if entry["name"] in _PEAKS:
                largest[entry["stage"]] = max(largest.get(entry["stage"], 0.0), entry["most_bytes"])
    return [largest[stage] for stage in sorted(largest)] or None


def _add_ratios(rows: list[dict[str, Any]]) -> None:
    """Adds to each row its time relative to the first measured row of its group. Rows of different groups are
    not compared, because their work differs."""
    first: dict[int, float] = {}
    for row in rows:
        if row["measured"]:
            measured = row["measured"]
            measured["ratio"] = measured["step_s"] / first.setdefault(row["group"], measured["step_s"])


def _compare_times(group: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the group's fastest row, and the rows whose times differ from it by no more than the spread of
    their own repeats or of the fastest row's. Returns None for fewer than two measured rows."""
    measured = {row["row"]: row["measured"] for row in rows if row["group"] == group and row["measured"]}
    if len(measured) < 2:
        return None
    fastest = min(measured, key=lambda row: measured[row]["step_s"])
    best = measured[fastest]
    near = [
        row
        for row, one in measured.items()
        if row != fastest and one["step_s"] / best["step_s"] - 1 <= max(one["spread"], best["spread"])
    ]
    sentence = f"fastest of group {group}: row {fastest} ({best['step_s']:.4g} s per step)"
    if all(one["repeats"] < 2 for one in measured.values()):
        sentence += (
            "; with one run per row the spread is not known: --repeat 3 shows which differences are real"
        )
    elif near:
        numbers = f"row{'s' * (len(near) > 1)} {', '.join(map(str, near))}"
        sentence += f"; the difference to {numbers} is below the spread of the repeats, so it may be noise"
    return {
        "group": group,
        "rows": list(measured),
        "fastest": fastest,
        "within_spread": near,
        "sentence": sentence,
    }


def check_losses(rows: Sequence[Row], results: Results) -> list[dict[str, Any]]:
    """Compares the losses of all runs of each group step by step, including repeats, and failed runs up to
    their end. Returns the objects of `losses` in docs/sweep.md, one for each group."""
    numbers = group_numbers(rows)
    groups = (
        [row for row in rows if numbers.get(row.index) == group] for group in sorted(set(numbers.values()))
    )
    return [_compare(number, group, results) for number, group in enumerate(groups, start=1)]


def group_numbers(rows: Sequence[Row]) -> dict[int, int]:
    """Returns row -> number of its group, from 1 in the order of the rows. Rows with an invalid configuration
    have no group."""
    numbers: dict[str, int] = {}
    for row in rows:
        if row.refused is None:
            numbers.setdefault(row.numbers, len(numbers) + 1)
    return {row.index: numbers[row.numbers] for row in rows if row.refused is None}


def _compare(number: int, group: Sequence[Row], results: Results) -> dict[str, Any]:
    """Returns the comparison of a group's losses. In it, `rows` are the compared rows, `largest_difference`
    is the largest relative difference of losses at one step, and `disagreeing` has a sentence for each run
    whose losses differ by more than the tolerance."""
    indices = {row.index for row in group}
    curves = {
        key: {step["iteration"]: float(step["loss"]) for step in result["steps"] if step["loss"] is not None}
        for key, result in sorted(results.items())
        if key[0] in indices
    }
    curves = {key: curve for key, curve in curves.items() if curve}
    # All rows of a group have the same precision, and therefore the same tolerance.
    tolerance = max(row.tolerance for row in group)
    largest, first_difference = 0.0, dict[tuple[int, int], str]()
    for step in sorted({step for curve in curves.values() for step in curve}):
        losses = {key: curve[step] for key, curve in curves.items() if step in curve}
        reference = statistics.median_low(losses.values())
        typical = next(key for key, loss in losses.items() if loss == reference or math.isnan(reference))
        largest = max(largest, _difference(min(losses.values()), max(losses.values())))
        for key, loss in losses.items():
            difference = _difference(loss, reference)
            largest = max(largest, difference)
            if difference > tolerance and key not in first_difference:
                first_difference[key] = (
                    f"row {key[0]}, repeat {key[1]} has loss {loss:.6g} at step {step}, row {typical[0]}, "
                    f"repeat {typical[1]} has {reference:.6g}: relative difference {difference:.1e}"
                )
    compared, disagreeing = sorted({row for row, _ in curves}), list(first_difference.values())
    what = f"losses of group {number} (rows {', '.join(map(str, compared))}; {len(curves)} runs)"
    found = f"largest relative difference {largest:.1e}, allowed {tolerance:.1e}"
    if len(curves) < 2:
        sentence = f"{what}: one run, nothing to compare"
    else:
        sentence = f"{what} {'DISAGREE' if disagreeing else 'agree'}: {found}"
    return {
        "group": number,
        "rows": compared,
        "runs": len(curves),
        "tolerance": tolerance,
        "largest_difference": largest,
        "agrees": not disagreeing,
        "sentence": sentence,
        "disagreeing": disagreeing,
    }


def _difference(a: float, b: float) -> float:
    """Returns the relative difference of two losses; infinite if only one of them is finite."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) / max(abs(a), abs(b), 1e-30)
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else math.inf
