"""Counting and weighting of the errors of published rows, and the command."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.published_programs.report import (
    Prediction,
    accuracy_report,
    kendall_tau,
    order_of_layouts,
    origin_weights,
    weighted_quantile,
)
from benchmarks.published_programs.rows import PublishedRow, SkippedRow, read_rows
from benchmarks.published_programs.steps import StepSeconds

ROOT = Path(__file__).resolve().parents[3]
ASSET = "tests/assets/published_rows.csv"
ROW: PublishedRow = read_rows(ROOT / ASSET)[0][0]


def prediction(source: str, error: float, memory_error: float | None = None, **changes) -> Prediction:
    memory = None if memory_error is None else 100.0
    row = dataclasses.replace(ROW, source=source, seconds=10.0, memory_bytes=memory, **changes)
    step = StepSeconds(pipeline=8.0, optimizer=10 * (1 + error) - 8)
    return Prediction(row, step, memory and memory * (1 + (memory_error or 0.0)))


def test_each_repository_counts_equally() -> None:
    many = [prediction(f"many@1:L{i}", error) for i, error in enumerate((0.1, -0.2, 0.3, -0.4))]
    one = prediction("one@1:L1", 0.5)
    assert origin_weights([*many, one]) == [0.25] * 4 + [1]
    pairs = [
        (abs(each.time_error), weight) for each, weight in zip([*many, one], [0.25] * 4 + [1], strict=True)
    ]
    assert weighted_quantile(pairs, 0.5) == pytest.approx(0.4)
    assert weighted_quantile(pairs, 0.9) == pytest.approx(0.5)
    thirds = [(value, 1 / 3) for value in (1.0, 2.0, 3.0)]
    assert [weighted_quantile(thirds, share) for share in (1 / 3, 0.5, 2 / 3, 0.9)] == [1, 2, 2, 3]


def test_a_line_counts_rows_equally_and_a_total_counts_repositories() -> None:
    many = [prediction(f"many@1:L{i}", error, error / 2) for i, error in enumerate((0.1, -0.2, 0.3, -0.4))]
    one = prediction("one@1:L1", 0.5)
    fitted = prediction("many@1:fitted", 0.01)
    dubious = prediction("one@1:L2", 9.0, is_dubious=True)
    text = accuracy_report(
        [*many, one, fitted, dubious], [SkippedRow("x", "fp8"), SkippedRow("y", "fp8")], {"many@1:fitted"}, 1
    )
    lines = [line.split() for line in text.splitlines()]
    assert ["unseen", "fsdp", "eager", "a100", "5", "30.0", "50.0", "50.0", "0.00", "10.0", "20.0"] in lines
    assert ["fitted", "on", "fsdp", "eager", "a100", "1", "1.0", "1.0", "1.0"] in lines
    assert [
        "unseen",
        "all,",
        "by",
        "repository",
        "all",
        "5",
        "40.0",
        "50.0",
        "50.0",
        "0.00",
        "10.0",
        "20.0",
    ] in lines
    assert ["dubious", "all,", "by", "repository", "all", "1", "900.0", "900.0", "900.0"] in lines
    assert "rows that cannot be predicted: 2\n  2 fp8" in text
    assert text.splitlines()[-1].startswith("+50.0 % fsdp eager") and text.endswith("one@1:L1")


def test_the_order_is_that_of_the_layouts_of_one_problem() -> None:
    def layouts(origin: str, measured: tuple[float, ...], predicted: tuple[float, ...], gpus: int = 32):
        layout = dataclasses.replace(ROW.layout, gpus=gpus)
        rows = [
            dataclasses.replace(ROW, source=f"{origin}@1:L{i}", seconds=seconds, layout=layout)
            for i, seconds in enumerate(measured)
        ]
        return [
            Prediction(row, StepSeconds(seconds), None) for row, seconds in zip(rows, predicted, strict=True)
        ]

    right = layouts("a", (1, 2, 3, 4), (2, 3, 4, 5))
    reversed_ = layouts("a", (1, 2, 3, 4, 5), (5, 4, 3, 2, 1), gpus=64)
    too_few = layouts("a", (1, 2, 3), (3, 2, 1), gpus=128)
    assert order_of_layouts(too_few) is None
    assert order_of_layouts(right + too_few) == 1
    # 6 pairs in order, 10 in reverse.
    assert order_of_layouts(right + reversed_) == pytest.approx((6 - 10) / 16)
    # Another repository, all in order, counts as much.
    assert order_of_layouts(right + reversed_ + layouts("b", (1, 2, 3, 4), (1, 2, 3, 4))) == pytest.approx(
        0.375
    )
    assert kendall_tau([(1, 1), (2, 3), (3, 2)]) == pytest.approx(1 / 3)
    # Ties of all measured values, of all predicted values, of both, and too few rows have no order.
    for pairs in ([(1, 1), (1, 2)], [(1, 1), (2, 1)], [(1, 1), (1, 1)], [(1, 1)], []):
        assert kendall_tau(pairs) == kendall_tau([(b, a) for a, b in pairs]) == 0
    tied = layouts("a", (1, 2, 3, 4), (1, 1, 1, 1)) + layouts("b", (1, 1, 1, 1), (1, 2, 3, 4))
    assert order_of_layouts(tied) == 0


def test_the_command_reads_a_file_of_rows() -> None:
    command = [sys.executable, "benchmarks/planner_accuracy.py", "--rows", ASSET, "--outliers", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    totals = {line[0]: int(line[line.index("repository") + 2]) for line in lines if "repository" in line}
    assert totals == {"unseen": 11, "fitted": 1, "dubious": 1}
    assert (
        "rows that cannot be predicted: 2\n  1 fp8, whose rates are not known\n  1 gpus not stated"
        in done.stdout
    )
    # The worst row of each of the five programs.
    assert len([line for line in done.stdout.splitlines() if line.startswith(("+", "-"))]) == 5
