"""Whether the runs of a sweep that must have the same losses have them.

Layout, partition, schedule, micro-batch size and recomputation do not change the losses (the first section of
docs/parallelism.md). Rows that differ in other settings, such as precision or learning rate, form separate
groups and are not compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron.sweep.folder import RecordedRow


@dataclass(frozen=True)
class Agreement:
    """The comparison of a group's losses. rows: that were compared. largest: the largest relative difference
    of a loss at the same step. disagreeing: a sentence for each run whose losses differ by more than the
    tolerance."""

    rows: list[int]
    runs: int
    tolerance: float
    largest: float
    disagreeing: list[str]

    @property
    def agrees(self) -> bool:
        return not self.disagreeing

    def sentence(self, number: int) -> str:
        """One line for the report. number: of the group, from 1."""
        rows = ", ".join(map(str, self.rows))
        what = f"losses of group {number} (rows {rows}; {self.runs} runs)"
        if self.runs < 2:
            return f"{what}: one run, nothing to compare"
        found = f"largest relative difference {self.largest:.1e}, allowed {self.tolerance:.1e}"
        return f"{what} agree: {found}" if self.agrees else f"{what} DISAGREE: {found}"


def check_losses(
    rows: Sequence[RecordedRow], results: Mapping[tuple[int, int], dict[str, Any]]
) -> list[Agreement]:
    """Compares all runs of each group, repeats included, step by step. Failed runs count up to their end."""
    grouped = sorted((row for row in rows if row.refused is None), key=lambda row: (row.numbers, row.index))
    groups = [list(group) for _, group in groupby(grouped, key=lambda row: row.numbers)]
    return [_compare(group, results) for group in sorted(groups, key=lambda group: group[0].index)]


def group_numbers(rows: Sequence[RecordedRow]) -> dict[int, int]:
    """Row -> number of its group, from 1 in the order of the rows; refused rows have none."""
    numbers: dict[str, int] = {}
    for row in rows:
        if row.refused is None:
            numbers.setdefault(row.numbers, len(numbers) + 1)
    return {row.index: numbers[row.numbers] for row in rows if row.refused is None}


def _compare(group: Sequence[RecordedRow], results: Mapping[tuple[int, int], dict[str, Any]]) -> Agreement:
    indices = {row.index for row in group}
    curves = {
        key: {step["iteration"]: float(step["loss"]) for step in result["steps"] if step["loss"] is not None}
        for key, result in sorted(results.items())
        if key[0] in indices
    }
    curves = {key: curve for key, curve in curves.items() if curve}
    # A comparison of two precisions is not possible: the precision is one of the settings of a group.
    tolerance = max(row.tolerance for row in group)
    largest, first_difference = 0.0, dict[tuple[int, int], str]()
    for step in sorted({step for curve in curves.values() for step in curve}):
        losses = {key: curve[step] for key, curve in curves.items() if step in curve}
        reference = statistics.median_low(losses.values())
        is_like = next(key for key, loss in losses.items() if loss == reference or math.isnan(reference))
        largest = max(largest, _difference(min(losses.values()), max(losses.values())))
        for key, loss in losses.items():
            difference = _difference(loss, reference)
            largest = max(largest, difference)
            if difference > tolerance and key not in first_difference:
                first_difference[key] = (
                    f"row {key[0]}, repeat {key[1]} has loss {loss:.6g} at step {step}, row {is_like[0]}, "
                    f"repeat {is_like[1]} has {reference:.6g}: {difference:.1e} apart"
                )
    return Agreement(
        sorted({row for row, _ in curves}), len(curves), tolerance, largest, list(first_difference.values())
    )


def _difference(a: float, b: float) -> float:
    """Relative difference; infinite if only one of them is a number."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) / max(abs(a), abs(b), 1e-30)
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else math.inf
