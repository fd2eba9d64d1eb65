"""Writes the report at the start of a run or dry run: notes, model, layout, batches, stage map.

The notes say which settings a resume changes, and what the rest of the run will do.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from megatron.checkpoint.compatibility import starts_at_zero
from megatron.checkpoint.record import Checkpoint, describe_start
from megatron.checkpoint.selection import find_checkpoint, planned_checkpoint
from megatron.cluster.devices import find_gpu, gpu_of_process
from megatron.config import Config
from megatron.config.fields import option_name
from megatron.config.model import model_summary
from megatron.config.registries import OPTIMIZERS
from megatron.config.sections.parallel import ParallelConfig
from megatron.model.flops import iteration_flops, palm_flops
from megatron.object_store.store import is_url
from megatron.optimizer.batch_schedule import BatchSchedule, Progress
from megatron.pipeline.methods import MEMORY_UNIT, TIME_UNITS
from megatron.pipeline.schedule import mean_bubble
from megatron.pipeline.stages import StagePlan
from megatron.run import Run
from megatron.text_table import counted, format_table
from megatron.training.data import missing_token_file

# Stages x micro-batches of the largest step that is simulated; the simulation of such a step takes about 5 s.
_MAX_SIMULATED = 250_000


def run_report(run: Run, notes: Sequence[str], learning_rate: str = "", network: Sequence[str] = ()) -> str:
    """Returns the report. notes: sentences. learning_rate: description of the schedule; "" in a plan without
    a schedule. network: lines about the network, in a plan."""
    plan = run.stages
    parts = [
        "\n".join(f"note: {note}" for note in notes),
        _model_lines(run),
        _layout_lines(run, network),
        "\n".join([stage_map(plan), *_simulated_lines(run.config, plan), *filter(None, [learning_rate])]),
    ]
    return "\n\n".join(part for part in parts if part)


def _model_lines(run: Run) -> str:
    total, active = run.stages.total_parameters, run.stages.active_parameters
    per_token = f", {active:,} used per token" if active != total else ""
    return (
        f"model      {model_summary(run.config.model)}, {run.config.precision.title}\n"
        f"vocabulary {run.vocab.size:,} tokens, padded to {run.padded_vocab_size:,}\n"
        f"parameters {total:,}{per_token}\n"
        f"FLOPs      {_flops_line(run)}"
    )


def _flops_line(run: Run) -> str:
    """Returns a line with the FLOPs of a step: as logged, without recomputation, and by PaLM's formula. If
    the device's peak rate is known, the line also has the model FLOPs utilization (MFU) per logged TFLOPs."""
    config, vocab_size = run.config, run.vocab.size
    is_on_cpu = not config.training.dry_run and get_accelerator().device_name() == "cpu"
    logged = iteration_flops(config, vocab_size, on_cpu=is_on_cpu)
    counts = {
        "without recomputation": iteration_flops(config, vocab_size, with_recomputation=False),
        "by PaLM's formula": palm_flops(config, vocab_size, run.stages.active_parameters),
    }
    gpu = find_gpu(config) if config.training.dry_run else gpu_of_process()
    line = f"{logged:.4g} per step as logged, " + ", ".join(f"{n:.4g} {how}" for how, n in counts.items())
    if gpu is None:
        return line
    peak = gpu.peak_flops[config.precision.name]
    mfu, palm = (100 * 1e12 * count / logged / peak for count in counts.values())
    return f"{line}; MFU is {mfu:.4f} % x TFLOPs of the log, {palm:.4f} % by PaLM's formula"


