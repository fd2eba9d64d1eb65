"""What a plan adds to the report of a run: the planned memory, and the predicted time of a step."""

from collections.abc import Sequence

from megatron.cluster.preflight import read_network_figures
from megatron.config import Config
from megatron.pipeline.stages import StagePlan, stage_flops
from megatron.planner.memory import StageMemory
from megatron.planner.step_time import StepTime, time_lines
from megatron.text_table import format_table
from megatron.training.run_report import run_report
from megatron.units import GIB


def planned_run_report(
    config: Config,
    plan: StagePlan,
    vocab_size: int,
    notes: Sequence[str],
    learning_rate: str,
    memory: Sequence[StageMemory],
    step: StepTime | None = None,
) -> str:
    """The report that a run would print at its start, and the plan. memory: by pipeline rank. step: the
    predicted one; None if it is not shown."""
    parts = [
        run_report(config, plan, vocab_size, notes, learning_rate, _network_lines(config)),
        "planned memory of a device in GiB\n" + memory_table(config, plan, vocab_size, memory),
        *([] if step is None else [time_lines(step)]),
    ]
    return "\n\n".join(parts)


def _network_lines(config: Config) -> list[str]:
    """The measured rates of the network that the predicted time uses."""
    figures = None if config.training.gpu is None else read_network_figures(config)
    return [] if figures is None else [f"network    {figures.describe()} ({config.parallel.network_figures})"]


def memory_table(config: Config, plan: StagePlan, vocab_size: int, memory: Sequence[StageMemory]) -> str:
    """A row per pipeline rank: the parts of `StageMemory` in GiB, and the rank's share of the FLOPs."""
    work = plan.sum_by_rank(stage_flops(config, plan, vocab_size))
    parts = ("state", "activations", "head", "temporaries", "tables", "total", "host")
    rows = [["stage" if plan.has_one_stage_per_rank else "rank", *parts, "work"]]
    for rank, of_rank in enumerate(memory):
        sizes = [f"{getattr(of_rank, part) / GIB:.3f}" for part in parts]
        rows.append([str(rank), *sizes, f"{100 * work[rank] / sum(work):.1f} %"])
    return format_table(rows)
