"""The report of a sweep as a picture: time, memory and bubble per row, predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.planner.figure import new_figure
from megatron.units import GIB

_MEASURED, _PREDICTED = "tab:blue", "tab:orange"
_WIDTH = 0.4


def draw_summary(summary: Mapping[str, Any], output: Path) -> None:
    """Writes the PNG. The rows are one below the other, measured above predicted; whiskers are the fastest
    and the slowest repeat. Refused rows are left out. Raises OSError if it cannot be written."""
    from matplotlib.patches import Patch

    rows = [row for row in summary["rows"] if row["measured"] or row["predicted"]]
    size = (13, 1.8 + 0.45 * max(len(rows), 1))
    with new_figure(output, 1, 3, dpi=110, sharey=True, figsize=size) as (figure, axes):
        time, memory, bubble = axes[0]
        for place, row in enumerate(rows):
            _draw_row(time, memory, bubble, place, row["measured"], row["predicted"])
        for axis, label in (
            (time, "seconds per step"),
            (memory, "GiB of each stage"),
            (bubble, "bubble, % of a step"),
        ):
            axis.set_xlabel(label)
            axis.grid(alpha=0.3, axis="x")
            axis.set_xlim(left=0)
        time.set_yticks(range(len(rows)), [_label(row) for row in rows])
        time.invert_yaxis()
        patches = [Patch(color=_MEASURED, label="measured"), Patch(color=_PREDICTED, label="predicted")]
        figure.legend(handles=patches, loc="outside upper right", ncols=2)


def _draw_row(time: Any, memory: Any, bubble: Any, place: int, measured: Any, predicted: Any) -> None:
    for values, color, offset in ((measured, _MEASURED, -_WIDTH / 2), (predicted, _PREDICTED, _WIDTH / 2)):
        if not values:
            continue
        y = place + offset
        if values["step_s"] is not None:
            time.barh(y, values["step_s"], _WIDTH, color=color)
        if values.get("repeats", 0) > 1:
            time.plot([values["step_s_least"], values["step_s_most"]], [y, y], color="black", marker="|")
        # A thin bar per stage, the first stage above.
        sizes = values["memory_bytes"] or []
        for stage, size in enumerate(sizes):
            height = _WIDTH / len(sizes)
            memory.barh(y - _WIDTH / 2 + (stage + 0.5) * height, size / GIB, 0.9 * height, color=color)
        if values["bubble"] is not None:
            bubble.barh(y, 100 * values["bubble"], _WIDTH, color=color)


def _label(row: Mapping[str, Any]) -> str:
    settings = ", ".join(value or "''" for value in row["settings"].values()) or "base command"
    return f"{row['row']}: {settings}"
