"""The reports of `tools/plan.py`: the plan of a run, a search, and two recipes.

nodes        TP = devices per node, PP = nodes, micro-batch 1, 8 to 16 x PP accumulation steps. Then the
             micro-batch is doubled as long as the plan fits and gets faster.
micro-batch  Starts with a few layers of full width on one device, without communication, and finds the
             largest micro-batch that fits: no layout can be faster per device. Then puts the whole model on
             as few devices per replica as possible, with data parallelism over the other devices.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from megatron.config import Config, ConfigError
from megatron.config.sections.training import recomputation
from megatron.data.vocabulary import find_vocabulary
from megatron.errors import UserError
from megatron.planner.command import PROGRAM, replaced
from megatron.planner.dry_run import planned_run_report, verdict_lines
from megatron.planner.fit import with_verdict
from megatron.planner.layer_memory import planned_run
from megatron.planner.network import find_network
from megatron.planner.plan import NO_GPU, Plan, WhatIf, plan_of, recomputation_of
from megatron.planner.search import Change, SearchResult, evaluate, search, tensor_parallel_change, variations
from megatron.planner.step_time import time_lines
from megatron.text_table import counted, format_table
from megatron.units import GIB

_IN_JSON = 20
"""Number of layouts of a search that --json and --html contain."""


@dataclass(frozen=True)
class Report:
    """A report: the text, the data for --json, and the plan for --plot (of a search the fastest layout)."""

    text: str
    data: dict[str, Any]
    plan: Plan


def plan_report(config: Config) -> Report:
    """Returns the report on a run's plan, and on the effect of changing one setting at a time."""
    plan = with_verdict(plan_of(planned_run(config)))
    parts = [planned_run_report(plan).strip("\n")]
    if plan.step is None:
        hint = plan.verdict or "set --gpu to check whether the plan fits"
        parts.append(f"memory     {hint}\ntime       {NO_GPU}")
    else:
        plan = replace(plan, what_if=what_if(plan))
        parts += [verdict_lines(plan), what_if_table(plan)]
    return Report("\n\n".join(parts), plan.as_dict(), plan)


def search_report(config: Config, words: Sequence[str], top: int) -> Report:
    """Returns the report on the fastest layouts that fit. words: the flags of `config`. top: number of
    layouts to explain. Raises ConfigError if no layout fits."""
    vocab_size = find_vocabulary(config).size
    result = search(config, vocab_size)
    if not result.candidates:
        raise ConfigError(_nothing_fits(config, result.too_large))
    best = list(map(with_verdict, result.candidates[:_IN_JSON]))
    text = [
        f"{counted(result.planned, 'layout')} for {counted(config.parallel.world_size, 'device')} planned in "
        f"full, {len(result.candidates)} fit"
        f"{best[0].assumption and f'; {best[0].assumption}'}",
        search_table(best[: max(top, 10)]),
        *(explain(number, plan, result, words) for number, plan in enumerate(best[:top], 1)),
    ]
    best[0] = replace(best[0], what_if=what_if(best[0]))
    text.append(f"layout 1: {what_if_table(best[0])}")
    data = {
        "title": best[0].title,
        "planned": result.planned,
        "candidates": [{**plan.as_dict(), "flags": replaced(words, plan.change)} for plan in best],
    }
    return Report("\n\n".join(text), data, best[0])


def recipe_report(config: Config, words: Sequence[str], recipe: str) -> Report:
    """Returns the report on the steps of a recipe. words: the flags of `config`. Raises ConfigError if it
    fails."""
    vocab_size = find_vocabulary(config).size
    steps = [(step, with_verdict(plan)) for step, plan in RECIPES[recipe](config, vocab_size)]
    text = [f"recipe {recipe}"]
    data = []
    for number, (step, plan) in enumerate(steps, 1):
        flags = replaced(words, plan.change)
        text.append(
            f"{number}. {step}\n{layout_words(plan.config)}\n{_figures(plan)}\nflags      {' '.join(flags)}"
        )
        data.append({"text": step, "flags": flags, **plan.as_dict()})
    # The first step of the micro-batch recipe plans only a few layers of the model.
    whole = [plan for _, plan in steps if plan.config.model == config.model]
    kept = max(
        (plan for plan in whole if plan.fits), key=lambda plan: plan.tokens_per_second, default=whole[-1]
    )
    return Report("\n\n".join(text), {"title": kept.title, "steps": data}, kept)


