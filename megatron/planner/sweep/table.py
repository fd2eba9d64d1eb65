"""Formats the report of a sweep as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.text_table import format_table
from megatron.units import GIB

Summary = Mapping[str, Any]

# Title of a column -> function that formats its text from a row's 'predicted' or 'measured' values.
_PREDICTED = {
    "planned s": lambda values: _number(values["step_s"], ".4g"),
    "planned GiB": lambda values: _per_stage(values["memory_bytes"]),
    "planned bubble": lambda values: _number(values["bubble"], ".1%"),
    "max/mean": lambda values: _number(values["max_over_mean"], ".3f"),
}
_MEASURED = {
    "s/step": lambda values: _number(values["step_s"], ".4g"),
    "spread": lambda values: _number(values["spread"], ".1%") if values["repeats"] > 1 else "-",
    "ratio": lambda values: _number(values["ratio"], ".3f"),
    "tokens/s": lambda values: _number(values["tokens_per_s"], ",.0f"),
    "GiB": lambda values: _per_stage(values["memory_bytes"]),
    "bubble": lambda values: _number(values["bubble"], ".1%"),
}


def report_text(summary: Summary) -> str:
    """Returns the table and its remarks, for the console."""
    cells = table_cells(summary)
    return "\n".join([format_table(cells, left_align=range(1 + len(summary["axes"]))), *remarks(summary)])


def report_markdown(summary: Summary) -> str:
    """Returns the table and its remarks as Markdown, with the command and machine of the sweep."""
    head, *rows = [[cell.replace("|", "\\|") for cell in row] for row in table_cells(summary)]
    lines = [head, ["---"] * len(head), *rows]
    sweep = summary["sweep"]
    origin = (
        f"`{sweep['command']}`\n\n{sweep['steps']} steps, {sweep['repeat']} repeats, "
        f"commit {sweep['commit'] or 'unknown'}, {sweep['host']}, {sweep['created']}"
    )
    table = "\n".join("| " + " | ".join(row) + " |" for row in lines)
    notes = "\n".join(f"- {remark}" for remark in remarks(summary))
    return f"# Sweep\n\n{origin}\n\n{table}\n\n{notes}\n"


def report_csv(summary: Summary) -> str:
    """Returns CSV with a line for each row and unrounded numbers. Bytes of several stages are separated by
    spaces."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    kinds = {
        "predicted": "step_s bubble max_over_mean memory_bytes",
        "measured": "repeats step_s step_s_least step_s_most ratio tokens_per_s loss bubble memory_bytes",
    }
    values = [(kind, name) for kind, names in kinds.items() for name in names.split()]
    own = ["row", "status", "reason", "processes", "group"]
    writer.writerow([*own, *summary["axes"], *(f"{kind}_{name}" for kind, name in values)])
    for row in summary["rows"]:
        found = [(row[kind] or {}).get(name) for kind, name in values]
        texts = [" ".join(f"{x:.0f}" for x in value) if isinstance(value, list) else value for value in found]
        writer.writerow(
            [*(row[name] for name in own), *(row["settings"].get(flag) for flag in summary["axes"]), *texts]
        )
    return stream.getvalue()


def table_cells(summary: Summary) -> list[list[str]]:
    """Returns the header and the rows of the table. Leaves out columns without values."""
    flags: Sequence[str] = summary["axes"]
    head = [
        "row",
        *(flag.removeprefix("--") for flag in flags),
        "processes",
        *_MEASURED,
        *_PREDICTED,
        "status",
    ]
    rows = [head]
    fastest = {times["fastest"] for times in summary["times"]}
    for row in summary["rows"]:
        measured, predicted = row["measured"], row["predicted"]
        rows.append(
            [
                str(row["row"]),
                *(row["settings"].get(flag, "-") or "''" for flag in flags),
                str(row["processes"] or "-"),
                *(text(measured) if measured else "-" for text in _MEASURED.values()),
                *(text(predicted) if predicted else "-" for text in _PREDICTED.values()),
                row["status"] + ", fastest" * (row["row"] in fastest),
            ]
        )
    keep = [
        column
        for column in range(len(head))
        if column <= len(flags) or any(row[column] != "-" for row in rows[1:])
    ]
    return [[row[column] for column in keep] for row in rows]


def remarks(summary: Summary) -> list[str]:
    """Returns the remarks: a sentence for each row without a full measurement, and sentences on each group's
    losses."""
    found = []
    for row in summary["rows"]:
        if row["reason"]:
            found.append(f"row {row['row']} {row['status']}: {row['reason']}")
        elif row["predicted"] and row["predicted"]["note"]:
            found.append(f"row {row['row']}: no prediction: {row['predicted']['note']}")
    for key in ("commits", "hosts"):
        if len(values := summary["sweep"][key]) > 1:
            found.append(
                f"runs of {len(values)} {key} ({', '.join(values)}): their times may not be comparable"
            )
    found += [times["sentence"] for times in summary["times"]]
    measured = [row["measured"] for row in summary["rows"] if row["measured"]]
    if any(values["is_process_memory"] for values in measured):
        found.append(
            "GiB is the memory of a process, with Python and PyTorch; planned GiB counts only tensors on the "
            "device: do not compare them on a CPU"
        )
    for agreement in summary["losses"]:
        found += [agreement["sentence"], *agreement["disagreeing"]]
    return found


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _per_stage(sizes: Sequence[float] | None) -> str:
    """Returns the GiB of each pipeline rank; for more than four ranks only the smallest and the largest."""
    if not sizes:
        return "-"
    if len(sizes) > 4:
        return f"{min(sizes) / GIB:.3g} to {max(sizes) / GIB:.3g}"
    return " ".join(f"{size / GIB:.3g}" for size in sizes)