def _layout_lines(run: Run, network: Sequence[str]) -> str:
    config, parallel, batch = run.config, run.config.parallel, run.config.batch
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    data = parallel.data_parallel_size
    micro_batches = config.micro_batches_per_step
    context = f"CP {parallel.context_parallel_size} x " if parallel.context_parallel_size > 1 else ""
    experts = parallel.expert_model_parallel_size
    lines = [
        f"layout     {counted(parallel.world_size, 'process')} = TP {tensor} x {context}PP {stages} x DP "
        f"{data}{f', EP {experts}' * (experts > 1)}, ZeRO stage {parallel.zero_stage}"
        + (", optimizer state on the host" * parallel.cpu_offload),
        f"batch      {batch.global_batch_size} samples = micro-batch {batch.micro_batch_size} "
        f"x {micro_batches} accumulation steps x DP {data}",
        _pipeline_line(parallel, micro_batches),
        *network,
    ]
    if batch.rampup_batch_size:
        start, increment, samples = batch.rampup_batch_size
        lines.append(f"ramp-up    from {start} by {increment} over the first {samples:,} samples")
        lines += _ramp_up_lines(run)
    return "\n".join(lines)


def _ramp_up_lines(run: Run) -> list[str]:
    """Returns lines about the batch sizes of the ramp-up. With 1F1B, adds the efficiency of the pipeline by
    the formula of `_pipeline_line`: in the first step, and on average (the work of all steps divided by their
    time)."""
    parallel, steps = run.config.parallel, run.batches.ramp_up_steps()
    unit = run.config.batch.micro_batch_size * parallel.data_parallel_size
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
    """Returns a line with the efficiency of the pipeline, if all stages take equally long."""
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
    """Returns the fraction of a step in which p equal stages are busy with m micro-batches: m / (m + p -
    1)."""
    return num_micro_batches / (num_micro_batches + num_stages - 1)


def stage_map(plan: StagePlan) -> str:
    """Returns a table with a row per stage, and a line about the heaviest stage, or about the heaviest rank
    if ranks have several stages.

    Its columns are: indices in the layer list, weight, weight relative to the mean, parameters of one rank,
    layers.
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
    """Returns a line about the heaviest stage, and about the efficiency that is lost while the lighter stages
    wait for it."""
    weights = plan.rank_weights()
    what = "stage" if plan.has_one_stage_per_rank else "rank"
    mean, heaviest = sum(weights) / len(weights), max(weights)
    if not heaviest:
        return f"heaviest   none: all layers have weight 0 by --partition-method {plan.method}"
    ratio = heaviest / mean
    if ratio < 1.0005:
        consequence = f"all {what}s are equal" if len(weights) > 1 else f"the only {what}"
    elif plan.partition.unit == MEMORY_UNIT:
        consequence = f"it needs {100 * (ratio - 1):.1f} % more than the mean"
    else:
        consequence = f"imbalance loses up to {100 * (1 - 1 / ratio):.1f} % efficiency"
    return (
        f"heaviest   {what} {weights.index(heaviest)} by --partition-method {plan.method}, "
        f"max/mean = {ratio:.3f}: {consequence}"
    )


def _simulated_lines(config: Config, plan: StagePlan) -> list[str]:
    """Returns a line with the simulated efficiency of the pipeline, if the weights of the stages are times or
    FLOPs; otherwise no line."""
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
    """Returns the layers of a stage, such as 'embedding, 5 x transformer layer'. Functions are not shown."""
    titles = (layer.title for layer in plan.layers_of(stage) if layer.title)
    counts = [(title, len(list(run))) for title, run in groupby(titles)]
    return ", ".join(title if count == 1 else f"{count} x {title}" for title, count in counts) or "nothing"


# Settings that a resume may change. The report has a note about those whose values differ from the
# checkpoint's values.
_CHANGEABLE_SETTINGS = {
    "model": (
        *("hidden_dropout", "attention_dropout", "init_method_std", "moe_router_load_balancing_type"),
        *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
    ),
    "training": ("seed", "z_loss_weight"),
    "optimizer": ("optimizer", *OPTIMIZERS.settings(), "weight_decay", "clip_grad", "use_bnb_optimizer"),
}


def start_notes(checkpoint: Checkpoint | None, run: Run) -> list[str]:
    """Returns notes about a run without remaining steps, about a batch size or settings that differ from the
    checkpoint's, and about a learning rate of 0."""
    config, start, length = run.config, run.start, run.length
    if config.training.no_train:
        return []
    if start.iteration >= length.iterations:
        return [
            f"nothing to train: the checkpoint is at iteration {start.iteration}, with "
            f"{start.consumed_samples:,} samples and {start.consumed_tokens:,} tokens consumed, and the run "
            f"ends at iteration {length.iterations} (--train-iters, --train-samples, --train-tokens)"
        ]
    notes = list(_rate_notes(run))
    if checkpoint is None or not checkpoint.records_run or starts_at_zero(checkpoint):
        return notes
    return [*_batch_notes(checkpoint, run), *_settings_notes(checkpoint, config), *notes]


