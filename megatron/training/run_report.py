"""What a run prints at its start, and a dry run first: notes, model, layout, batches, stage map."""

from collections.abc import Sequence
from itertools import groupby

from megatron.config import BatchSchedule, Config
from megatron.config.model import model_summary, padded_vocab_size
from megatron.config.sections.parallel import ParallelConfig
from megatron.pipeline.methods import MEMORY_UNIT, TIME_UNITS
from megatron.pipeline.schedule import mean_bubble
from megatron.pipeline.stages import StagePlan
from megatron.text_table import format_table

# Stages x micro-batches of the largest simulated step, which takes about 5 s.
_MAX_SIMULATED = 250_000


def run_report(
    config: Config,
    plan: StagePlan,
    vocab_size: int,
    notes: Sequence[str],
    learning_rate: str,
    network: Sequence[str] = (),
) -> str:
    """The text that is printed once at the start. notes: one sentence each. learning_rate: a description of
    the schedule. network: lines about the network, of a plan."""
    parts = [
        "\n".join(f"note: {note}" for note in notes),
        _model_lines(config, plan, vocab_size),
        _layout_lines(config, network),
        "\n".join([stage_map(plan), *_simulated_lines(config, plan), *filter(None, [learning_rate])]),
    ]
    return "\n\n".join(part for part in parts if part)


def _model_lines(config: Config, plan: StagePlan, vocab_size: int) -> str:
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    padded = padded_vocab_size(vocab_size, model, tensor)
    return (
        f"model      {model_summary(model)}, {config.precision.name}\n"
        f"vocabulary {vocab_size:,} tokens, padded to {padded:,}\n"
        f"parameters {plan.total_parameters:,}"
    )


def _layout_lines(config: Config, network: Sequence[str]) -> str:
    parallel, batch = config.parallel, config.batch
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    data = parallel.data_parallel_size
    micro_batches = config.micro_batches_per_step
    lines = [
        f"layout     {parallel.world_size} processes = TP {tensor} x PP {stages} x DP {data}, "
        f"ZeRO stage {parallel.zero_stage}" + (", optimizer state on the host" * parallel.cpu_offload),
        f"batch      {batch.global_batch_size} samples = micro-batch {batch.micro_batch_size} "
        f"x {micro_batches} accumulation steps x DP {data}",
        _pipeline_line(parallel, micro_batches),
        *network,
    ]
    if batch.rampup_batch_size:
        start, increment, samples = batch.rampup_batch_size
        lines.append(f"ramp-up    from {start} by {increment} over the first {samples:,} samples")
        lines += _ramp_up_lines(config)
    return "\n".join(lines)


