"""All that a sweep has found, as one JSON object: the source of the table, the files and the picture.

docs/sweep.md describes the object.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.sweep.folder import FORMAT, Record, RecordedRow
from megatron.sweep.losses import check_losses, group_numbers

Results = Mapping[tuple[int, int], dict[str, Any]]
# The memory that is compared with the plan: of PyTorch's allocator, or of the process on a CPU.
_PEAKS = ("peak allocated", "peak resident")


def summarize(record: Record, results: Results) -> dict[str, Any]:
    """The summary of a sweep, finished or not. results: by row and repeat."""
    groups = group_numbers(record.rows)
    rows = [_summary_of(row, record, results, groups.get(row.index)) for row in record.rows]
    _add_ratios(rows)
    agreements = [
        {
            "group": number,
            "rows": found.rows,
            "runs": found.runs,
            "tolerance": found.tolerance,
            "largest_difference": found.largest,
            "agrees": found.agrees,
            "sentence": found.sentence(number),
            "disagreeing": found.disagreeing,
        }
        for number, found in enumerate(check_losses(record.rows, results), start=1)
        if found.runs
    ]
    sweep = {name: value for name, value in vars(record).items() if name not in ("rows", "format")}
    # A sweep may be continued later: after a change of the program, or elsewhere.
    for facts in ("commit", "host"):
        sweep[f"{facts}s"] = sorted({result[facts] for result in results.values() if facts in result})
    return {
        "format": FORMAT,
        "sweep": sweep,
        "axes": axis_flags(record.rows),
        "rows": rows,
        "losses": agreements,
    }


def axis_flags(rows: Sequence[RecordedRow]) -> list[str]:
    """The flags that are varied, in their order."""
    return list(dict.fromkeys(flag for row in rows for flag in row.settings))


def _summary_of(row: RecordedRow, record: Record, results: Results, group: int | None) -> dict[str, Any]:
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


def _measured(row: RecordedRow, runs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The median over the repeats, the fastest and the slowest one; memory of the largest."""
    if not runs:
        return None
    seconds = [float(run["step_s"]) for run in runs]
    median = statistics.median(seconds)
    return {
        "repeats": len(runs),
        "step_s": median,
        "step_s_least": min(seconds),
        "step_s_most": max(seconds),
        "spread": (max(seconds) - min(seconds)) / median,
        "tokens_per_s": row.tokens_per_step / median,
        "loss": runs[-1]["steps"][-1]["loss"],
        "memory_bytes": peak_memory(runs),
        "bubble": _median([run["bubble"] for run in runs if run.get("bubble") is not None]),
    }


def peak_memory(runs: Sequence[dict[str, Any]]) -> list[float] | None:
    """Per pipeline rank, the largest peak of its ranks and of the runs, in bytes. None if it was not
    logged."""
    largest: dict[int, float] = {}
    for run in runs:
        for entry in run["memory"]:
            if entry["name"] in _PEAKS:
                largest[entry["stage"]] = max(largest.get(entry["stage"], 0.0), entry["most_bytes"])
    return [largest[stage] for stage in sorted(largest)] or None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _add_ratios(rows: list[dict[str, Any]]) -> None:
    """Adds the time relative to the first measured row of the same group: other groups do other work."""
    first: dict[int, float] = {}
    for row in rows:
        if row["measured"]:
            measured = row["measured"]
            measured["ratio"] = measured["step_s"] / first.setdefault(row["group"], measured["step_s"])
