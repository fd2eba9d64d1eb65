"""Reports of `inspect` and `compare` as text. Equal transformer layers share a row."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from megatron.checkpoint.formats.reader import ParameterRecord
from megatron.checkpoint.report.compare import Comparison
from megatron.checkpoint.report.inspect import Overview, Report, Summary
from megatron.text_table import format_table, number_ranges

# Entries of run.json that differ between any two checkpoints.
_NOT_SHOWN = ("certificate.digests.", "files.", "lineage", "parameters.", "sha256")


def overview_text(overview: Overview) -> str:
    """A row per folder, their problems, then the report on the newest complete one."""
    parts = []
    if overview.checkpoints:
        rows = [["folder", "kind", "iteration", "samples", "tokens", "files", "size", ""]]
        rows += [_summary_row(item) for item in overview.checkpoints]
        parts.append(
            "\n".join(
                [
                    overview.folder,
                    format_table(rows, left_align=(0, 1, -1)),
                    *_problem_lines(overview.problems),
                ]
            )
        )
    if overview.checkpoint:
        parts.append(report_text(overview.checkpoint))
    return "\n\n".join(parts)


def _summary_row(item: Summary) -> list[str]:
    numbers = (item.iteration, item.consumed_samples, item.consumed_tokens)
    status = ["latest"] * item.is_latest + ["incomplete"] * (not item.is_complete)
    status += ["damaged"] * (item.is_complete and bool(item.problem))
    return [
        item.name,
        item.kind,
        *("-" if number is None else f"{number:,}" for number in numbers),
        f"{item.num_files:,}",
        size_text(item.size_bytes),
        ", ".join(status),
    ]


def report_text(report: Report) -> str:
    """The run, files, parameters and problems of one checkpoint."""
    lines = [report.folder]
    if report.is_complete:
        lines.append(f"model      {report.model}")
        for title in ("state", "layout", "stages"):
            if pairs := getattr(report, title):
                lines.append(f"{title:<10} {_pairs(pairs)}")
        if report.vocab_size is not None:
            lines.append(f"vocabulary {report.vocab_size:,} tokens, end of document {report.eod}")
        lines.append(f"digests    {report.digests}")
    files = [f"{group.num_files:,} {group.kind} ({size_text(group.size_bytes)})" for group in report.files]
    lines.append(f"files      {', '.join(files) or 'none'}")
    if report.parameters:
        lines += ["", format_table(_parameter_rows(report.parameters), left_align=(0, -1))]
    return "\n".join([*lines, *_problem_lines(report.problems)])


def comparison_text(comparison: Comparison) -> str:
    """The settings that differ, the number of equal tensors by kind, and the parameters that differ."""
    lines = [f"A: {comparison.folders[0]}", f"B: {comparison.folders[1]}", ""]
    shown = {name: pair for name, pair in comparison.settings.items() if not name.startswith(_NOT_SHOWN)}
    if shown:
        settings = [["setting", "A", "B"]]
        settings += [[name, str(one), str(other)] for name, (one, other) in shown.items()]
        lines.append(format_table(settings, left_align=(0, 1, 2, -1)))
    else:
        lines.append("no setting differs")
    parameters = comparison.parameters
    differing = [item for item in parameters if not item.is_equal]
    lines += ["", f"{len(parameters) - len(differing):,} of {len(parameters):,} parameters are equal"]
    kinds = list(dict.fromkeys(kind for item in parameters for kind in item.largest))
    if differing:
        rows = [["compared", "equal", "largest difference"]]
        for kind in kinds:
            found = [item.largest[kind] for item in parameters if kind in item.largest]
            rows.append([kind, f"{found.count(0):,} of {len(found):,}", _largest(found)])
        lines += [format_table(rows, left_align=(0, -1)), ""]
        rows = [["parameter", "layers", *kinds, ""]]
        for name, layers, items in _grouped((item.name, item.note, item) for item in differing):
            largest = [_largest([item.largest.get(kind) for item in items]) for kind in kinds]
            rows.append([name, layers, *largest, items[0].note])
        lines.append(format_table(rows, left_align=(0, -1)))
    return "\n".join(lines)


def _largest(differences: Iterable[float | None]) -> str:
    numbers = [number for number in differences if number is not None]
    return f"{max(numbers):.3e}" if numbers else "-"


def size_text(size_bytes: int) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    power = max((len(str(size_bytes)) - 1) // 3, 0)
    unit = ("B", "kB", "MB", "GB", "TB", "PB")[power]
    return f"{size_bytes / 1000**power:.{1 if power else 0}f} {unit}"


def _parameter_rows(parameters: Iterable[ParameterRecord]) -> list[list[str]]:
    rows = [["parameter", "layers", "shape", "type"]]
    for name, layers, items in _grouped((item.name, (item.shape, item.dtype), item) for item in parameters):
        rows.append([name, layers, " x ".join(map(str, items[0].shape)), items[0].dtype])
    return rows


def _grouped(items: Iterable[tuple[str, Hashable, Any]]) -> list[tuple[str, str, list[Any]]]:
    """(name, key, item) -> (name with {layer} for its number, numbers, items) per such name and key."""
    groups: dict[tuple[str, Hashable], list[tuple[str, Any]]] = {}
    for name, key, item in items:
        # The final norm, `{index}.weight`, stands alone; names of transformer layers have a part between.
        match = re.fullmatch(r"(\d+)\.(.+\..+)", name)
        number, pattern = (match[1], "{layer}." + match[2]) if match else ("", name)
        groups.setdefault((pattern, key), []).append((number, item))
    return [
        (
            pattern,
            number_ranges([int(number) for number, _ in members if number]),
            [item for _, item in members],
        )
        for (pattern, _), members in groups.items()
    ]


def _pairs(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _problem_lines(problems: Sequence[str]) -> list[str]:
    return ["", *(f"problem: {problem}" for problem in problems)] if problems else []
