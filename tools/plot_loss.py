"""Draws the losses of one run from its console logs: `tools/plot_loss.py LOG [LOG ...] --output loss.png`.

Reads the lines of this repo and of Megatron-LM and Megatron-DeepSpeed. Several logs are one run in pieces, in
order: where they overlap (a resume from an older checkpoint), the later one counts.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron.training.log_lines import parse_log_line


@dataclass
class Curves:
    """Values by iteration; validation losses by the name of the data they were measured on."""

    loss: dict[int, float] = field(default_factory=dict)
    learning_rate: dict[int, float] = field(default_factory=dict)
    validation: dict[str, dict[int, float]] = field(default_factory=dict)


def read_curves(lines: Iterable[str]) -> Curves:
    """Collects the training and validation lines among `lines`."""
    curves = Curves()
    iteration = 0
    for line in lines:
        parsed = parse_log_line(line)
        if parsed is None:
            continue
        # An evaluation at the end of training names no iteration: it belongs to the last one seen.
        iteration = int(parsed.get("iteration", iteration))
        if parsed["kind"] == "validation":
            curves.validation.setdefault(str(parsed["name"]), {})[iteration] = float(parsed["lm_loss"])
            continue
        if "lm_loss" in parsed:
            curves.loss[iteration] = float(parsed["lm_loss"])
        if "learning_rate" in parsed:
            curves.learning_rate[iteration] = float(parsed["learning_rate"])
    return curves


def draw(curves: Curves, title: str, output: Path) -> None:
    """Writes the picture: losses above, the learning rate below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(
        2, 1, sharex=True, figsize=(9, 6), height_ratios=(4, 1), layout="constrained"
    )
    upper.plot(*_points(curves.loss), color="tab:blue", linewidth=1, label="training")
    for (name, values), color in zip(sorted(curves.validation.items()), _colors(), strict=False):
        upper.plot(*_points(values), color=color, marker="o", markersize=4, linewidth=1, label=name)
    upper.set_ylabel("lm loss (nats per token)")
    upper.set_title(title)
    upper.grid(alpha=0.3)
    upper.legend()
    lower.plot(*_points(curves.learning_rate), color="tab:gray", linewidth=1)
    lower.set_ylabel("learning rate")
    lower.set_xlabel("iteration")
    lower.grid(alpha=0.3)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


def _points(values: dict[int, float]) -> tuple[list[int], list[float]]:
    iterations = sorted(values)
    return iterations, [values[iteration] for iteration in iterations]


def _colors() -> Iterable[str]:
    while True:
        yield from ("tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:olive", "tab:cyan")


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status: 0, or 2 with one sentence on stderr."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "logs", nargs="+", type=Path, metavar="LOG", help="console log, in the order of the run"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("loss.png"), help="PNG to write (default: loss.png)"
    )
    parser.add_argument("--title", default="", help="text above the picture (default: the last log's path)")
    options = parser.parse_args(argv)
    lines: list[str] = []
    names = ", ".join(str(log) for log in options.logs)
    try:
        for log in options.logs:
            lines += log.read_text(encoding="utf-8", errors="replace").splitlines()
        curves = read_curves(lines)
        if not curves.loss and not curves.validation:
            print(f"plot_loss: no training or validation line is in {names}", file=sys.stderr)
            return 2
        draw(curves, options.title or str(options.logs[-1]), options.output)
    except OSError as error:
        print(f"plot_loss: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    steps, evaluations = len(curves.loss), sum(len(values) for values in curves.validation.values())
    print(f"wrote {options.output}: {steps} training and {evaluations} validation points from {names}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
