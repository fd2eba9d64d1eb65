"""Predicts memory, step time and communication of a run before it starts, or searches the fastest layout.

    python tools/plan.py --script examples/slurm/tr11-176B-ml.slurm --gpu a100-80gb
    python tools/plan.py --world-size 64 --gpu a100-80gb --tensor-model-parallel-size 4 ...
    python tools/plan.py --search --gpus 64 --gpu a100-80gb --num-layers 40 --hidden-size 5120 ...
    python tools/plan.py --recipe nodes --gpus 64 --gpu a100-80gb --num-layers 40 --hidden-size 5120 ...

The tool accepts all flags of pretrain_gpt.py, too. --script executes an sbatch script under your user, with
DRY_RUN=1, and plans the training command that the script prints; flags of this command override the flags of
the script. With DRY_RUN=1 the scripts of examples/slurm start nothing. Read any other script before you pass
it. A search varies the tensor- and pipeline-parallel sizes, with long sequences the context-parallel size,
with experts the expert-parallel size, the micro-batch size, recomputation, sequence parallelism, the ZeRO
stage, the pipeline schedule and the partition method. It does not change any other flag. docs/tuning.md
explains the output.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from megatron.arguments import read_command_line
from megatron.config import Config, LoggingConfig
from megatron.config.tool_parser import at_least_1, exit_on_interrupt
from megatron.errors import UserError, exit_on_user_error, printable
from megatron.files import write_json
from megatron.planner.command import RunFlagsParser, run_flags, with_defaults
from megatron.planner.page import Kind, write_page
from megatron.planner.plots import draw_plan
from megatron.planner.simulation.processes import start_server

RECIPES = ("nodes", "micro-batch")


def build_parser() -> RunFlagsParser:
    parser = RunFlagsParser(__doc__)
    parser.add_argument(
        "--script",
        metavar="FILE",
        help="plan the training command of this sbatch script; the tool executes the script under your "
        "user, with DRY_RUN=1",
    )
    parser.add_argument(
        "--search", action="store_true", help="search the fastest layout that fits the memory"
    )
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        help="show the steps to a starting point. nodes: set TP to the devices per node and PP to the "
        "nodes, then raise the micro-batch; micro-batch: find the largest micro-batch that one device holds "
        "with few layers, then scale out",
    )
    parser.add_argument(
        "--gpus", type=at_least_1, metavar="N", help="number of devices; a second name of --world-size"
    )
    parser.add_argument(
        "--top", type=at_least_1, default=3, metavar="N", help="number of layouts that the search explains"
    )
    parser.add_argument("--json", metavar="FILE", help="write the plan, or all plans of the search, as JSON")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="write a figure of the memory per rank and the schedule's timeline (.png, .svg, .pdf)",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with tables and charts, for a browser")
    return parser


@exit_on_interrupt()
@exit_on_user_error()
def main() -> None:
    arguments = build_parser().parse_args()
    with arguments.mistakes.collect():
        words = run_flags(arguments.training, arguments.script, arguments.gpus)
        words, notes = with_defaults(words, chooses_layout=bool(arguments.search or arguments.recipe))
        command_line = read_command_line(words, {}, mistakes=arguments.mistakes)
    arguments.mistakes.raise_all()
    # Imported after the flags are checked: the import of DeepSpeed takes seconds, in the server process, too.

    start_server()
    from megatron.cluster.processes import configure_logging

    configure_logging(LoggingConfig())
    from megatron.planner import plan_tool

    config: Config = command_line.config
    for note in [*notes, *command_line.notes]:
        print(printable(f"note: {note}"))
    if arguments.search:
        report = plan_tool.search_report(config, words, arguments.top)
    elif arguments.recipe:
        report = plan_tool.recipe_report(config, words, arguments.recipe)
    else:
        report = plan_tool.plan_report(config)
    print(printable(report.text))
    if arguments.json:
        _write_json(Path(arguments.json), report.data)
    if arguments.plot:
        draw_plan(report.plan, arguments.plot)
        print(f"plot       {arguments.plot}")
    if arguments.html:
        kind: Kind = "search" if arguments.search else "recipe" if arguments.recipe else "plan"
        write_page(Path(arguments.html), kind, shlex.join(["tools/plan.py", *sys.argv[1:]]), report.data)
        print(f"page       {arguments.html}")


def _write_json(path: Path, data: dict) -> None:
    try:
        write_json(path, data, indent=1)
    except OSError as error:
        raise UserError(f"--json {path} cannot be written ({error.strerror}): set another file") from None
    print(f"data       {path}")


if __name__ == "__main__":
    main()
