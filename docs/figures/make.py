"""Writes the SVG figures of the documentation, next to this file: `python docs/figures/make.py`.

`python docs/figures/make.py runs/quickstart/train.log` first reads the losses of a `make train` into
quickstart.json. What a figure shows of ranks, stages, schedules and files is computed by the program.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import diagrams
import plots

from megatron.training.log_lines import parse_log_line

FIGURES = {
    "layout.svg": diagrams.layout,
    "partition.svg": diagrams.partition,
    "schedules.svg": plots.schedules,
    "batch.svg": diagrams.batch,
    "checkpoint_files.svg": diagrams.checkpoint_files,
    "life_of_a_run.svg": diagrams.life_of_a_run,
    "learning_rates.svg": plots.learning_rates,
    "quickstart_loss.svg": plots.quickstart_loss,
    "console.svg": plots.console,
}


def read_quickstart_log(log: Path) -> None:
    """Writes the losses of a console log of `make train` to quickstart.json."""
    losses: dict[str, list] = {"training": [], "validation": []}
    for line in filter(None, map(parse_log_line, log.read_text().splitlines())):
        if "iteration" in line:
            losses[str(line["kind"])].append([line["iteration"], line["lm_loss"]])
    plots.QUICKSTART.write_text(json.dumps(losses) + "\n")


def main() -> None:
    """Writes all figures; with a log of `make train` as the argument, reads its losses first."""
    for log in sys.argv[1:]:
        read_quickstart_log(Path(log))
    for name, draw in FIGURES.items():
        (Path(__file__).resolve().parent / name).write_text(draw())


if __name__ == "__main__":
    main()
