"""Formats inspections and comparisons of checkpoints as text. Transformer layers that are equal share a
row."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.checkpoint.formats.registry import open_reader
from megatron.checkpoint.formats.state import ParameterRecord
from megatron.checkpoint.inspect import Overview, Report, Summary
from megatron.checkpoint.names import INTEGRITY_KEY
from megatron.checkpoint.record import Checkpoint
from megatron.text_table import format_table, number_ranges

# Prefixes of keys of `run.json` whose values differ between any two checkpoints.
_NOT_SHOWN = (f"{INTEGRITY_KEY}.digests.", "files.", "index.", "lineage", "parameters.", "sha256")


def overview_text(overview: Overview) -> str:
    """Returns the text of an overview: one row per folder, the problems, and the report on the newest
    complete checkpoint."""
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
    """Returns the text of a report: run, files, parameters and problems of one checkpoint."""
    lines = [report.folder]
    if report.is_complete:
        lines.append(f"model      {report.model}")
        for title in ("state", "layout", "stages"):
            if pairs := getattr(report, title):
                values = ", ".join(f"{name} {value}" for name, value in pairs.items())
                lines.append(f"{title:<10} {values}")
        if report.vocab_size is not None:
            lines.append(f"vocabulary {report.vocab_size:,} tokens, end of document {report.eod}")
        lines.append(f"digests    {report.digests}")
    files = [f"{group.num_files:,} {group.kind} ({size_text(group.size_bytes)})" for group in report.files]
    lines.append(f"files      {', '.join(files) or 'none'}")
    if report.parameters:
        lines += ["", format_table(_parameter_rows(report.parameters), left_align=(0, -1))]
    return "\n".join([*lines, *_problem_lines(report.problems)])


def comparison_text(comparison: Comparison) -> str:
    """Returns the text of a comparison: the settings and parameters that differ, and the number of equal
    tensors for each state."""
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
    state_names = list(dict.fromkeys(state for item in parameters for state in item.largest))
    if differing:
        rows = [["compared", "equal", "largest difference"]]
        for state in state_names:
            found = [item.largest[state] for item in parameters if state in item.largest]
            rows.append([state, f"{found.count(0):,} of {len(found):,}", _largest(found)])
        lines += [format_table(rows, left_align=(0, -1)), ""]
        rows = [["parameter", "layers", *state_names, ""]]
        for name, layers, items in _grouped((item.name, item.note, item) for item in differing):
            largest = [_largest([item.largest.get(state) for item in items]) for state in state_names]
            rows.append([name, layers, *largest, items[0].note])
        lines.append(format_table(rows, left_align=(0, -1)))
    return "\n".join(lines)


def _largest(differences: Iterable[float | None]) -> str:
    numbers = [number for number in differences if number is not None]
    return f"{max(numbers):.3e}" if numbers else "-"


def size_text(size_bytes: int) -> str:
    """Returns a size in the unit that leaves one to three digits before the decimal point."""
    power = max((len(str(size_bytes)) - 1) // 3, 0)
    unit = ("B", "kB", "MB", "GB", "TB", "PB")[power]
    return f"{size_bytes / 1000**power:.{1 if power else 0}f} {unit}"


def _parameter_rows(parameters: Iterable[ParameterRecord]) -> list[list[str]]:
    rows = [["parameter", "layers", "shape", "type"]]
    for name, layers, items in _grouped((item.name, (item.shape, item.dtype), item) for item in parameters):
        rows.append([name, layers, " x ".join(map(str, items[0].shape)), items[0].dtype])
    return rows


def _grouped(items: Iterable[tuple[str, Hashable, Any]]) -> list[tuple[str, str, list[Any]]]:
    """Groups (name, key, item) triples by key and by the name without its layer number. Returns for each
    group (the name with {layer} instead of the number, the layer numbers, the items)."""
    groups: dict[tuple[str, Hashable], list[tuple[str, Any]]] = {}
    for name, key, item in items:
        # Only names with a further part, such as `3.mlp.bias`, are of transformer layers; the final norm's is
        # `{index}.weight`.
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


def _problem_lines(problems: Sequence[str]) -> list[str]:
    return ["", *(f"problem: {problem}" for problem in problems)] if problems else []


ABSENT = "absent"


@dataclass(frozen=True)
class ParameterDifference:
    """How a parameter differs in two checkpoints.

    largest: state ('fp32', 'exp_avg', ...) -> largest absolute difference; None if the two tensors cannot be
    subtracted. note: the reason for None."""

    name: str
    largest: dict[str, float | None]
    note: str = ""

    @property
    def is_equal(self) -> bool:
        return not self.note and not any(self.largest.values())


@dataclass(frozen=True)
class Comparison:
    """The differences of two checkpoints.

    settings: dotted name in run.json -> the two values, for each setting that differs. parameters: all
    parameters in the order of the model; the differences of equal parameters are 0."""

    folders: tuple[str, str]
    settings: dict[str, tuple[Any, Any]]
    parameters: list[ParameterDifference]


def compare_checkpoints(one: Checkpoint, other: Checkpoint) -> Comparison:
    """Compares two checkpoints by their global fp32 values and moments; they may differ in layout, precision
    and format. Only one parameter of each is in memory at a time. Raises UserError for files that cannot be
    read."""
    return Comparison(
        (str(one.folder), str(other.folder)),
        different_settings(one.run, other.run),
        list(_parameter_differences(one, other)),
    )


def different_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the leaves of two nested dicts that differ: dotted name -> both values ('absent' for a missing
    leaf)."""
    first, second = dict(_leaves(one)), dict(_leaves(other))
    pairs = {name: (first.get(name, ABSENT), second.get(name, ABSENT)) for name in first | second}
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b}


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _parameter_differences(one: Checkpoint, other: Checkpoint) -> Iterator[ParameterDifference]:
    sides = [open_reader(one), open_reader(other)]
    # A checkpoint of another framework does not record its padding. The other checkpoint's size is used.
    rows = {name: spec.num_valid_rows for side in sides for name, spec in side.specs.items()}
    for name in dict.fromkeys([*sides[0].names, *sides[1].names]):
        if not all(name in side.names for side in sides):
            yield ParameterDifference(
                name, {}, f"only in {(one if name in sides[0].names else other).folder}"
            )
            continue
        state_names = [side.state_names(name) for side in sides]
        largest: dict[str, float | None] = {}
        notes = []
        for state in dict.fromkeys([*state_names[0], *state_names[1]]):
            if not all(state in held for held in state_names):
                where = (one if state in state_names[0] else other).folder
                largest[state], note = None, f"{state} only in {where}"
            else:
                largest[state], note = _difference(
                    *(side.read_unpadded(name, state)[: rows.get(name)] for side in sides)
                )
            notes += [note] if note else []
        yield ParameterDifference(name, largest, "; ".join(dict.fromkeys(notes)))


def _difference(one: Tensor, other: Tensor) -> tuple[float | None, str]:
    if one.shape != other.shape:
        return None, f"shapes {tuple(one.shape)} and {tuple(other.shape)}"
    largest = (one.float() - other.float()).abs().max().item()
    return (largest, "") if math.isfinite(largest) else (None, "non-finite values")