def planned_start(run: Run) -> tuple[Checkpoint | None, list[str]]:
    """Returns the checkpoint from which a run with the flags of a dry run would start, and notes about it.

    The checkpoint is checked as in a run if --load is a folder on this machine and the data exists. Raises
    ConfigError if the run would be rejected.
    """
    config, load = run.config, run.config.checkpoint.load
    if load is None:
        return None, []
    if not Path(load).is_dir():
        where = "is in an object store" if is_url(load) else "does not exist here"
        return None, [f"--load is not checked: {load} {where}"]
    if missing := missing_token_file(config):
        return planned_checkpoint(config), [f"--load {load} is not checked: {missing}"]
    checkpoint = find_checkpoint(run)
    return checkpoint, [describe_start(checkpoint, load)]


def _batch_notes(checkpoint: Checkpoint, run: Run) -> Iterator[str]:
    samples, length, batches = checkpoint.state.consumed_samples, run.length, run.batches
    saved = BatchSchedule.from_config(checkpoint.config.batch)
    if saved != batches:
        yield (
            f"the batch size differs from the checkpoint's: {saved.global_batch_size_at(samples)} samples "
            f"there (up to {saved.global_batch_size}), {batches.global_batch_size_at(samples)} samples from "
            f"iteration {checkpoint.state.iteration + 1} on (up to {batches.global_batch_size}); the run "
            f"ends at iteration {length.iterations}, with {length.train_samples:,} samples"
        )


def _settings_notes(checkpoint: Checkpoint, config: Config) -> Iterator[str]:
    saved = checkpoint.config
    changes = []
    for section, names in _CHANGEABLE_SETTINGS.items():
        before, now = getattr(saved, section), getattr(config, section)
        unused = before.unused_fields() & now.unused_fields()
        changes += [
            f"{option_name(name)} was {getattr(before, name)}, is {getattr(now, name)}"
            for name in names
            if name not in unused and getattr(before, name) != getattr(now, name)
        ]
    if changes:
        yield f"the run continues with other settings than the checkpoint's: {'; '.join(changes)}"


def _rate_notes(run: Run) -> Iterator[str]:
    config, length, lr_schedule, batches = run.config, run.length, run.lr_schedule, run.batches

    def progress_at(iteration: int, samples: int) -> Progress:
        tokens = batches.tokens_of_samples(samples, config.model.seq_length, config.curriculum, run.start)
        return Progress(iteration, samples, int(tokens))

    # The last step may lie beyond the end of the decay, because the last batch is rounded up.
    last_but_one = progress_at(length.iterations - 1, length.train_samples - batches.global_batch_size)
    if lr_schedule.lr(last_but_one) > 0 or last_but_one.count("iterations") < 1:
        return
    unit = lr_schedule.decay_unit
    end = progress_at(length.iterations, length.train_samples).count(unit)
    remedy = (
        "--override-lr-scheduler uses the schedule of the flags instead"
        if config.schedule.use_checkpoint_lr_scheduler
        else "raise the --lr-decay flag, or set --min-lr"
    )
    yield (
        f"WARNING: the learning rate is 0 from {lr_schedule.decay_length:,} {unit} on and the run ends at "
        f"{end:,} {unit}: these steps do not change the weights; {remedy}"
    )
