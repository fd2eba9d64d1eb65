#!/usr/bin/env python
"""Tell how a run went, from its console logs, as a table and a picture.

    python tools/job_report.py smoke-*.out
    python tools/job_report.py run1.log run2.log --output run.png

Reads the lines of this repo and of Megatron-LM and Megatron-DeepSpeed, of any age. Several logs are one run
in pieces, in order. The table has a row for each start. The picture has loss, grad norm, learning rate and
throughput over the steps; where starts overlap (a resume from an older checkpoint), the later one counts.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.config import ConfigError, exit_on_config_error
from megatron.config.tool_parser import ToolParser
from megatron.text_table import format_table
from megatron.training.logging.log_lines import ParsedLine, parse_log_line


@dataclass
class Start:
    """What one start of the run has logged: its training lines, by the step at their end."""

    log: str
    lines: list[ParsedLine] = field(default_factory=list)

    @property
    def iterations(self) -> list[int]:
        """The steps of the lines, ascending."""
        return [int(line["iteration"]) for line in self.lines]

    def values(self, name: str) -> list[float]:
        """A field of all lines that have it."""
        return [float(line[name]) for line in self.lines if name in line]


@dataclass
class Run:
    """The starts in order, and validation losses by the name of their data and the step."""

    starts: list[Start] = field(default_factory=list)
    validation: dict[str, dict[int, float]] = field(default_factory=dict)

    def curve(self, name: str) -> dict[int, float]:
        """A field by step; of steps that were run twice, the later value."""
        values: dict[int, float] = {}
        for start in self.starts:
            values.update({int(x["iteration"]): float(x[name]) for x in start.lines if name in x})
        return dict(sorted(values.items()))

    def steps_run_again(self) -> int:
        """Steps that were lost with what had not been saved, as far as their lines tell."""
        pairs = zip(self.starts[:-1], self.starts[1:], strict=True)
        return sum(max(a.iterations[-1] - b.iterations[0] + 1, 0) for a, b in pairs)


def read_run(logs: Iterable[tuple[str, Iterable[str]]]) -> Run:
    """Collects the training and validation lines of logs, each a name and its lines."""
    run = Run()
    iteration = 0
    for name, lines in logs:
        start = Start(name)
        for line in lines:
            parsed = parse_log_line(line)
            if parsed is None:
                continue
            # An evaluation at the end of training may name no iteration: it belongs to the last one seen.
            previous, iteration = iteration, int(parsed.get("iteration", iteration))
            if parsed["kind"] == "validation":
                run.validation.setdefault(str(parsed["name"]), {})[iteration] = float(parsed["lm_loss"])
                continue
            if "samples_per_second" not in parsed and parsed.get("seconds_per_iteration"):
                batch = float(parsed.get("global_batch_size", 0))
                parsed["samples_per_second"] = batch / float(parsed["seconds_per_iteration"])
            if start.lines and iteration <= previous:  # a job that was requeued goes on in the same log
                run.starts.append(start)
                start = Start(name)
            start.lines.append(parsed)
        if start.lines:
            run.starts.append(start)
    return run


def report(run: Run) -> str:
    """The table: a row per start, a line per validation data, and what was run again."""
    head = ["log", "steps", "lm loss", "smallest", "grad norm", "largest", "rate", "skipped", "s/step"]
    rows = [[*head, "samples/s", "TFLOPs"], *(_row(start) for start in run.starts)]
    lines = [format_table(rows)]
    for name, values in sorted(run.validation.items()):
        best = min(values, key=values.__getitem__)
        last = max(values)
        lines.append(
            f"{name} loss {values[last]:.4f} at step {last:,}, smallest {values[best]:.4f} at step {best:,}"
        )
    if again := run.steps_run_again():
        lines.append(f"{again:,} steps were run again after a restart")
    return "\n".join(lines)


def _row(start: Start) -> list[str]:
    def one(name: str, choose: str, form: str) -> str:
        values = start.values(name)
        if not values:
            return "-"
        chosen = {"last": values[-1], "min": min(values), "max": max(values), "sum": sum(values)}
        return format(chosen.get(choose, statistics.median(values)), form)

    return [
        start.log,
        f"{start.iterations[0]:,}-{start.iterations[-1]:,}",
        one("lm_loss", "last", ".4f"),
        one("lm_loss", "min", ".4f"),
        one("grad_norm", "median", ".3f"),
        one("grad_norm", "max", ".3f"),
        one("learning_rate", "last", ".2e"),
        one("number_of_skipped_iterations", "sum", ".0f"),
        one("seconds_per_iteration", "median", ".3g"),
        one("samples_per_second", "median", ".4g"),
        one("tflops_per_device", "median", ".3g"),
    ]


def draw(run: Run, title: str, output: Path) -> None:
    """Writes the picture: losses, then grad norm, learning rate and throughput, over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        4, 1, sharex=True, figsize=(9, 9), height_ratios=(4, 2, 1, 1), layout="constrained"
    )
    losses, *others = axes
    losses.plot(*_points(run.curve("lm_loss")), color="tab:blue", linewidth=1, label="training")
    for i, (name, values) in enumerate(sorted(run.validation.items()), start=1):
        losses.plot(*_points(values), color=f"C{i}", marker="o", markersize=4, linewidth=1, label=name)
    losses.set_ylabel("lm loss (nats per token)")
    losses.set_title(title)
    losses.legend()
    labels = {
        "grad_norm": "grad norm",
        "learning_rate": "rate",
        "samples_per_second": "samples / s",
    }
    for axis, (name, label) in zip(others, labels.items(), strict=True):
        axis.plot(*_points(run.curve(name)), color="tab:gray", linewidth=1)
        axis.set_ylabel(label)
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("iteration")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


def _points(values: dict[int, float]) -> tuple[list[int], list[float]]:
    iterations = sorted(values)
    return iterations, [values[iteration] for iteration in iterations]


def build_parser() -> ToolParser:
    """The flags."""
    parser = ToolParser(__doc__)
    parser.add_argument(
        "logs", nargs="+", type=Path, metavar="LOG", help="console log, in the order of the run"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("job_report.png"), help="PNG to write (default: job_report.png)"
    )
    parser.add_argument("--title", default="", help="text above the picture (default: the last log's name)")
    return parser


def run(argv: Sequence[str] | None) -> None:
    """Do the work; ConfigError for a user's mistake."""
    options = build_parser().parse_args(argv)
    try:
        texts = [(log.name, log.read_text(encoding="utf-8", errors="replace")) for log in options.logs]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    found = read_run((name, text.splitlines()) for name, text in texts)
    if not found.starts and not found.validation:
        names = ", ".join(str(log) for log in options.logs)
        raise ConfigError(
            f"no training or validation line is in {names}: expected console logs of pretrain_gpt.py"
        )
    print(report(found))
    try:
        draw(found, options.title or options.logs[-1].name, options.output)
    except OSError as error:
        raise ConfigError(f"--output {options.output} cannot be written: {error.strerror}") from error
    print(f"wrote {options.output}")


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with code 2, and one sentence, for a user's mistake."""
    with exit_on_config_error():
        run(argv)


if __name__ == "__main__":
    main()
