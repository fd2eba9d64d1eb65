"""Reads the result of a run from its console output and exit code."""

from __future__ import annotations

import re
import statistics
from typing import Any

from megatron.planner.sweep.axes import Row
from megatron.training.log_lines import parse_log_line, parse_number
from megatron.units import GIB

_MEMORY_ROW = re.compile(r"^\s+(?:stage|pipeline rank)\s+(\d{1,9}) \| (.*)$")
_MEMORY = re.compile(r"(\w[\w ]*?)\s+(\d+\.?\d*) to\s+(\d+\.?\d*) \(rank (\d{1,9})\)")
_BUBBLE = re.compile(r"^bubble, % of the passes' time per pipeline rank: ([\d. -]+)$", re.MULTILINE)
_ERROR = re.compile(r"^(?:rank \d+ on \S+: )?error: ")
# Status of a failed run -> pattern of its reason. The first pattern that matches decides.
_STATUS = {
    "hang": re.compile(r"error: hang: "),
    "killed": re.compile(r"killed \(SIG|ended at once: killed"),
    "out of memory": re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE),
}
_MAX_REASON = 600


def parse_memory_rows(log: str) -> list[dict[str, Any]]:
    """Returns the entries of the memory table that `training.startup_report` prints: stage, kind of memory,
    the smallest and the largest number of bytes of its ranks, and the rank with the largest."""
    return [
        {
            "stage": int(row[1]),
            "name": name,
            "least_bytes": float(least) * GIB,
            "most_bytes": float(most) * GIB,
            "rank": int(rank),
        }
        for line in log.splitlines()
        if (row := _MEMORY_ROW.match(line))
        for name, least, most, rank in _MEMORY.findall(row[2])
    ]


def parse_steps(log: str) -> list[dict[str, Any]]:
    """Returns an entry for each training line: iteration, loss (None in a skipped step), grad_norm,
    seconds."""
    found: dict[int, dict[str, Any]] = {}
    for text in log.splitlines():
        line = parse_log_line(text)
        if line is None or line["kind"] != "training":
            continue
        iteration = int(line["iteration"])
        found[iteration] = {
            "iteration": iteration,
            "loss": line.get("lm_loss"),
            "grad_norm": line.get("grad_norm"),
            "seconds": _seconds(line),
        }
    return [found[iteration] for iteration in sorted(found)]


def _seconds(line: dict[str, Any]) -> float | None:
    """Returns the seconds of a step. Above 10 samples/s they are computed from the throughput, which is then
    logged with more digits than the time."""
    rate, batch = float(line.get("samples_per_second", 0)), line.get("global_batch_size")
    if rate >= 10 and batch is not None:
        return float(batch) / rate
    seconds = line.get("seconds_per_iteration")
    return None if seconds is None else float(seconds)


def step_seconds(steps: list[dict[str, Any]], wanted: int) -> float | None:
    """Returns the median seconds of the second half of `wanted` steps (of 5 steps, the last 3); None if none
    of these steps was logged."""
    last = sorted(step["iteration"] for step in steps)[-((wanted + 1) // 2) :]
    seconds = [step["seconds"] for step in steps if step["iteration"] in last and step["seconds"]]
    return statistics.median(seconds) if seconds else None


def read_result(row: Row, repeat: int, log: str, exit_code: int, steps: int) -> dict[str, Any]:
    """Returns the result of a run (docs/sweep.md) without the fields on its start, duration and machine."""
    logged = parse_steps(log)
    status, reason = "ok", None
    if exit_code != 0:
        status, reason = failure(log, exit_code)
    elif len(logged) < steps:
        status, reason = "failed", f"the run ended after {len(logged)} of {steps} steps: see its log"
    seconds = step_seconds(logged, steps) if status == "ok" else None
    return {
        "row": row.index,
        "repeat": repeat,
        "settings": row.settings,
        "status": status,
        "reason": reason,
        "exit_code": exit_code,
        "steps": logged,
        "step_s": seconds,
        "tokens_per_s": row.tokens_per_step / seconds if seconds else None,
        "memory": parse_memory_rows(log),
        "bubble": parse_bubble(log, steps),
    }


def parse_bubble(log: str, steps: int) -> float | None:
    """Returns the mean idle fraction of the pipeline ranks: the median over the second half of the steps.
    Returns None if it was not logged."""
    shares = [[parse_number(share) for share in line.split()] for line in _BUBBLE.findall(log)]
    means = [
        sum(share or 0 for share in ranks) / len(ranks) / 100
        for ranks in shares
        if ranks and None not in ranks
    ]
    return statistics.median(means[-((steps + 1) // 2) :]) if means else None


def failure(log: str, exit_code: int) -> tuple[str, str]:
    """Returns the status and the reason of a failed run. The reason is its last error message, or else its
    last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    reason = (errors or lines or [f"the run ended with exit code {exit_code} and printed nothing"])[-1]
    status = next((name for name, words in _STATUS.items() if words.search(reason)), "failed")
    return status, _ERROR.sub("", reason)[:_MAX_REASON] if status != "hang" else reason[:_MAX_REASON]
