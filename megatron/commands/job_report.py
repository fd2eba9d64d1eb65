"""Summarizes the console logs of a run, or compares several runs, as a table and a plot.

    python tools/job_report.py smoke-*.out
    python tools/job_report.py first_part.log second_part.log --output run.png
    python tools/job_report.py --compare baseline.log other.log --output comparison.png

The tool reads logs of this repository, Megatron-LM and Megatron-DeepSpeed. Several logs are the parts of one
run, in order. The table has one row per start of the program. The plot shows loss, grad norm, learning rate
and throughput over the iterations. If an iteration ran twice (a resume from an older checkpoint), its last
values are shown.

With --compare, each log is a run. The table has one row per run, with the last loss and the loss at the last
iteration that all runs have. A line per further run has the relative difference of its losses from the first
run's. The plot shows losses, grad norms and throughput of all runs.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.tool_parser import ToolParser
from megatron.errors import UserError, exit_on_user_error, printable
from megatron.planner.plots import new_figure
from megatron.text_table import format_table
from megatron.training.log_lines import ParsedLine, parse_log_line, read_log_lines

# Lines with the iteration at which training begins, as this program and Megatron print them.
_LOADED = {
    "starting from ": re.compile(r", iteration (\d{1,18})"),
    "successfully loaded checkpoint ": re.compile(r" at iteration (\d{1,18})"),
}
_FROM_SCRATCH = "initializing from scratch"
# Fields that the plots show below the loss, and their labels.
_LABELS = {"grad_norm": "grad norm", "learning_rate": "lr", "samples_per_second": "samples / s"}
# Larger values are not drawn, because their sums overflow in matplotlib.
_MOST_DRAWN = 1e100
_DASHES = ("-", "--", ":", "-.")


@dataclass
class Start:
    """The training lines of one start of the program, ascending by iteration. begin: iteration of the loaded
    checkpoint; 0 for a start from scratch; None if the log does not name it."""

    log: str
    lines: list[ParsedLine] = field(default_factory=list)
    begin: int | None = None

    @property
    def iterations(self) -> list[int]:
        """Returns the iterations of the lines, ascending."""
        return [int(line["iteration"]) for line in self.lines]

    def values(self, name: str) -> list[float]:
        """Returns the values of a field in all lines that have it."""
        return [float(line[name]) for line in self.lines if name in line]


@dataclass
class Run:
    """A run: its starts in order, and its validation losses (name of the data set -> iteration -> loss)."""

    starts: list[Start] = field(default_factory=list)
    validation: dict[str, dict[int, float]] = field(default_factory=dict)

    def curve(self, name: str) -> dict[int, float]:
        """Returns iteration -> value of a field. An iteration that ran twice has the later value."""
        values: dict[int, float] = {}
        for start in self.starts:
            values.update({int(x["iteration"]): float(x[name]) for x in start.lines if name in x})
        return dict(sorted(values.items()))

    def median(self, name: str) -> float | None:
        """Returns the median of a field over all lines that have the field; None if no line has it."""
        values = [value for start in self.starts for value in start.values(name)]
        return statistics.median(values) if values else None

    def repeated_iterations(self) -> int:
        """Returns the number of logged iterations that ran again after a restart."""
        begins = [s.iterations[0] - 1 if s.begin is None else s.begin for s in self.starts]
        pairs = zip(self.starts[:-1], begins[1:], strict=True)
        return sum(max(start.iterations[-1] - begin, 0) for start, begin in pairs)


def read_run(logs: Iterable[tuple[str, Iterable[str]]]) -> Run:
    """Returns the run that several logs contain. logs: (name, lines) of each log, in order."""
    run = Run()
    iteration = 0
    for name, lines in logs:
        start = Start(name)
        for line in lines:
            parsed = parse_log_line(line)
            if (begin := _begin_of(line)) is not None:
                if start.lines:  # a requeued job continues the same log
                    run.starts.append(start)
                    start = Start(name)
                start.begin = begin
            if parsed is None:
                continue
            # A validation line at the end of training may have no iteration; it belongs to the last
            # iteration.
            previous, iteration = iteration, int(parsed.get("iteration", iteration))
            if parsed["kind"] == "validation":
                run.validation.setdefault(str(parsed["name"]), {})[iteration] = float(parsed["lm_loss"])
                continue
            if "samples_per_second" not in parsed and parsed.get("seconds_per_iteration"):
                batch = float(parsed.get("global_batch_size", 0))
                parsed["samples_per_second"] = batch / float(parsed["seconds_per_iteration"])
            if start.lines and iteration <= previous:
                run.starts.append(start)
                start = Start(name)
            _add_token_rate(parsed, start.lines[-1] if start.lines else {})
            start.lines.append(parsed)
        if start.lines:
            run.starts.append(start)
    return run


def _begin_of(line: str) -> int | None:
    """Returns the iteration at which training begins, if the line says so; else None."""
    for words, iteration in _LOADED.items():
        # The last number is the iteration, because the name of a checkpoint before it may contain numbers.
        if found := iteration.findall(line.partition(words)[2]):
            return int(found[-1])
    return 0 if _FROM_SCRATCH in line else None


def _add_token_rate(line: ParsedLine, previous: ParsedLine) -> None:
    """Adds tokens_per_second to a training line. previous: previous line of the start; {} for the first
    line."""
    tokens, samples = (
        float(line.get(name, 0)) - float(previous.get(name, 0))
        for name in ("consumed_tokens", "consumed_samples")
    )
    if tokens > 0 and samples > 0 and "samples_per_second" in line:
        line["tokens_per_second"] = tokens / samples * float(line["samples_per_second"])


def report(run: Run) -> str:
    """Returns a table with a row per start, a line per validation data set, and the number of repeated
    iterations."""
    head = ["log", "iterations", "lm loss", "lowest", "grad norm", "highest", "lr", "skipped", "s/iteration"]
    rows = [[*head, "samples/s", "TFLOPs"], *(_row(start) for start in run.starts)]
    lines = [format_table(rows)]
    for name, values in sorted(run.validation.items()):
        best = min(values, key=values.__getitem__)
        last = max(values)
        lines.append(
            f"{name} loss {values[last]:.4f} at iteration {last:,}, "
            f"lowest {values[best]:.4f} at iteration {best:,}"
        )
    if repeated := run.repeated_iterations():
        lines.append(f"{repeated:,} iterations were repeated after a restart")
    for before, start in zip(run.starts[:-1], run.starts[1:], strict=True):
        if start.begin == 0 and start.log != before.log:
            lines.append(
                f"note: {start.log} begins from scratch: if it belongs to a second run, use --compare"
            )
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


def comparison(runs: Mapping[str, Run]) -> str:
    """Returns the table of --compare, with one row per run. runs: name -> run. For runs of different lengths,
    the table has the loss at the last iteration that all runs have."""
    curves = {name: run.curve("lm_loss") for name, run in runs.items()}
    common = max(set.intersection(*map(set, curves.values())), default=None)
    at_common = [] if common is None else [f"at {common:,}"]
    evaluated = sorted({name for run in runs.values() for name in run.validation})
    rates = {"s/iteration": "seconds_per_iteration", "tokens/s": "tokens_per_second"}
    rates["TFLOPs"] = "tflops_per_device"
    rows = [
        ["run", "iterations", "lm loss", *at_common, *(f"{x} loss" for x in evaluated), *rates, "restarts"]
    ]
    for name, run in runs.items():
        losses = [curves[name], *(run.validation.get(x, {}) for x in evaluated)]
        shown = [f"{values[max(values)]:.4f}" if values else "-" for values in losses]
        medians = [run.median(field) for field in rates.values()]
        rows.append(
            [
                name,
                f"{run.starts[-1].iterations[-1]:,}",
                *shown[:1],
                *([] if common is None else [f"{curves[name][common]:.4f}"]),
                *shown[1:],
                *("-" if median is None else f"{median:,.4g}" for median in medians),
                str(len(run.starts) - 1),
            ]
        )
    return "\n".join((format_table(rows), *_differences(curves)))


def _differences(curves: Mapping[str, Mapping[int, float]]) -> Iterator[str]:
    """Yields a line per run after the first, about its losses at the iterations that both runs have."""
    (first, reference), *others = curves.items()
    for name, curve in others:
        common = sorted(reference.keys() & curve.keys())
        errors = [abs(curve[i] - reference[i]) / (abs(reference[i]) or 1.0) for i in common]
        if errors:
            worst = max(errors)
            yield (
                f"{name} differs from {first} by {errors[0]:.1e} of lm loss at iteration {common[0]:,}, by "
                f"at most {worst:.1e} at iteration {common[errors.index(worst)]:,} ({len(common):,} compared)"
            )


def draw_comparison(runs: Mapping[str, Run], title: str, output: Path) -> None:
    """Writes the plot of --compare: losses, grad norms and throughput of all runs over the iterations.
    Training losses are lines, validation losses are dots."""
    labels = {name: _LABELS[name] for name in ("grad_norm", "samples_per_second")}
    with _figure(output, 3, figsize=(9, 9), height_ratios=(4, 2, 2)) as (losses, *others):
        for i, (name, run) in enumerate(runs.items()):
            # Each line is thinner than the line before, so that all of several equal runs are visible. After
            # ten runs the colors repeat with a different dash pattern.
            style = {
                "color": f"C{i % 10}",
                "linestyle": _DASHES[i // 10 % len(_DASHES)],
                "linewidth": 1 + 5 * (len(runs) - 1 - i) / len(runs),
            }
            losses.plot(*_points(run.curve("lm_loss")), **style, label=name)
            for values in run.validation.values():
                losses.plot(*_points(values), color=style["color"], marker="o", markersize=4, linestyle="")
            for axis, field_name in zip(others, labels, strict=True):
                axis.plot(*_points(run.curve(field_name)), **style)
        losses.set_ylabel("lm loss (nats per token), dots: validation")
        losses.set_title(title)
        losses.legend(fontsize="small", ncols=1 + len(runs) // 12)
        for axis, label in zip(others, labels.values(), strict=True):
            axis.set_ylabel(label)


def draw(run: Run, title: str, output: Path) -> None:
    """Writes the plot: losses, grad norm, learning rate and throughput over the iterations."""
    with _figure(output, 4, figsize=(9, 9), height_ratios=(4, 2, 1, 1)) as (losses, *others):
        losses.plot(*_points(run.curve("lm_loss")), color="tab:blue", linewidth=1, label="training")
        for i, (name, values) in enumerate(sorted(run.validation.items()), start=1):
            losses.plot(*_points(values), color=f"C{i}", marker="o", markersize=4, linewidth=1, label=name)
        losses.set_ylabel("lm loss (nats per token)")
        losses.set_title(title)
        losses.legend()
        for axis, (name, label) in zip(others, _LABELS.items(), strict=True):
            axis.plot(*_points(run.curve(name)), color="tab:gray", linewidth=1)
            axis.set_ylabel(label)


@contextmanager
def _figure(output: Path, rows: int, **options: Any) -> Iterator[Sequence[Any]]:
    """Yields axes over the iterations, one below the other, and writes them to `output` at the end."""
    with new_figure(output, rows, sharex=True, **options) as (_, axes):
        yield axes[:, 0]
        for axis in axes[:, 0]:
            axis.grid(alpha=0.3)
        axes[-1, 0].set_xlabel("iteration")
        axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)


def _points(values: dict[int, float]) -> tuple[list[int], list[float]]:
    iterations = sorted(iteration for iteration, value in values.items() if not abs(value) > _MOST_DRAWN)
    return iterations, [values[iteration] for iteration in iterations]


def build_parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument(
        "logs", nargs="+", type=Path, metavar="LOG", help="console logs, in the order of the run"
    )
    parser.add_argument(
        "--compare", action="store_true", help="compare runs: each log is one run, including its restarts"
    )
    parser.add_argument("--output", type=Path, default=Path("job_report.png"), help="PNG file to write")
    parser.add_argument(
        "--title",
        default="",
        help="title of the plot (default: the name of the last log; none with --compare)",
    )
    return parser


def read_logs(logs: Sequence[Path]) -> Run:
    """Returns the run in these logs. Raises UserError if they cannot be read, or contain no line of a run."""
    try:
        found = read_run((log.name, read_log_lines(log)) for log in logs)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
    if not found.starts and not found.validation:
        raise UserError(
            f"no training or validation line in {', '.join(map(str, logs))}: expected console logs of "
            "pretrain_gpt.py"
        )
    return found


def read_runs(logs: Sequence[Path]) -> dict[str, Run]:
    """Returns name -> run for each log. The name is the file name, or the path if the file names are not
    unique."""
    if len(set(logs)) < 2 or len(set(logs)) < len(logs):
        raise UserError(f"--compare {' '.join(map(str, logs))}: expected at least 2 different logs")
    runs = {log: read_logs([log]) for log in logs}
    for log, run in runs.items():
        if not run.starts:
            raise UserError(f"--compare: no training line in {log}")
    is_unique = len({log.name for log in logs}) == len(logs)
    return {log.name if is_unique else str(log): run for log, run in runs.items()}


@exit_on_user_error()
def main(argv: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(argv)
    try:
        if options.compare:
            runs = read_runs(options.logs)
            print(printable(comparison(runs)))
            draw_comparison(runs, options.title, options.output)
        else:
            found = read_logs(options.logs)
            print(printable(report(found)))
            draw(found, options.title or options.logs[-1].name, options.output)
    except (OSError, ValueError) as error:  # ValueError: an unknown format
        raise UserError(f"--output {options.output} cannot be written: {error}") from error
    print(printable(f"wrote {options.output}"))


if __name__ == "__main__":
    main()
