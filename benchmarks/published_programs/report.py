"""Errors of the predictions, by program and GPU, and in total with each repository counting equally.

Weights: a row counts 1 / n, where n is the number of its repository's rows in the same total, so that each
repository that publishes rows counts equally, however many they are. The median is the least error with half
of the weight at or below it, and 9 of 10 are within the least with nine tenths.

Order: the rows of one repository, program and kind of GPU with one model, sequence length and number of GPUs
are layouts of one problem; Kendall's tau compares the order of their seconds per token. A repository's tau is
the mean over its problems with `LEAST_LAYOUTS` rows or more, weighted by their pairs of rows. The tau
of a line or of a total is the mean over repositories.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from statistics import fmean
from typing import TypeVar

from benchmarks.published_programs.classes import Constants
from benchmarks.published_programs.memory import peak_bytes
from benchmarks.published_programs.rows import PublishedRow, SkippedRow
from benchmarks.published_programs.steps import StepSeconds, predict_step
from megatron.text_table import format_table

LEAST_LAYOUTS = 4

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Prediction:
    """A row, and its predicted time and memory."""

    row: PublishedRow
    step: StepSeconds
    peak_bytes: float | None

    @cached_property
    def time_error(self) -> float:
        return self.step.total / self.row.seconds - 1

    @cached_property
    def memory_error(self) -> float | None:
        """Relative error of the memory; None if none was published."""
        if self.peak_bytes is None or self.row.memory_bytes is None:
            return None
        return self.peak_bytes / self.row.memory_bytes - 1


def predict(rows: Iterable[PublishedRow], constants: Constants) -> list[Prediction]:
    predictions = []
    for row in rows:
        run = row.run(constants)
        memory = None if row.memory_bytes is None else peak_bytes(run)
        predictions.append(Prediction(row, predict_step(run), memory))
    return predictions


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns Kendall's tau-b of measured and predicted values: 1 if all pairs are in the same order, 0 if
    all measured or all predicted values are equal."""
    agree = differ = tied_x = tied_y = 0
    for (x1, y1), (x2, y2) in combinations(pairs, 2):
        sign = (x1 - x2) * (y1 - y2)
        agree += sign > 0
        differ += sign < 0
        tied_x += x1 == x2
        tied_y += y1 == y2
    total = len(pairs) * (len(pairs) - 1) / 2
    compared = ((total - tied_x) * (total - tied_y)) ** 0.5
    return (agree - differ) / compared if compared else 0.0


def weighted_quantile(values: Sequence[tuple[float, float]], share: float) -> float:
    """Returns the least value that, with the values below it, has this share of the weight; values: (value,
    weight)."""
    total, below = sum(weight for _, weight in values), 0.0
    for value, weight in sorted(values):
        below += weight
        # Sums of parts such as 1 / 3 are not exact.
        if below >= share * total * (1 - 1e-9):
            return value
    raise ValueError("no values")


def accuracy_report(
    predictions: Sequence[Prediction], skipped: Sequence[SkippedRow], fitted_on: set[str], outliers: int = 0
) -> str:
    """Returns the errors by program, GPU and part (fitted on or unseen), the totals, and the rows that are
    not counted."""
    usual = [one for one in predictions if not one.row.is_dubious]
    dubious = [one for one in predictions if one.row.is_dubious]
    parts = {
        "unseen": [one for one in usual if one.row.source not in fitted_on],
        "fitted on": [one for one in usual if one.row.source in fitted_on],
    }
    table = [
        [
            "rows",
            "program",
            "GPU",
            "number",
            "median %",
            "9 of 10 %",
            "worst %",
            "tau",
            "memory %",
            "9 of 10 %",
        ]
    ]
    for name, part in parts.items():
        groups = group_by(part, lambda one: (one.row.program, one.row.gpu_kind))
        for (program, gpu), group in sorted(groups.items()):
            table.append([name, program, gpu, *_cells(group, equal_weights)])
    for name, part in {**parts, "dubious": dubious}.items():
        if part:
            table.append([name, "all, by repository", "all", *_cells(part, origin_weights)])
    lines = [format_table(table, left_align=(0, 1, 2)), _skipped_line(skipped)]
    lines += [_outlier_line(one) for one in _worst(usual, outliers)]
    return "\n".join(lines)