def _figures(plan: Plan) -> str:
    """Returns the report's lines on the memory and the time of a layout."""
    return f"memory     {with_verdict(plan).verdict}\n{time_lines(plan.prediction)}"


def _nothing_fits(config: Config, planned: Sequence[Plan]) -> str:
    least = min(planned, key=lambda plan: plan.peak_bytes)
    return (
        f"no layout of {counted(config.parallel.world_size, 'device')} of kind {config.training.gpu} fits. "
        f"The smallest needs {least.peak_bytes / GIB:.1f} GiB ({layout_words(least.config)}). Add devices, "
        "or set --checkpoint-activations, --sequence-parallel or --cpu-offload."
    )


def layout_words(config: Config) -> str:
    """Returns a line with the settings that a search varies."""
    parallel = config.parallel
    context = f"CP {parallel.context_parallel_size} x " if parallel.context_parallel_size > 1 else ""
    experts = "" if config.model.num_experts is None else f", EP {parallel.expert_model_parallel_size}"
    return (
        f"TP {parallel.tensor_model_parallel_size} x {context}PP {parallel.pipeline_model_parallel_size} x "
        f"DP {parallel.data_parallel_size}{experts}, micro-batch {config.batch.micro_batch_size}, ZeRO "
        f"{parallel.zero_stage}, recompute {recomputation_of(config)}, {parallel.schedule_title}, "
        f"{parallel.partition_method}{', sequence parallel' * parallel.sequence_parallel}"
    )


def search_table(candidates: Sequence[Plan]) -> str:
    """Returns a table with a row for each layout, fastest first."""
    rows = [["", "layout", "tokens/s", "step s", "MFU %", "bubble %", "GiB"]]
    for number, plan in enumerate(candidates, 1):
        step = plan.prediction
        rows.append([str(number), layout_words(plan.config), f"{plan.tokens_per_second:,.0f}"])
        rows[-1] += [f"{step.total:.2f}", f"{100 * step.mfu:.1f}", f"{100 * step.bubble:.1f}"]
        rows[-1].append(f"{plan.peak_bytes / GIB:.1f}")
    return format_table(rows, left_align=(1,))


def explain(number: int, plan: Plan, result: SearchResult, words: Sequence[str]) -> str:
    """Returns the lines on a layout: its TP size compared with other sizes, its memory, time and flags."""
    return (
        f"{number}. {layout_words(plan.config)}\n"
        f"{_tensor_parallel_line(plan, result)}\n"
        f"{_figures(plan)}\n"
        f"flags      {PROGRAM} {shlex.join(replaced(words, plan.change))}"
    )


def _tensor_parallel_line(plan: Plan, result: SearchResult) -> str:
    """Returns a line that compares the layout with the best layouts of the other tensor-parallel sizes."""
    own = plan.config.parallel.tensor_model_parallel_size
    parts = []
    sizes = {c.config.parallel.tensor_model_parallel_size for c in (*result.candidates, *result.too_large)}
    for size in sorted(sizes - {own}):
        fitting = [c for c in result.candidates if c.config.parallel.tensor_model_parallel_size == size]
        if fitting:
            ratio = max(c.tokens_per_second for c in fitting) / plan.tokens_per_second
            word = "slower" if ratio < 1 else "faster"
            parts.append(f"TP {size} at best {100 * abs(1 - ratio):.1f} % {word}")
        else:
            large = [c for c in result.too_large if c.config.parallel.tensor_model_parallel_size == size]
            least = min(c.peak_bytes for c in large) / GIB
            parts.append(f"no planned layout of TP {size} fits (the smallest needs {least:.0f} GiB)")
    alone = "no layout of another TP size was planned"
    return f"TP {own}       {'; '.join(parts) or alone}"