def _ramp_up_lines(config: Config) -> list[str]:
    """Steps of the ramp-up, and with 1F1B the pipeline's efficiency in the first step and on average, by the
    formula of `_pipeline_line`: the average is the work of all its steps by their time."""
    batch, parallel = config.batch, config.parallel
    unit = batch.micro_batch_size * parallel.data_parallel_size
    steps = BatchSchedule.from_config(batch).ramp_up_steps()
    line = (
        f"           {sum(count for _, count in steps):,} steps at batches of {steps[0][0]} to {steps[-1][0]}"
    )
    ranks = parallel.pipeline_model_parallel_size
    if ranks == 1 or parallel.pipeline_schedule != "1f1b":
        return [line]
    first = pipeline_efficiency(steps[0][0] // unit, ranks)
    work = sum(count * (size // unit) for size, count in steps)
    mean = work / sum(count * (size // unit + ranks - 1) for size, count in steps)
    return [f"{line}, pipeline efficiency {first:.3f} in the first step, {mean:.3f} on average"]


def _pipeline_line(parallel: ParallelConfig, micro_batches: int) -> str:
    """The efficiency of the pipeline if all stages take equally long."""
    ranks, schedule = parallel.pipeline_model_parallel_size, parallel.schedule_title
    if parallel.pipeline_schedule == "1f1b":
        share = pipeline_efficiency(micro_batches, ranks)
        return f"pipeline   efficiency m/(m+p-1) = {micro_batches}/({micro_batches}+{ranks}-1) = {share:.3f}"
    if parallel.num_stages * micro_batches > _MAX_SIMULATED:
        return f"pipeline   {schedule}, {micro_batches} micro-batches (too many to simulate the efficiency)"
    share = 1 - mean_bubble(
        parallel.pipeline_schedule, [1] * parallel.num_stages, micro_batches, parallel.stages_per_rank
    )
    return f"pipeline   {schedule}, efficiency {share:.3f} with {micro_batches} micro-batches, simulated"


def pipeline_efficiency(num_micro_batches: int, num_stages: int) -> float:
    """Fraction of a step in which p equal stages are busy with m micro-batches: m / (m + p - 1)."""
    return num_micro_batches / (num_micro_batches + num_stages - 1)


def stage_map(plan: StagePlan) -> str:
    """A table with a row per stage, and a line on the heaviest stage (with several stages per rank: rank).

    Columns: indices in the layer list, weight, weight relative to the mean, parameters of one rank, layers.
    """
    header = [
        "stage",
        "layers",
        f"weight{f' ({plan.partition.unit})' if plan.partition.unit else ''}",
        "of mean",
    ]
    rows = [[*header, "parameters per rank", "content"]]
    if not plan.has_one_stage_per_rank:
        rows[0][0:0] = ["rank", "its weight"]
    ranks = plan.rank_weights()
    mean = sum(ranks) / len(ranks)
    for stage, weight in enumerate(plan.partition.weights):
        of_rank = ranks[plan.rank_of(stage)]
        share = f"{of_rank / mean:.2f}" if mean else "-"
        row = [str(stage), plan.layer_range(stage), f"{weight:,.4g}", share]
        row += [f"{plan.stage_parameters(stage):,}", _content(plan, stage)]
        if not plan.has_one_stage_per_rank:
            row[0:0] = [str(plan.rank_of(stage)), f"{of_rank:,.4g}"]
        rows.append(row)
    return "\n".join([format_table(rows, left_align=(-1,)), heaviest_line(plan)])


def heaviest_line(plan: StagePlan) -> str:
    """Names the heaviest stage, and the efficiency that is lost while the other stages wait for it."""
    weights = plan.rank_weights()
    what = "stage" if plan.has_one_stage_per_rank else "rank"
    mean, heaviest = sum(weights) / len(weights), max(weights)
    if not heaviest:
        return f"heaviest   none: all layers have weight 0 by --partition-method {plan.method}"
    ratio = heaviest / mean
    consequence = (
        f"it needs {100 * (ratio - 1):.1f} % more than the mean"
        if plan.partition.unit == MEMORY_UNIT
        else f"waiting for it costs up to {100 * (1 - 1 / ratio):.1f} % of the efficiency"
    )
    return (
        f"heaviest   {what} {weights.index(heaviest)} by --partition-method {plan.method}, "
        f"max/mean = {ratio:.3f}: {consequence}"
    )


def _simulated_lines(config: Config, plan: StagePlan) -> list[str]:
    """The simulated efficiency with the weights of these stages, if the weights are times or FLOPs."""
    if plan.partition.unit not in TIME_UNITS or not any(plan.partition.weights):
        return []
    micro_batches = config.micro_batches_per_step
    if len(plan.partition.weights) * micro_batches > _MAX_SIMULATED:
        return []
    parallel = config.parallel
    weights, per_rank = plan.partition.weights, parallel.stages_per_rank
    busy = 1 - mean_bubble(parallel.pipeline_schedule, weights, micro_batches, per_rank)
    return [
        f"simulated  with these stages, {parallel.schedule_title} and {micro_batches} micro-batches the "
        f"ranks are busy {100 * busy:.1f} % of a step"
    ]


def _content(plan: StagePlan, stage: int) -> str:
    """The layers of a stage, such as 'embedding, 5 x transformer layer'. Functions are not shown."""
    titles = plan.layer_titles()[plan.bounds[stage] : plan.bounds[stage + 1]]
    counts = [(title, len(list(run))) for title, run in groupby(title for title in titles if title)]
    return ", ".join(title if count == 1 else f"{count} x {title}" for title, count in counts) or "nothing"