def equal_weights(predictions: Sequence[Prediction]) -> list[float]:
    """Returns the weight of each row in a line of one program and GPU."""
    return [1.0] * len(predictions)


def origin_weights(predictions: Sequence[Prediction]) -> list[float]:
    """Returns a weight for each row, with which all repositories count equally."""
    counts = Counter(one.row.origin for one in predictions)
    return [1 / counts[one.row.origin] for one in predictions]


def group_by(
    items: Iterable[_Item], key: Callable[[_Item], tuple[str, ...]]
) -> dict[tuple[str, ...], list[_Item]]:
    """Returns the items by key, in order."""
    groups: dict[tuple[str, ...], list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def order_of_layouts(predictions: Sequence[Prediction]) -> float | None:
    """Returns Kendall's tau of the order of layouts; None if no problem has enough."""
    by_origin: dict[str, list[tuple[float, int]]] = {}
    for (origin, *_), group in group_by(predictions, _problem).items():
        if len(group) >= LEAST_LAYOUTS:
            tau = kendall_tau([_seconds_per_token(one) for one in group])
            by_origin.setdefault(origin, []).append((tau, len(group) * (len(group) - 1) // 2))
    if not by_origin:
        return None
    return fmean(
        sum(tau * pairs for tau, pairs in taus) / sum(pairs for _, pairs in taus)
        for taus in by_origin.values()
    )


def _problem(one: Prediction) -> tuple[str, ...]:
    row = one.row
    return row.origin, row.program, row.gpu_kind, str(row.model), str(row.layout.gpus)


def _seconds_per_token(one: Prediction) -> tuple[float, float]:
    """Returns (measured, predicted) seconds per token."""
    tokens = one.row.layout.global_batch * one.row.model.seq
    return one.row.seconds / tokens, one.step.total / tokens


def _cells(group: Sequence[Prediction], weigh: Callable[[Sequence[Prediction]], list[float]]) -> list[str]:
    with_memory = [one for one in group if one.memory_error is not None]
    times = [(abs(one.time_error), weight) for one, weight in zip(group, weigh(group), strict=True)]
    memories = [
        (abs(one.memory_error or 0.0), weight)
        for one, weight in zip(with_memory, weigh(with_memory), strict=True)
    ]
    tau = order_of_layouts(group)
    return [
        str(len(group)),
        *_quantiles(times),
        _percent(max(times)[0]),
        "" if tau is None else f"{tau:.2f}",
        *(_quantiles(memories) if memories else ("", "")),
    ]


def _quantiles(errors: Sequence[tuple[float, float]]) -> tuple[str, str]:
    """Returns (median, nine of ten) in percent."""
    return _percent(weighted_quantile(errors, 0.5)), _percent(weighted_quantile(errors, 0.9))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _skipped_line(skipped: Sequence[SkippedRow]) -> str:
    reasons = Counter(row.reason for row in skipped)
    listed = "".join(f"\n  {count} {reason}" for reason, count in reasons.most_common())
    return f"rows that cannot be predicted: {len(skipped)}{listed}"


def _worst(predictions: Sequence[Prediction], count: int) -> list[Prediction]:
    """Returns the rows with the largest errors of each program."""
    worst = []
    for _, group in sorted(group_by(predictions, lambda one: (one.row.program,)).items()):
        worst += sorted(group, key=lambda one: -abs(one.time_error))[:count]
    return worst


def _outlier_line(one: Prediction) -> str:
    row, model, layout = one.row, one.row.model, one.row.layout
    sizes = (
        f"{model.layers}x{model.hidden} seq {model.seq} TP{layout.tensor} PP{layout.pipeline}x{layout.chunks}"
        f" CP{layout.context} DP{layout.data} mb{layout.micro_batch} ZeRO-{layout.zero}"
    )
    return (
        f"{100 * one.time_error:+.1f} % {row.program}, {row.gpu} x {layout.gpus}: {sizes}, "
        f"recomputation {layout.recompute or 'not stated'}: {row.source}"
    )
