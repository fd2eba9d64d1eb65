"""Plans and searches in words and tables."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from megatron.config import Config, ConfigError
from megatron.planner.command import replaced
from megatron.planner.memory.fit import fit_summary
from megatron.planner.plan import WhatIf, recomputation_of
from megatron.planner.script_command import PROGRAM
from megatron.planner.search import PARTITION_METHODS, Candidate, SearchResult, evaluate
from megatron.planner.timing.step_time import StepTime, time_lines
from megatron.text_table import format_table
from megatron.units import GIB


def layout_words(config: Config) -> str:
    """The settings that a search varies, in one line."""
    parallel = config.parallel
    return (
        f"TP {parallel.tensor_model_parallel_size} x PP {parallel.pipeline_model_parallel_size} x DP "
        f"{parallel.data_parallel_size}, micro-batch {config.batch.micro_batch_size}, ZeRO "
        f"{parallel.zero_stage}, recompute {recomputation_of(config)}, {parallel.schedule_title}, "
        f"{parallel.partition_method}{', sequence parallel' * parallel.sequence_parallel}"
    )


def search_table(candidates: Sequence[Candidate]) -> str:
    """A row per layout, fastest first."""
    rows = [["", "layout", "tokens/s", "step s", "MFU %", "bubble %", "GiB"]]
    for number, one in enumerate(candidates, 1):
        step = one.step
        rows.append([str(number), layout_words(one.config), f"{one.tokens_per_second:,.0f}"])
        rows[-1] += [f"{step.total:.2f}", f"{100 * step.mfu:.1f}", f"{100 * step.bubble:.1f}"]
        rows[-1].append(f"{one.peak_bytes / GIB:.1f}")
    return format_table(rows, left_align=(1,))


def explain(number: int, one: Candidate, result: SearchResult, vocab_size: int, words: Sequence[str]) -> str:
    """Why this layout: its tensor-parallel size, its memory, its time; and its flags."""
    _, memory = fit_summary(one.config, vocab_size, one.memory)
    flags = shlex.join(replaced(words, one.change))
    return (
        f"{number}. {layout_words(one.config)}\n"
        f"{_tensor_parallel_line(one, result)}\n"
        f"memory     {memory}\n"
        f"{time_lines(one.step)}\n"
        f"flags      {PROGRAM} {flags}"
    )


def _tensor_parallel_line(one: Candidate, result: SearchResult) -> str:
    """What the next smaller and larger tensor-parallel sizes would give."""
    own = one.config.parallel.tensor_model_parallel_size
    parts = []
    sizes = {c.config.parallel.tensor_model_parallel_size for c in (*result.candidates, *result.too_large)}
    for size in sorted(sizes - {own}):
        fitting = [c for c in result.candidates if c.config.parallel.tensor_model_parallel_size == size]
        if fitting:
            ratio = max(c.tokens_per_second for c in fitting) / one.tokens_per_second
            word = "slower" if ratio < 1 else "faster"
            parts.append(f"TP {size} at best {100 * abs(1 - ratio):.1f} % {word}")
        else:
            large = [c for c in result.too_large if c.config.parallel.tensor_model_parallel_size == size]
            least = min(c.peak_bytes for c in large) / GIB
            parts.append(f"TP {size} needs at least {least:.0f} GiB among the layouts planned")
    alone = "no other size is among the fastest estimates"
    return f"TP {own}       {'; '.join(parts) or alone}"


def what_if(config: Config, vocab_size: int) -> tuple[WhatIf, ...]:
    """One change at a time: twice and half of each size, the other choices of each setting."""
    parallel, batch, model = config.parallel, config.batch, config.model
    changes: list[tuple[str, dict[str, object]]] = []
    for name, field, value in (
        ("tensor-parallel size", "parallel.tensor_model_parallel_size", parallel.tensor_model_parallel_size),
        (
            "pipeline-parallel size",
            "parallel.pipeline_model_parallel_size",
            parallel.pipeline_model_parallel_size,
        ),
        ("micro-batch size", "batch.micro_batch_size", batch.micro_batch_size),
    ):
        changes += [(f"{name} {2 * value}", {field: 2 * value})]
        changes += [(f"{name} {value // 2}", {field: value // 2})] if value % 2 == 0 else []
    recomputes = not config.training.recomputes_layers
    changes.append(
        (
            f"recompute {'full' if recomputes else 'none'}",
            {"training.checkpoint_activations": recomputes, "training.recompute_granularity": None},
        )
    )
    changes += [(f"ZeRO {z}", {"parallel.zero_stage": z}) for z in range(4) if z != parallel.zero_stage]
    own = (parallel.pipeline_schedule, parallel.virtual_pipeline_stages)
    schedules = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("dualpipev", 1), ("zero-bubble", 1))
    for schedule, virtual in schedules:
        if (schedule, virtual) != own:
            title = f"schedule {schedule}" + (f" x {virtual}" if virtual > 1 else "")
            change = {"parallel.pipeline_schedule": schedule, "parallel.virtual_pipeline_stages": virtual}
            changes.append((title, change))
    for method in PARTITION_METHODS:
        if method != parallel.partition_method:
            changes.append((f"partition {method}", {"parallel.partition_method": method}))
    if parallel.tensor_model_parallel_size > 1:
        flag = not parallel.sequence_parallel
        change = {"parallel.sequence_parallel": flag, "parallel.tp_comm_overlap": False}
        changes.append((f"sequence parallel {'on' if flag else 'off'}", change))
    if parallel.tensor_model_parallel_size > 1 and parallel.sequence_parallel:
        flag = not parallel.tp_comm_overlap
        title = f"TP communication overlap {'on' if flag else 'off'}"
        changes.append((title, {"parallel.tp_comm_overlap": flag}))
    if model.hidden_dropout > 0 or model.attention_dropout > 0:
        changes.append(("no dropout", {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}))
    return tuple(_what_if(config, vocab_size, text, change) for text, change in changes)


def _what_if(config: Config, vocab_size: int, text: str, change: dict[str, object]) -> WhatIf:
    try:
        one = evaluate(config, change, vocab_size)
    except ConfigError as error:
        return WhatIf(text, None, None, None, str(error))
    return WhatIf(text, one.fits, one.peak_bytes, one.tokens_per_second)


def what_if_table(changes: Sequence[WhatIf], step: StepTime) -> str:
    """A row per change; refused ones last, with the reason."""
    rows = [["change", "tokens/s", "relative", "GiB", "fits"]]
    for one in changes:
        if one.tokens_per_second is not None and one.peak_bytes is not None:
            relative = f"{100 * (one.tokens_per_second / step.tokens_per_second - 1):+.1f} %"
            rows.append([one.change, f"{one.tokens_per_second:,.0f}", relative])
            rows[-1] += [f"{one.peak_bytes / GIB:.1f}", "yes" if one.fits else "no"]
    refused = [f"refused: {one.change}: {one.reason}" for one in changes if one.reason]
    return "what if\n" + format_table(rows) + "".join(f"\n{line}" for line in refused)
