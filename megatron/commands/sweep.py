"""Plans, runs and compares a training command with several values of some flags.

    python tools/sweep.py plan --vary --partition-method memory time --vary --micro-batch-size 1 2 -- FLAGS
    python tools/sweep.py run runs/sweep --steps 10 --repeat 3 --vary --zero-stage 0 1 -- FLAGS
    python tools/sweep.py report runs/sweep

FLAGS are flags of pretrain_gpt.py. Every combination of the values of all --vary flags is a row of the sweep.
The flags of a row override FLAGS. The values 'on' and 'off' set and remove a switch, '' removes a flag, and
'0.9 0.1' are two values of one flag. The number of processes is --world-size, or the tensor-parallel times
the pipeline-parallel size.

plan    checks every combination and prints what the planner predicts; nothing runs, no data is needed.
run     runs every combination --repeat times, interleaved, and prints the report. If you run the command
        again, it continues an interrupted sweep; new values extend the sweep. With --sbatch, an array of
        Slurm jobs executes the runs.
report  prints the table of a folder, and writes report.md, .csv, .png and .json into it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config import LoggingConfig
from megatron.config.mistakes import Mistakes
from megatron.config.tool_parser import ToolParser, exit_on_interrupt
from megatron.errors import UserError, exit_on_user_error, printable
from megatron.files import read_json, write_atomically, write_json
from megatron.planner.page import write_page
from megatron.planner.plots import draw_summary
from megatron.planner.sweep.axes import make_rows, split_command
from megatron.planner.sweep.file_checks import MAX_REPEAT
from megatron.planner.sweep.folder import Record, SweepFolder, now_text, version_and_host
from megatron.planner.sweep.local import run_sweep
from megatron.planner.sweep.slurm import read_base_command, submit
from megatron.planner.sweep.summary import summarize
from megatron.planner.sweep.table import remarks, report_csv, report_markdown, report_text


class _SweepParser(ToolParser):
    """A parser that separates --vary and the base command from the tool's own arguments."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        words, axes, base = split_command(sys.argv[1:] if args is None else args)
        mistakes = Mistakes()
        options = self.collect(words, mistakes)
        options.axes, options.base = axes, base
        if options.action == "report" and (axes or base):
            mistakes.add(
                "report takes only a folder: it shows the runs that were made; remove --vary and the "
                "command after --"
            )
        elif options.action != "report":
            with mistakes.collect():
                make_rows(axes, base)
        mistakes.raise_all()
        return options

    def parse_known(self, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
        return self.parse_known_intermixed_args(words)

    def check_values(self, parsed: argparse.Namespace, mistakes: Mistakes) -> None:
        if parsed.steps < 1 or not 1 <= parsed.repeat <= MAX_REPEAT:
            mistakes.add(
                f"--steps {parsed.steps} --repeat {parsed.repeat}: expected at least 1, and at most "
                f"{MAX_REPEAT:,} repeats"
            )


def build_parser() -> ToolParser:
    parser = _SweepParser(__doc__)
    parser.add_argument("action", choices=("plan", "run", "report"), help="plan, run or report, see above")
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("runs/sweep"),
        help="folder of the sweep (default: runs/sweep); `plan` does not use it",
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="number of steps per run; the second half is measured"
    )
    parser.add_argument("--repeat", type=int, default=1, help="number of runs per combination")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="end a run after S seconds (default: no limit)"
    )
    parser.add_argument("--retry-failed", action="store_true", help="repeat the combinations that failed")
    parser.add_argument(
        "--sbatch",
        metavar="SCRIPT",
        help="submit this script of examples/slurm as an array of jobs; the tool first executes the script "
        "with DRY_RUN=1",
    )
    parser.add_argument(
        "--sbatch-options", metavar="TEXT", default="", help="options of sbatch, such as '--time=01:00:00'"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with tables and charts, for a browser"
    )
    # This argument exists only for --help, because _SweepParser removes --vary before argparse reads the
    # words.
    parser.add_argument(
        "--vary",
        nargs="+",
        metavar=("FLAG", "VALUE"),
        help="a flag and its values; several --vary make all combinations",
    )
    return parser


def plan_sweep(options: argparse.Namespace) -> Record:
    """Returns the record of the sweep with all predictions. Raises UserError for a wrong flag or axis."""
    # The import is late, because planning needs torch and DeepSpeed, and a report does not.
    from megatron.cluster.processes import configure_logging

    base, processes = options.base, None
    if options.sbatch:
        script = read_base_command(options.sbatch, options.base, options.folder)
        base, processes, options.nodes = script.flags, script.processes, script.nodes
    rows = make_rows(options.axes, base)
    configure_logging(LoggingConfig())
    from megatron.planner.sweep.resolve import resolve_rows

    # The data files may exist only on the cluster.
    dry_run = options.action == "plan" or bool(options.sbatch)
    recorded = resolve_rows(base, rows, options.steps, processes=processes, dry_run=dry_run)
    command = ["tools/sweep.py", *(sys.argv[1:] if options.argv is None else options.argv)]
    return Record(
        list(base),
        options.steps,
        options.repeat,
        options.sbatch,
        recorded,
        shlex.join(command),
        created=now_text(),
        **version_and_host(),
    )


def write_report(folder: SweepFolder) -> str:
    """Writes the files of the report, and returns its text."""
    summary = summarize(folder.read(), folder.results())
    write_json(folder.path / "report.json", summary)
    write_atomically(folder.path / "report.md", report_markdown(summary))
    write_atomically(folder.path / "report.csv", report_csv(summary))
    draw_summary(summary, folder.path / "report.png")
    return f"{report_text(summary)}\nwrote {folder.path}/report.md, .csv, .png and .json"


@exit_on_interrupt("interrupted: the same command continues the sweep")
@exit_on_user_error()
def main(argv: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(argv)
    options.argv = argv
    folder = SweepFolder(options.folder)
    try:
        if options.action == "plan":
            summary = summarize(plan_sweep(options), {})
            for row in summary["rows"]:  # nothing is to be run
                if row["status"] == "pending":
                    row.update(status="planned", reason=None)
            print(printable(report_text(summary)))
        else:
            if options.action == "run":
                _run(folder, options)
            print(printable(write_report(folder)))
            summary = read_json(folder.path / "report.json")
        if options.json:
            write_json(options.json, summary)
        if options.html:
            page = {**summary, "remarks": remarks(summary)}
            write_page(options.html, "sweep", summary["sweep"]["command"], page)
            print(f"wrote {options.html}")
    except OSError as error:
        raise UserError(f"{error.filename or folder.path} cannot be written: {error.strerror}") from error


def _run(folder: SweepFolder, options: argparse.Namespace) -> None:
    record = plan_sweep(options)
    if options.sbatch:
        record = folder.begin(record)
        print(
            submit(
                folder,
                record,
                options.nodes,
                options.base,
                shlex.split(options.sbatch_options),
                options.retry_failed,
            )
        )
        return
    with folder.lock():  # another sweep may be running
        record = folder.begin(record)
    run_sweep(
        folder,
        record,
        lambda text: print(printable(text), flush=True),
        timeout_s=options.timeout,
        retry_failed=options.retry_failed,
    )


if __name__ == "__main__":
    main()
