"""Plots of plans and sweeps. They are written to files without a display."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import UserError
from megatron.files import write_atomically
from megatron.units import GIB

if TYPE_CHECKING:  # importing a plan imports torch and DeepSpeed, which the other plots do not need
    from megatron.planner.plan import Plan

_MEASURED, _PREDICTED = "tab:blue", "tab:orange"
_WIDTH = 0.4


@contextmanager
def new_figure(output: Path, rows: int, columns: int = 1, *, dpi: int = 120, **options: Any) -> Iterator[Any]:
    """Yields (figure, axes[row, column]), and writes the figure to `output` at the end of the block. The
    suffix of `output` is the file format; without a suffix it is PNG. options: arguments of
    `pyplot.subplots`. Raises OSError if the file cannot be written, and ValueError for an unknown format."""
    import matplotlib

    matplotlib.use("Agg")
    # Names of files and runs are plain text. Without this setting a text with two dollar signs is parsed as
    # TeX.
    matplotlib.rcParams["text.parse_math"] = False
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **options)
    try:
        yield figure, axes
        content = io.BytesIO()
        with warnings.catch_warnings():
            # The warning quotes characters that the font lacks, such as ESC, which would reach the terminal.
            warnings.filterwarnings("ignore", "Glyph ", UserWarning)
            figure.savefig(content, dpi=dpi, format=output.suffix[1:] or "png")
    finally:
        pyplot.close(figure)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, content.getvalue())


def draw_plan(plan: Plan, path: str) -> None:
    """Plots a plan: the memory of each rank by part, and the timeline of the schedule. Raises UserError if
    the file cannot be written."""
    rows = 2 if plan.timeline else 1
    try:
        with new_figure(Path(path), rows, figsize=(11, 4 * rows)) as (_, axes):
            _draw_memory(axes[0, 0], plan)
            if plan.timeline:
                _draw_timeline(axes[1, 0], plan)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path} cannot be written ({error}). Set another file.") from None


def _draw_memory(axis: Any, plan: Plan) -> None:
    ranks = range(len(plan.memory))
    below = [0.0] * len(ranks)
    for name in ("state", "activations", "head", "temporaries", "tables"):
        sizes = [getattr(part, name) / GIB for part in plan.memory]
        axis.bar(ranks, sizes, bottom=below, label=name)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    if plan.device_bytes is not None:
        usable = plan.device_bytes - plan.reserve_bytes
        axis.axhline(usable / GIB, color="black", linestyle="--", label="device, less the reserve")
    axis.set_xlabel("pipeline rank")
    axis.set_ylabel("GiB per device")
    axis.legend()


def _draw_timeline(axis: Any, plan: Plan) -> None:
    # Each kind of pass has a color. On a rank with several stages, the stages after the first are lighter.
    colors = {"forward": "tab:blue", "backward": "tab:green", "weight": "tab:orange"}
    ranks = len(plan.memory)
    for kind, color in colors.items():
        for rank in range(ranks):
            for second in (False, True):
                events = [
                    event
                    for event in plan.timeline
                    if event.rank == rank and event.kind == kind and (event.stage >= ranks) == second
                ]
                spans = [(event.start, event.end - event.start) for event in events]
                alpha = 0.55 if second else 1.0
                axis.broken_barh(spans, (rank - 0.4, 0.8), facecolors=color, edgecolor="white", alpha=alpha)
    axis.set_yticks(range(ranks))
    axis.invert_yaxis()
    axis.set_ylabel("pipeline rank")
    axis.set_xlabel(
        f"seconds, first {plan.timeline_micro_batches} micro-batches; forward blue, backward green"
        f"{', weight gradients orange' * any(event.kind == 'weight' for event in plan.timeline)}"
    )


def draw_summary(summary: Mapping[str, Any], output: Path) -> None:
    """Plots the time, memory and bubble of each row of a sweep. Raises OSError if the file cannot be written.
    Each row has a bar for the measured value and, below it, a bar for the predicted value. Whiskers show the
    fastest and the slowest repeat. Rows with neither value, such as rows with an invalid configuration, are
    not shown."""
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
        settings = (", ".join(value or "''" for value in row["settings"].values()) for row in rows)
        labels = [
            f"{row['row']}: {of_row or 'base command'}" for row, of_row in zip(rows, settings, strict=True)
        ]
        time.set_yticks(range(len(rows)), labels)
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
        # Each stage has a thin bar, the first stage on top.
        sizes = values["memory_bytes"] or []
        for stage, size in enumerate(sizes):
            height = _WIDTH / len(sizes)
            memory.barh(y - _WIDTH / 2 + (stage + 0.5) * height, size / GIB, 0.9 * height, color=color)
        if values["bubble"] is not None:
            bubble.barh(y, 100 * values["bubble"], _WIDTH, color=color)