def what_if(plan: Plan) -> tuple[WhatIf, ...]:
    """Returns the effects of one change at a time: sizes doubled and halved, and other choices of settings.
    Changes that fit come first, the fastest of them at the top; then come changes that do not fit, then the
    rejected ones. Partition methods that give the stages of `plan` are left out."""
    parallel, model = plan.config.parallel, plan.config.model
    changes = list(variations(plan.config))
    if parallel.tensor_model_parallel_size > 1 and parallel.sequence_parallel:
        flag = not parallel.tp_comm_overlap
        title = f"TP communication overlap {'on' if flag else 'off'}"
        changes.append((title, {"parallel.tp_comm_overlap": flag}))
    if model.hidden_dropout > 0 or model.attention_dropout > 0:
        changes.append(("no dropout", {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}))
    with ThreadPoolExecutor() as pool:  # recording, which takes most of the time, runs in other processes
        rows = [row for row in pool.map(lambda change: _what_if(plan, *change), changes) if row is not None]
    return tuple(
        sorted(rows, key=lambda row: (bool(row.reason), not row.fits, -(row.tokens_per_second or 0)))
    )


def _what_if(plan: Plan, text: str, change: Change) -> WhatIf | None:
    try:
        changed = evaluate(plan.config, change, plan.run.vocab.size)
    except UserError as error:
        return WhatIf(text, None, None, None, str(error))
    if "parallel.partition_method" in change and changed.run.stages.bounds == plan.run.stages.bounds:
        return None
    trains_another = any(setting.startswith("model.") for setting in change)
    return WhatIf(text, changed.fits, changed.peak_bytes, changed.tokens_per_second, "", trains_another)


def what_if_table(plan: Plan) -> str:
    """Returns a table with a row for each change, followed by the rejected changes with their reasons. The
    fastest row that fits is marked, unless the plan itself fits and is faster."""
    rows = [["change", "tokens/s", "relative", "GiB", "fits"]]
    for row in plan.what_if:
        if row.tokens_per_second is not None and row.peak_bytes is not None:
            relative = f"{100 * (row.tokens_per_second / plan.tokens_per_second - 1):+.1f} %"
            rows.append([row.change, f"{row.tokens_per_second:,.0f}", relative])
            fits = "no" if not row.fits else "yes, best" if row is plan.best_change else "yes"
            rows[-1] += [f"{row.peak_bytes / GIB:.1f}", fits]
    rejected = [f"rejected: {row.change}: {row.reason}" for row in plan.what_if if row.reason]
    return "what if\n" + format_table(rows) + "".join(f"\n{line}" for line in rejected)


_FEW_LAYERS = 4
"""Number of transformer layers in the first step of the micro-batch recipe."""
_ACCUMULATION = (8, 16)
"""Range of the accumulation steps in the nodes recipe, per pipeline rank."""


RecipeStep = tuple[str, Plan]
"""(sentence on what the step does, its plan)"""


def nodes_recipe(config: Config, vocab_size: int) -> list[RecipeStep]:
    """Returns the steps of --recipe nodes. Raises ConfigError if the number of devices is not a multiple of
    the node size, or if the model cannot be sharded over the devices of a node."""
    network = find_network(config)
    if network is None:
        raise ConfigError(NO_GPU)
    world, node = config.parallel.world_size, network.node_size
    if world % node:
        raise ConfigError(
            f"--recipe nodes: {counted(world, 'device')} cannot be divided by --node-size {node}. Change one "
            "of them."
        )
    nodes = world // node
    ranks = max(n for n in range(1, nodes + 1) if nodes % n == 0 and n <= config.model.num_layers)
    change = {
        **tensor_parallel_change(config, node),
        "parallel.pipeline_model_parallel_size": ranks,
        "parallel.zero_stage": 1 if nodes > ranks else 0,
        "batch.micro_batch_size": 1,
    }
    first = evaluate(config, change, vocab_size)
    least, most = (factor * ranks for factor in _ACCUMULATION)
    count = first.prediction.micro_batches
    advice = "as the recipe recommends"
    if not least <= count <= most:
        batch = 12 * ranks * first.config.parallel.data_parallel_size
        advice = f"the recipe recommends {least} to {most} (a global batch of about {batch} samples)"
    text = (
        f"TP = {node} (devices per node), PP = {ranks}, micro-batch 1: {count} accumulation steps; {advice}"
    )
    steps = [(text, first)]
    return steps + _grow(config, vocab_size, change, first)


