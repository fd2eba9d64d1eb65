"""The banner of a run, and all that `--dry-run` prints: layout, batch arithmetic, stage map."""

from collections.abc import Sequence
from itertools import groupby

from megatron.config import Config
from megatron.config.vocab import padded_vocab_size
from megatron.planner.flops import pipeline_efficiency
from megatron.planner.stages import StagePlan


def run_report(config: Config, plan: StagePlan, vocab_size: int, notes: Sequence[str]) -> str:
    """The text printed once at the start of a run. `notes`: flags and files that need a word."""
    parts = [
        "\n".join(f"note: {note}" for note in notes),
        _model_lines(config, plan, vocab_size),
        _layout_lines(config),
        stage_map(plan),
    ]
    return "\n\n".join(part for part in parts if part)


def _model_lines(config: Config, plan: StagePlan, vocab_size: int) -> str:
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    padded = padded_vocab_size(vocab_size, model, tensor)
    return (
        f"model      {model.num_layers} layers x {model.hidden_size} hidden, "
        f"{model.num_attention_heads} heads, sequence {model.seq_length}, "
        f"{model.position_embedding_type} positions, {config.precision.name}\n"
        f"vocabulary {vocab_size:,} tokens, padded to {padded:,}\n"
        f"parameters {plan.total_parameters:,}"
    )


def _layout_lines(config: Config) -> str:
    parallel, batch = config.parallel, config.batch
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    data = parallel.data_parallel_size
    micro_batches = batch.global_batch_size // (batch.micro_batch_size * data)
    lines = [
        f"layout     {parallel.world_size} processes = tensor {tensor} x pipeline {stages} x data {data}, "
        f"ZeRO stage {parallel.zero_stage}",
        f"batch      {batch.global_batch_size} samples = micro-batch {batch.micro_batch_size} "
        f"x {micro_batches} accumulation steps x data {data}",
        f"pipeline   efficiency m/(m+p-1) = {micro_batches}/({micro_batches}+{stages}-1) = "
        f"{pipeline_efficiency(micro_batches, stages):.3f}",
    ]
    if batch.rampup_batch_size:
        start, increment, samples = batch.rampup_batch_size
        lines.append(f"ramp-up    from {start} by {increment} over the first {samples:,} samples")
    return "\n".join(lines)


def stage_map(plan: StagePlan) -> str:
    """A table of the stages: layer indices, what they are, parameters per rank."""
    rows = [("stage", "layers", "parameters per rank", "content")]
    for stage in range(len(plan.bounds) - 1):
        first, last = plan.bounds[stage], plan.bounds[stage + 1] - 1
        content = ", ".join(
            _counted(name, len(list(run))) for name, run in groupby(plan.names[first : last + 1])
        )
        rows.append((str(stage), f"{first}-{last}", f"{plan.stage_parameters(stage):,}", content))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{row[0]:>{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}" for row in rows
    )


def _counted(name: str, count: int) -> str:
    return name if count == 1 else f"{count} x {name}"
