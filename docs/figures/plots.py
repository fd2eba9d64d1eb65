"""Plots of the documentation: pipeline schedules, learning rates and losses, computed by the program."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path

from svg import LINE_COLORS, Svg

from megatron.config import ScheduleConfig, TrainingConfig
from megatron.optimizer.schedule import LearningRateSchedule, Progress
from megatron.pipeline.schedule import simulate_schedule

QUICKSTART = Path(__file__).resolve().parent / "quickstart.json"
CONSOLE = QUICKSTART.with_name("console.txt")

# Name, stages per rank, and a note.
PIPELINES = (
    ("1f1b", 1, "one stage per rank"),
    ("interleaved", 2, "--virtual-pipeline-stages 2"),
    ("dualpipev", 2, "two stages per rank, first and last on rank 0"),
    ("zero-bubble", 1, "one stage per rank, separate weight-gradient passes"),
)
RANKS, MICRO_BATCHES = 4, 8
UNIT_PX = 20.6
# Fill for the first and for the second stage of a rank.
FILLS = {
    "forward": ("#a9d3f2", "#56a0d3"),
    "backward": ("#fad79c", "#e39a2d"),
    "weight": ("#8fd3b6", "#8fd3b6"),
}


def schedules() -> str:
    """The pipeline schedules on 4 ranks with 8 micro-batches: passes by kind, and the pipeline bubble."""
    figure = Svg(800, 646, "Timelines of the pipeline schedules on 4 ranks with 8 micro-batches")
    figure.text(20, 28, "One step of 8 micro-batches on 4 pipeline ranks, by --pipeline-schedule", bold=True)
    y = 60.0
    for name, stages_per_rank, note in PIPELINES:
        # A rank's layers take 1 unit forward and 2 backward, divided over its stages. Messages take no time.
        stages = RANKS * stages_per_rank
        times = [[units / stages_per_rank] * stages for units in (1, 2)]
        interleaves = stages_per_rank if name == "interleaved" else None
        timeline = simulate_schedule(name, *times, [0] * (stages - 1), MICRO_BATCHES, interleaves)
        bubble = 100 * sum(timeline.bubble_shares) / RANKS
        figure.text(20, y, f"{name}: bubble {bubble:.0f} %, step {timeline.makespan:g} units", bold=True)
        figure.text(780, y, note, anchor="end", size=12)
        for rank, spans in enumerate(timeline.spans):
            figure.text(20, y + 24 + 24 * rank, f"rank {rank}", size=12)
            for (kind, micro_batch, stage), start, end in spans:
                fill = FILLS[kind][stage >= RANKS]
                x, width = 76 + UNIT_PX * start, UNIT_PX * (end - start)
                size = 12 if width > 12 else 10
                figure.box(x, y + 9 + 24 * rank, width, 21, [str(micro_batch)], fill, size=size)
        y += 134
    y -= 12
    legend = (
        ("forward", "forward pass"),
        ("backward", "backward pass (zero-bubble: gradients of activations only)"),
        ("weight", "gradients of weights"),
    )
    x = 20.0
    for kind, text in legend:
        figure.box(x, y - 10, 16, 13, [], FILLS[kind][0])
        figure.text(x + 22, y + 1, text, size=12)
        x += 22 + 7.23 * len(text) + 20
    figure.text(
        20,
        y + 22,
        "Numbers: micro-batches. Darker: the rank's second stage. White: idle (the bubble).",
        size=12,
    )
    figure.text(
        20, y + 40, "A rank's layers take 1 unit forward and 2 backward; messages take no time.", size=12
    )
    return str(figure)


def quickstart_loss() -> str:
    """The losses of `make train`, from quickstart.json: one point per line of its log."""
    losses = json.loads(QUICKSTART.read_text())
    training, validation = losses["training"], losses["validation"]
    figure = Svg(800, 390, "Losses of make train, by iteration")
    left, right, top, bottom = 70.0, 780.0, 20.0, 310.0
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
        figure.line([(560, y - 4), (600, y - 4)], LINE_COLORS[i], 3)
        figure.text(612, y, name)
    return str(figure)


def console() -> str:
    """Draws console.txt: what a dry run and a resumed run print, shortened."""
    figure = Svg(900, 502, "What a dry run and a resumed run print, shortened")
    y = 26
    for line in CONSOLE.read_text().splitlines():
        # A line that begins with spaces, the row of a table, is short enough.
        for part in textwrap.wrap(line, 122, subsequent_indent=11 * " ") if line[:1].strip() else [line]:
            # Browsers would draw several spaces as one.
            text = part.replace(" ", "\N{NO-BREAK SPACE}")
            figure.text(12, y, text, bold=line.startswith("$"), size=12)
            y += 17
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
