"""Writes the SVG figures of the documentation, next to this file: `python docs/figures/make.py`.

`python docs/figures/make.py runs/quickstart/train.log` reads the losses of a `make train` into
quickstart.json first. The schedules of learning rate and pipeline are the program's.
Text is monospace, so that its width is known: text that does not fit its box is an error.
"""

from __future__ import annotations

import json
import math
import sys
from html import escape
from pathlib import Path

from megatron.config import ScheduleConfig, TrainingConfig
from megatron.optimizer.schedule import LearningRateSchedule, Progress
from megatron.pipeline.schedule import simulate_schedule
from megatron.training.log_lines import parse_log_line

FOLDER = Path(__file__).resolve().parent
QUICKSTART = FOLDER / "quickstart.json"

FONT_PX = 13
CHAR_PX = 0.602 * FONT_PX  # width of a character in the usual monospace fonts
LINE_PX = 18

BLUE, GREEN, ORANGE, RED, GREY = "#cfe2f7", "#d3edd3", "#fbe3c0", "#f7d0cf", "#eeeeee"
LINE_COLORS = ("#1f77b4", "#d95f02", "#2a9d4a", "#7b3fa0")


class Svg:
    """A drawing of `width` x `height` pixels on white, with text, boxes and arrows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width = width
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            f' viewBox="0 0 {width} {height}" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace"'
            f' font-size="{FONT_PX}">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"'
            ' orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#444"/></marker></defs>',
            f'<rect x="0" y="0" width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def text(self, x: float, y: float, text: str, anchor: str = "start", bold: bool = False) -> None:
        """One line with its baseline at y. Raises ValueError if it would leave the drawing."""
        width = CHAR_PX * len(text)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        if left < 0 or left + width > self.width:
            raise ValueError(f"text does not fit the figure: {text!r}")
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight} fill="#222">{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, lines: list[str], fill: str) -> None:
        """A box with centered lines. Raises ValueError if they do not fit."""
        if x + width > self.width:
            raise ValueError(f"box does not fit the figure: {lines}")
        if any(CHAR_PX * len(line) > width - 4 for line in lines) or LINE_PX * len(lines) > height:
            raise ValueError(f"text does not fit its box: {lines}")
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}"'
            ' stroke="#444"/>'
        )
        first = y + height / 2 - LINE_PX * (len(lines) - 1) / 2 + 0.35 * FONT_PX
        for i, line in enumerate(lines):
            self.text(x + width / 2, first + LINE_PX * i, line, anchor="middle")

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through the points, with a head at the last one."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="#444" marker-end="url(#head)"/>')

    def line(self, points: list[tuple[float, float]], color: str, width: float = 1.0) -> None:
        """A line through the points, without a head."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width:g}"/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def pipeline() -> str:
    """The layer list of 10 transformer layers on 4 stages, and the 1F1B schedule of 8 micro-batches."""
    figure = Svg(940, 400, "Layers and stages of a pipeline, and its schedule")
    figure.text(20, 28, "10 transformer layers on 4 stages, --partition-method type:transformer", bold=True)
    entries = ["embedding", *(str(i) for i in range(10)), "norm + head"]
    widths = [84, *[46] * 10, 100]
    stage_of = [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    colors = (BLUE, GREEN, ORANGE, RED)
    x = 12.0
    spans: dict[int, tuple[float, float]] = {}
    for entry, width, stage in zip(entries, widths, stage_of, strict=True):
        x += 8 if stage in spans or stage == 0 else 22
        left = spans.get(stage, (x, x))[0]
        figure.box(x, 50, width, 36, [entry], colors[stage])
        spans[stage] = (left, x + width)
        x += width
    for stage, (left, right) in spans.items():
        figure.line([(left, 94), (left, 100), (right, 100), (right, 94)], "#444")
        figure.text((left + right) / 2, 120, f"stage {stage}", anchor="middle")

    figure.text(20, 164, "One step of 8 micro-batches, --pipeline-schedule 1f1b", bold=True)
    timeline = simulate_schedule("1f1b", [1] * 4, [2] * 4, [0] * 3, 8)
    unit = 24.0
    for stage, spans_of_stage in enumerate(timeline.spans):
        y = 182 + 40 * stage
        figure.text(20, y + 22, f"stage {stage}")
        for work, start, end in spans_of_stage:
            fill = colors[stage] if work.kind == "forward" else GREY
            figure.box(100 + unit * start, y, unit * (end - start), 34, [str(work.micro_batch)], fill)
    figure.arrow((100, 352), (100 + unit * timeline.makespan, 352))
    figure.text(20, 357, "time")
    figure.text(100, 384, "Colored: forward pass. Grey: backward pass. Numbers: micro-batches. White: idle.")
    return str(figure)


def life_of_a_run() -> str:
    """A run under Slurm: start, step, signal, save, requeue, resume, and how a failure ends."""
    figure = Svg(940, 420, "The life of a run on a cluster")
    top, middle, bottom, height = 40, 180, 330, 74
    figure.box(20, top, 110, height, ["sbatch", "(queue)"], GREY)
    figure.box(170, top, 210, height, ["start: processes connect,", "flags are compared,", "preflight"], BLUE)
    figure.box(420, top, 230, height, ["load: newest complete", "checkpoint of --load,", "verified"], BLUE)
    figure.box(
        690, top, 220, height, ["step: forward, backward,", "update; save at every", "--save-interval"], GREEN
    )
    for left, right in ((130, 170), (380, 420), (650, 690)):
        figure.arrow((left, top + 37), (right, top + 37))
    figure.arrow((860, top), (860, top - 20), (740, top - 20), (740, top))

    figure.box(
        690,
        middle,
        220,
        height,
        ["last iteration, or", "SIGUSR2 10 minutes", "before the time limit"],
        ORANGE,
    )
    figure.box(420, middle, 230, height, ["save: a complete", "checkpoint, then", "`latest`"], ORANGE)
    figure.box(170, middle, 210, height, ["exit code 75:", "scontrol requeue,", "same job id"], ORANGE)
    figure.arrow((800, top + height), (800, middle))
    figure.arrow((690, middle + 37), (650, middle + 37))
    figure.arrow((420, middle + 37), (380, middle + 37))
    figure.arrow((170, middle + 37), (75, middle + 37), (75, top + height))
    figure.text(85, 140, "resume")

    figure.box(690, bottom, 220, height, ["a rank fails, hangs", "or is killed"], RED)
    figure.box(420, bottom, 230, height, ["diagnosis: first cause,", "from the reports", "of all ranks"], RED)
    figure.box(170, bottom, 210, height, ["exit code 2:", "flags, files or disk:", "correct them"], RED)
    figure.box(20, bottom, 110, height, ["exit code 0:", "finished"], GREEN)
    figure.arrow((480, middle + height), (480, 282), (75, 282), (75, bottom))
    figure.arrow((910, top + 37), (928, top + 37), (928, bottom + 37), (910, bottom + 37))
    figure.arrow((690, bottom + 37), (650, bottom + 37))
    figure.arrow((420, bottom + 37), (380, bottom + 37))
    figure.arrow((535, bottom), (535, 306), (400, 306), (400, 134), (275, 134), (275, top + height))
    figure.text(545, 316, "restart, MAX_RESTARTS times")
    return str(figure)


def checkpoint_files() -> str:
    """The files of a checkpoint, and the order in which a save makes them visible."""
    figure = Svg(940, 420, "The files of a checkpoint, and the order in which a save writes them")
    figure.text(20, 28, "PP 2 x TP 2 x DP 2, ZeRO stage 1", bold=True)
    rows = [
        (0, "checkpoints/", ""),
        (1, "latest", "name of the newest complete checkpoint"),
        (1, "latest.json", "what the program wrote there, and the lineage"),
        (1, "owner-000001.json", "job that writes here; removed at its end"),
        (1, "global_step300/", ""),
        (2, "layer_01-model_00-model_states.pt", "weights of entry 01, TP rank 0"),
        (2, "layer_01-model_01-model_states.pt", "weights of entry 01, TP rank 1"),
        (2, "...", "one file per entry with weights and TP rank"),
        (2, "mp_rank_00_model_states.pt ...", "engine state, per stage and TP rank"),
        (2, "zero_pp_rank_0_mp_rank_00_optim_states.pt ...", "optimizer state, per rank"),
        (2, "run.json", "progress, flags, digests of all files"),
    ]
    for i, (depth, name, meaning) in enumerate(rows):
        y = 54 + 21 * i
        figure.text(30 + 24 * depth, y, name, bold=name.endswith("/"))
        figure.text(500, y, meaning)
    figure.text(20, 318, "A save", bold=True)
    steps = [
        (["weights and state", "in a folder", "saving-global_step300", ".<job>"], 200, BLUE),
        (["run.json, the", "last file, with", "all sizes and", "SHA-256 digests"], 160, BLUE),
        (["files and", "folder are", "synced"], 120, GREY),
        (["renamed to", "global_step300:", "complete"], 150, GREEN),
        (["`latest` names", "it"], 140, GREEN),
    ]
    x = 20.0
    for i, (lines, width, fill) in enumerate(steps):
        figure.box(x, 328, width, 82, lines, fill)
        x += width
        if i < len(steps) - 1:
            figure.arrow((x, 369), (x + 32, 369))
        x += 32
    return str(figure)


def quickstart_loss() -> str:
    """The losses of `make train`, from quickstart.json: one point per line of its log."""
    losses = json.loads(QUICKSTART.read_text())
    training, validation = losses["training"], losses["validation"]
    figure = Svg(940, 390, "Losses of make train, by iteration")
    left, right, top, bottom = 70.0, 920.0, 20.0, 310.0
    last = training[-1][0]
    low, high = math.floor(min(loss for _, loss in training)), math.ceil(max(loss for _, loss in training))

    def point(iteration: int, loss: float) -> tuple[float, float]:
        return left + (right - left) * iteration / last, bottom - (bottom - top) * (loss - low) / (high - low)

    figure.line([(left, top), (left, bottom), (right, bottom)], "#444")
    for loss in range(low, high + 1):
        _, y = point(0, loss)
        figure.line([(left - 5, y), (left, y)], "#444")
        figure.text(left - 10, y + 4, str(loss), anchor="end")
    for quarter in range(5):
        x, _ = point(last * quarter // 4, low)
        figure.text(x, bottom + 20, str(last * quarter // 4), anchor="end" if quarter == 4 else "middle")
    figure.text((left + right) / 2, bottom + 40, "iteration (vertical: lm loss)", anchor="middle")
    figure.line([point(*pair) for pair in training], LINE_COLORS[0], 1.8)
    for pair in validation:
        x, y = point(*pair)
        figure.line([(x - 6, y), (x + 6, y)], LINE_COLORS[1], 6)
    for i, name in enumerate(("training", "validation")):
        y = 50 + 20 * i
        figure.line([(620, y - 4), (660, y - 4)], LINE_COLORS[i], 3)
        figure.text(672, y, name)
    return str(figure)


# Title and schedule; warm-up over 100 of 1,000 iterations, minimum 0.1 of the maximum.
SCHEDULES = {
    "cosine": {"lr_decay_style": "cosine"},
    "inverse-square-root": {"lr_decay_style": "inverse-square-root"},
    "WSD minus_sqrt": {
        "lr_decay_style": "WSD",
        "lr_wsd_decay_style": "minus_sqrt",
        "lr_wsd_decay_iters": 200,
    },
    "branch at 500, exponential": {
        "lr_decay_style": "WSD",
        "lr_wsd_decay_style": "exponential",
        "lr_wsd_decay_iters": 200,
        "lr_decay_iters": 700,
    },
}


def learning_rates() -> str:
    """The learning rate of four schedules, computed by the program."""
    figure = Svg(760, 400, "Learning-rate schedules")
    figure.text(20, 28, "Warm-up over 100 of 1,000 iterations, --min-lr 0.1 x --lr", bold=True)
    left, right, top, bottom = 70, 730, 50, 270
    figure.line([(left, top), (left, bottom), (right, bottom)], "#444")
    for share in (0.0, 0.5, 1.0):
        figure.text(left - 10, bottom - share * (bottom - top) + 4, f"{share:g}", anchor="end")
    for step in (100, 500, 700, 800, 1000):
        x = left + (right - left) * step / 1000
        figure.text(x, bottom + 20, str(step), anchor="end" if step == 1000 else "middle")
    figure.text((left + right) / 2, bottom + 40, "iteration (vertical: share of --lr)", anchor="middle")
    for i, (name, flags) in enumerate(SCHEDULES.items()):
        section = ScheduleConfig(lr=1.0, min_lr=0.1, lr_warmup_iters=100, **flags)  # type: ignore[arg-type]
        schedule = LearningRateSchedule.from_config(section, TrainingConfig(train_iters=1000), 1)
        end = section.lr_decay_iters or 1000
        points = [
            (
                left + (right - left) * step / 1000,
                bottom - schedule.lr(Progress(step, step, step)) * (bottom - top),
            )
            for step in range(0, end + 1, 5)
        ]
        figure.line(points, LINE_COLORS[i], 1.8)
        y = 330 + 20 * i
        figure.line([(left, y - 4), (left + 40, y - 4)], LINE_COLORS[i], 3)
        figure.text(left + 52, y, name)
    return str(figure)


def read_quickstart_log(log: Path) -> None:
    """Write the losses of a console log of `make train` to quickstart.json."""
    losses: dict[str, list] = {"training": [], "validation": []}
    for line in filter(None, map(parse_log_line, log.read_text().splitlines())):
        if "iteration" in line:
            losses[str(line["kind"])].append([line["iteration"], line["lm_loss"]])
    QUICKSTART.write_text(json.dumps(losses) + "\n")


FIGURES = {
    "pipeline.svg": pipeline,
    "life_of_a_run.svg": life_of_a_run,
    "checkpoint_files.svg": checkpoint_files,
    "learning_rates.svg": learning_rates,
    "quickstart_loss.svg": quickstart_loss,
}


def main() -> None:
    """Write all figures; with a log of `make train` as the argument, read its losses first."""
    for log in sys.argv[1:]:
        read_quickstart_log(Path(log))
    for name, draw in FIGURES.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()
