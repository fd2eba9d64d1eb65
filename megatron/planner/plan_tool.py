"""What `tools/plan.py` prints and writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import Config, ConfigError
from megatron.page.figure import new_figure
from megatron.planner.command import replaced
from megatron.planner.explain import (
    explain,
    layout_words,
    search_table,
    what_if,
    what_if_table,
)
from megatron.planner.memory.fit import fit_summary
from megatron.planner.plan import Plan, assemble_plan, make_plan
from megatron.planner.recipes import RECIPES
from megatron.planner.report import run_report
from megatron.planner.search import NO_GPU, Candidate, search
from megatron.planner.stages import plan_stages
from megatron.planner.timing.step_time import time_lines
from megatron.tokenizer.vocabulary import find_vocabulary
from megatron.units import GIB

_IN_JSON = 20


@dataclass(frozen=True)
class Report:
    """The text, the data of --json, and the plan of --plot: of a search, the fastest."""

    text: str
    data: dict[str, Any]
    plan: Plan


def plan_report(config: Config) -> Report:
    """The plan of a run, and what one change at a time would give."""
    vocab_size = find_vocabulary(config).size
    stages = plan_stages(config, vocab_size)
    plan = make_plan(config, vocab_size, stages)
    # Without the step, which follows the line on the memory.
    parts = [run_report(config, stages, vocab_size, [], "", plan.memory)]
    _, sentence = fit_summary(config, vocab_size, plan.memory)
    lines = f"memory     {sentence or 'with --gpu the plan says whether it fits'}"
    if plan.step is not None:
        plan = dataclasses.replace(plan, what_if=what_if(config, vocab_size))
        assert plan.step is not None
        lines += "\n" + time_lines(plan.step)
        parts += [lines, what_if_table(plan.what_if, plan.step)]
    else:
        parts.append(f"{lines}\ntime       {NO_GPU}")
    return Report("\n\n".join(part.strip("\n") for part in parts), plan.as_dict(), plan)


def search_report(config: Config, words: Sequence[str], top: int) -> Report:
    """The fastest layouts that fit, explained. ConfigError if none fits. words: the flags of `config`."""
    vocab_size = find_vocabulary(config).size
    result = search(config, vocab_size)
    if not result.candidates:
        raise ConfigError(_nothing_fits(config, result.too_large))
    best = result.candidates[:_IN_JSON]
    text = [
        f"{result.combinations:,} combinations for {config.parallel.world_size} devices, "
        f"{result.planned} planned in full, {len(result.candidates)} fit",
        search_table(best[: max(top, 10)]),
        *(explain(number, one, result, vocab_size, words) for number, one in enumerate(best[:top], 1)),
    ]
    plans = [_plan_of(one, vocab_size) for one in best]
    plan = plans[0] = dataclasses.replace(plans[0], what_if=what_if(best[0].config, vocab_size))
    data = {
        "combinations": result.combinations,
        "planned": result.planned,
        "candidates": [
            {**of_layout.as_dict(), "flags": replaced(words, one.change)}
            for one, of_layout in zip(best, plans, strict=True)
        ],
    }
    assert plan.step is not None
    text.append(f"layout 1, {what_if_table(plan.what_if, plan.step)}")
    return Report("\n\n".join(text), data, plan)


def recipe_report(config: Config, words: Sequence[str], recipe: str) -> Report:
    """The steps of a recipe. ConfigError if it cannot be followed. words: the flags of `config`."""
    vocab_size = find_vocabulary(config).size
    steps = RECIPES[recipe](config, vocab_size)
    text = [f"recipe {recipe}"]
    data = []
    for number, step in enumerate(steps, 1):
        one = step.candidate
        _, memory = fit_summary(one.config, vocab_size, one.memory)
        flags = replaced(words, one.change)
        text.append(
            f"{number}. {step.text}\n{layout_words(one.config)}\nmemory     {memory}\n"
            f"{time_lines(one.step)}\nflags      {' '.join(flags)}"
        )
        data.append({"text": step.text, "flags": flags, **_plan_of(one, vocab_size).as_dict()})
    # The first step of the micro-batch recipe is a part of the model on one device.
    whole = [s.candidate for s in steps if s.candidate.config.model == config.model]
    kept = max((one for one in whole if one.fits), key=_rate, default=whole[-1])
    return Report("\n\n".join(text), {"steps": data}, _plan_of(kept, vocab_size))


def _plan_of(one: Candidate, vocab_size: int) -> Plan:
    return assemble_plan(one.config, vocab_size, one.stages, one.memory, one.step)


def _rate(one: Candidate) -> float:
    return one.tokens_per_second


def _nothing_fits(config: Config, planned: Sequence[Candidate]) -> str:
    text = f"no layout of {config.parallel.world_size} devices of kind {config.training.gpu} fits"
    if planned:
        least = min(planned, key=lambda one: one.peak_bytes)
        text += (
            f": the smallest planned needs {least.peak_bytes / GIB:.1f} GiB ({layout_words(least.config)})"
        )
    return f"{text}; add devices, or --checkpoint-activations, --sequence-parallel or --cpu-offload"


def draw(plan: Plan, path: str) -> None:
    """Writes the picture of a plan: memory of each rank by part, and the timeline of the schedule."""
    rows = 2 if plan.timeline else 1
    try:
        with new_figure(Path(path), rows, figsize=(11, 4 * rows)) as (_, axes):
            _draw_memory(axes[0, 0], plan)
            if plan.timeline:
                _draw_timeline(axes[1, 0], plan)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written ({error}): give another file") from None


def _draw_memory(axis: Any, plan: Plan) -> None:
    ranks = range(len(plan.memory))
    below = [0.0] * len(ranks)
    for name in ("state", "activations", "head", "temporaries", "tables"):
        sizes = [getattr(part, name) / GIB for part in plan.memory]
        axis.bar(ranks, sizes, bottom=below, label=name)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    if plan.device_bytes is not None:
        usable = plan.device_bytes - plan.reserve_bytes
        axis.axhline(usable / GIB, color="black", linestyle="--", label="device, less the reserve")
    axis.set_xlabel("pipeline rank")
    axis.set_ylabel("GiB per device")
    axis.legend()


def _draw_timeline(axis: Any, plan: Plan) -> None:
    # One colour per kind of pass; with two stages per rank the second one is lighter.
    colours = {"forward": "tab:blue", "backward": "tab:green", "weight": "tab:orange"}
    ranks = len(plan.memory)
    for kind, colour in colours.items():
        for rank in range(ranks):
            for second in (False, True):
                events = [
                    event
                    for event in plan.timeline
                    if event.rank == rank and event.kind == kind and (event.stage >= ranks) == second
                ]
                spans = [(event.start, event.end - event.start) for event in events]
                alpha = 0.55 if second else 1.0
                axis.broken_barh(spans, (rank - 0.4, 0.8), facecolors=colour, edgecolor="white", alpha=alpha)
    axis.set_yticks(range(ranks))
    axis.invert_yaxis()
    axis.set_ylabel("pipeline rank")
    axis.set_xlabel(
        f"seconds, first {plan.timeline_micro_batches} micro-batches; forward blue, backward green"
        f"{', gradients of weights orange' * any(event.kind == 'weight' for event in plan.timeline)}"
    )
