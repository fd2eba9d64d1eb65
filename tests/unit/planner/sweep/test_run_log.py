"""Reads a run's result from its console output."""

from __future__ import annotations

import pytest

from megatron.planner.sweep.run_log import (
    failure,
    parse_bubble,
    parse_memory_rows,
    parse_steps,
    read_result,
    step_seconds,
)
from megatron.training.log_lines import IntervalSummary, format_training_line
from megatron.training.startup_report import format_memory_row
from tests.unit.planner.sweep.made import make_row

ROW = make_row(0, "memory")


def line(iteration: int, seconds: float, loss: float | None = 2.0, batch: int = 8) -> str:
    return format_training_line(
        IntervalSummary(
            iteration, 100, 0, 0, seconds, 1e-3, batch, None, loss, None, 1.5, 0, 0, batch / seconds, 0.0, 1.0
        )
    )


def test_steps_are_read_with_all_digits_of_their_time() -> None:
    found = parse_steps("\n".join(["words", line(1, 0.0123456), line(2, 12.34, loss=None)]))
    assert [step["iteration"] for step in found] == [1, 2]
    assert found[0]["seconds"] == pytest.approx(0.0123456, rel=1e-5)
    assert found[1]["seconds"] == 12.34
    assert (found[0]["loss"], found[1]["loss"], found[0]["grad_norm"]) == (2.0, None, 1.5)


def test_the_larger_second_half_of_the_steps_is_measured() -> None:
    steps = [{"iteration": i, "seconds": s} for i, s in enumerate([9.0, 9.0, 1.0, 2.0, 3.0], start=1)]
    assert step_seconds(steps, 5) == 2.0
    assert step_seconds(steps[:1], 1) == 9.0
    assert step_seconds([], 5) is None


@pytest.mark.parametrize("what", ["stage", "pipeline rank"])
def test_the_memory_table_is_read(what: str) -> None:
    by_rank = {
        0: {"allocated": 2**30, "peak allocated": 3 * 2**29},
        5: {"allocated": 2**29, "peak allocated": 2**31},
    }
    found = parse_memory_rows(f"memory, GiB\n  {what}   7 | {format_memory_row(by_rank)}\nother | text")
    assert found == [
        {"stage": 7, "name": "allocated", "least_bytes": 2**29, "most_bytes": 2**30, "rank": 0},
        {"stage": 7, "name": "peak allocated", "least_bytes": 3 * 2**29, "most_bytes": 2**31, "rank": 5},
    ]


@pytest.mark.parametrize(
    ("log", "status", "reason"),
    [
        (
            "error: --lr is 'x': expected a number\nTraceback of the launcher",
            "failed",
            "--lr is 'x': expected a number",
        ),
        (
            "error: rank 3 on n1, stage 1 (pid 7), after iteration 2: out of memory: tried to allocate",
            "out of memory",
            "rank 3 on n1, stage 1 (pid 7), after iteration 2: out of memory: tried to allocate",
        ),
        (
            "rank 0 on n1: error: torch.OutOfMemoryError: CUDA out of memory.",
            "out of memory",
            "torch.OutOfMemoryError: CUDA out of memory.",
        ),
        ("error: hang: rank 1 does not answer", "hang", "error: hang: rank 1 does not answer"),
        (
            "error: rank 1 on n1: killed (SIGKILL), possibly by the kernel's out-of-memory killer",
            "killed",
            "rank 1 on n1: killed (SIGKILL), possibly by the kernel's out-of-memory killer",
        ),
        ("some words\n\nthe last line\n", "failed", "the last line"),
        ("", "failed", "the run ended with exit code 1 and printed nothing"),
    ],
)
def test_a_failure_has_a_status_and_the_last_sentence_of_the_run(log: str, status: str, reason: str) -> None:
    assert failure(log, 1) == (status, reason)


def test_the_bubble_is_the_mean_of_the_ranks_in_the_second_half() -> None:
    """The lines have the format of `bubble_line`. The runs in tests/end_to_end/test_sweep.py print such
    lines."""
    line = "bubble, % of the passes' time per pipeline rank:"
    log = "\n".join([f"{line} 90.0 90.0", "other", f"{line} 10.0 30.0", f"{line} 20.0 40.0"])
    assert parse_bubble(log, 3) == pytest.approx(0.25)
    assert parse_bubble("other", 3) is None


def test_a_run_that_worked_has_times_and_losses_and_one_that_ends_early_is_not_measured() -> None:
    log = [line(i, 0.5 * i, loss=1.0 * i) for i in (1, 2, 3, 4)]
    result = read_result(ROW, 2, "\n".join(log), 0, 4)
    assert (result["row"], result["repeat"], result["status"]) == (0, 2, "ok")
    assert result["step_s"] == pytest.approx(1.75) and result["tokens_per_s"] == pytest.approx(1000 / 1.75)
    assert [step["loss"] for step in result["steps"]] == [1.0, 2.0, 3.0, 4.0]
    early = read_result(ROW, 1, "\n".join(log[:2]), 0, 4)
    assert early["status"] == "failed" and early["step_s"] is None
    assert early["reason"] == "the run ended after 2 of 4 steps: see its log"
