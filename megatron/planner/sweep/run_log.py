"""The result of a run, from its console output and exit code."""

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
# status -> what its reason contains, in the order in which they are tried.
_STATUS = {
    "hang": re.compile(r"error: hang: "),
    "killed": re.compile(r"killed \(SIG|ended at once: killed"),
    "out of memory": re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE),
}
_MAX_REASON = 600


def parse_memory_rows(log: str) -> list[dict[str, Any]]:
    """The rows of the memory table of `training.startup_report`: stage, name of the memory, least and most
    bytes, rank of the most."""
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
    """One entry per training line: iteration, loss (None if the step was skipped), grad_norm, seconds."""
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
    """Seconds of the step. The throughput has more digits than the time, if it is above 10 samples/s."""
    rate, batch = float(line.get("samples_per_second", 0)), line.get("global_batch_size")
    if rate >= 10 and batch is not None:
        return float(batch) / rate
    seconds = line.get("seconds_per_iteration")
    return None if seconds is None else float(seconds)


def step_seconds(steps: list[dict[str, Any]], wanted: int) -> float | None:
    """Median seconds of the second half of `wanted` steps, the larger half; None if none was logged."""
    last = sorted(step["iteration"] for step in steps)[-((wanted + 1) // 2) :]
    seconds = [step["seconds"] for step in steps if step["iteration"] in last and step["seconds"]]
    return statistics.median(seconds) if seconds else None


def read_result(row: Row, repeat: int, log: str, exit_code: int, steps: int) -> dict[str, Any]:
    """The result of a run as docs/sweep.md describes it, without its times and its machine."""
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
    """The mean idle share of the pipeline ranks, the median over the second half of the steps. None if it was
    not logged."""
    shares = [[parse_number(share) for share in line.split()] for line in _BUBBLE.findall(log)]
    means = [
        sum(share or 0 for share in ranks) / len(ranks) / 100
        for ranks in shares
        if ranks and None not in ranks
    ]
    return statistics.median(means[-((steps + 1) // 2) :]) if means else None


def failure(log: str, exit_code: int) -> tuple[str, str]:
    """Status and reason of a run that failed: its last error sentence, otherwise its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    reason = (errors or lines or [f"the run ended with exit code {exit_code} and printed nothing"])[-1]
    status = next((name for name, words in _STATUS.items() if words.search(reason)), "failed")
    return status, _ERROR.sub("", reason)[:_MAX_REASON] if status != "hang" else reason[:_MAX_REASON]