def _grow(config: Config, vocab_size: int, change: Change, last: Plan) -> list[RecipeStep]:
    """Returns the steps that double the micro-batch as long as the plan fits and is faster. If the plan
    `last` does not fit, the first step recomputes all layers."""
    steps: list[RecipeStep] = []
    if not last.fits and not config.training.recomputes_layers:
        change = {**change, **recomputation(layers=True)}
        last = evaluate(config, change, vocab_size)
        steps.append(("the first step does not fit: all layers are recomputed", last))
    while True:
        size = 2 * last.config.batch.micro_batch_size
        try:
            larger = evaluate(config, {**change, "batch.micro_batch_size": size}, vocab_size)
        except UserError:
            return steps
        if not larger.fits:
            steps.append((f"micro-batch {size} does not fit", larger))
            return steps
        if larger.tokens_per_second <= last.tokens_per_second:
            steps.append((f"micro-batch {size} fits but is slower: the previous micro-batch is kept", larger))
            return steps
        steps.append((f"micro-batch {size} fits and is faster", larger))
        last = larger


def micro_batch_recipe(config: Config, vocab_size: int) -> list[RecipeStep]:
    """Returns the steps of --recipe micro-batch. Raises ConfigError if the whole model fits with no size of
    tensor parallelism (within a node) and pipeline parallelism."""
    few_layers = {
        **tensor_parallel_change(config, 1),
        "parallel.expert_model_parallel_size": 1,
        "parallel.pipeline_model_parallel_size": 1,
        "parallel.zero_stage": 0,
        "parallel.world_size": 1,
        "model.num_layers": min(_FEW_LAYERS, config.model.num_layers),
    }
    largest = _largest(config, vocab_size, few_layers, (64, 32, 16, 8, 4, 2, 1))
    if largest is None:
        raise ConfigError(
            f"--recipe micro-batch: {few_layers['model.num_layers']} layers do not fit on one device. Set "
            "--recipe nodes."
        )
    size = largest.config.batch.micro_batch_size
    steps = [
        (f"the largest micro-batch of {few_layers['model.num_layers']} layers on one device: {size}", largest)
    ]
    network = find_network(config)
    assert network is not None
    world = config.parallel.world_size
    shapes = sorted(
        (tp * pp, pp, tp)
        for tp in range(1, network.node_size + 1)
        for pp in range(1, config.model.num_layers + 1)
        if world % (tp * pp) == 0 and config.model.heads_problem(tp) is None
    )
    sizes = tuple(n for n in (64, 32, 16, 8, 4, 2, 1) if n <= max(size, 1))
    for devices, pp, tp in shapes:
        change = {
            **tensor_parallel_change(config, tp),
            "parallel.pipeline_model_parallel_size": pp,
            "parallel.zero_stage": 1 if world > devices else 0,
        }
        whole = _largest(config, vocab_size, change, sizes)
        if whole is not None:
            text = f"the whole model on the fewest devices per replica, {devices}: TP {tp}, PP {pp}"
            return [*steps, (text, whole)]
    raise ConfigError(
        f"--recipe micro-batch: the model does not fit on {counted(world, 'device')} or any part of them. "
        "Add devices, or set --checkpoint-activations."
    )


def _largest(config: Config, vocab_size: int, change: Change, sizes: tuple[int, ...]) -> Plan | None:
    """Returns the plan with the largest micro-batch size that is valid and fits; None if none does. sizes:
    the sizes, largest first."""
    for size in sizes:
        try:
            plan = evaluate(config, {**change, "batch.micro_batch_size": size}, vocab_size)
        except UserError:
            continue
        if plan.fits:
            return plan
    return None


RECIPES: dict[str, Callable[[Config, int], list[RecipeStep]]] = {
    "nodes": nodes_recipe,
    "micro-batch": micro_batch_recipe,
}
