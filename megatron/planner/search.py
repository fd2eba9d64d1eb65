"""Searches for the fastest layout that fits, over all sizes of TP (within a node), PP, DP, micro-batch, and
more.

It is a best-first search over full plans (`megatron.planner.plan`). It begins with a plain layout for each
size of TP, CP and PP. Then it plans all `variations` of the best layouts found so far; each variation changes
one setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from math import isqrt
from operator import attrgetter
from typing import Any

from megatron.arguments import validate
from megatron.config import Config, ConfigError
from megatron.config.registries import PIPELINE_SCHEDULES
from megatron.config.sections.training import recomputation
from megatron.errors import UserError
from megatron.planner.network import find_network
from megatron.planner.plan import NO_GPU, Plan, make_plan, recomputation_of
from megatron.training.out_of_memory import cheap_modules, stores_scores

PARTITION_METHODS = ("type:transformer", "type:transformer|embedding", "time", "memory")
VIRTUAL_STAGES = (2, 4)
PLANNED = 300
"""A search ends when it has planned this many layouts."""
_AT_ONCE = 3
"""Number of layouts whose variations are planned at the same time."""
_SLOWER = 1.1
"""A search also ends when the next layout to vary takes this many times as long as the fastest step."""

_NAMED_IF_CHANGED = (
    "parallel.expert_model_parallel_size",
    "parallel.virtual_pipeline_stages",
    "parallel.tp_comm_overlap",
    "training.recompute_modules",
)

Change = Mapping[str, Any]
"""The settings that a layout changes: 'section.field' -> value."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. candidates: plans that fit, fastest first. too_large: plans that do not fit."""

    candidates: tuple[Plan, ...]
    too_large: tuple[Plan, ...]

    @property
    def planned(self) -> int:
        """Number of layouts that were planned."""
        return len(self.candidates) + len(self.too_large)


def changed(config: Config, change: Change) -> Config:
    """Returns the configuration with the changed settings. Raises ConfigError if they contradict each
    other."""
    result = config.with_settings(change)
    validate(result)
    return result


def evaluate(config: Config, change: Change, vocab_size: int) -> Plan:
    """Returns the full plan with the changed settings. Raises ConfigError if they are invalid, or if --gpu is
    not given."""
    plan = make_plan(changed(config, change), vocab_size, change)
    if plan.step is None:
        raise ConfigError(NO_GPU)
    return plan


def search(config: Config, vocab_size: int, planned: int = PLANNED) -> SearchResult:
    """Returns the result of a search over the layouts of `config.parallel.world_size` devices. planned: see
    `PLANNED`. Raises ConfigError if --gpu is not given, or if no layout is valid."""
    network = find_network(config)
    if network is None:
        raise ConfigError(NO_GPU)
    seen: set[Config] = set()
    plans: list[Plan] = []
    varied: set[int] = set()

    def evaluate_one(change: Change) -> Plan | UserError:
        try:
            return evaluate(config, change, vocab_size)
        except UserError as error:
            return error

    def plan_new(changes: Iterable[Change]) -> list[Plan | UserError]:
        new = {config.with_settings(change): change for change in changes}
        new = {layout: change for layout, change in new.items() if layout not in seen}
        seen.update(new)
        # Threads suffice, because other processes do the recording, which takes most of the time.
        with ThreadPoolExecutor() as pool:
            made = list(pool.map(evaluate_one, new.values()))
        plans.extend(one for one in made if not isinstance(one, UserError))
        return made

    first = plan_new(first_layouts(config, network.node_size))[0]
    if not plans:
        raise ConfigError(f"no layout of the search is valid. The first one: {first}")
    while len(plans) < planned:
        best = min((p.prediction.total for p in plans if p.fits), default=None)
        key = _cost if best is not None else attrgetter("peak_bytes")
        next_ones = sorted((p for p in plans if id(p) not in varied), key=key)[:_AT_ONCE]
        if not next_ones or (best is not None and _cost(next_ones[0]) > _SLOWER * best):
            break
        varied.update(map(id, next_ones))
        least = min(plan.peak_bytes for plan in plans)
        plan_new(
            {**plan.change, **change}
            for plan in next_ones
            for _, change in variations(plan.config)
            if network.node_size % change.get("parallel.tensor_model_parallel_size", 1) == 0
        )
        if best is None and min(plan.peak_bytes for plan in plans) >= least:
            break  # no layout fits, and no variation reduces the memory
    unique: dict[Any, Plan] = {}
    for plan in sorted(plans, key=lambda plan: -plan.tokens_per_second):
        layout = plan.config.with_settings({"parallel.partition_method": ""})
        unique.setdefault((layout, tuple(plan.run.stages.bounds)), plan)
    fitting = tuple(plan for plan in unique.values() if plan.fits)
    return SearchResult(fitting, tuple(plan for plan in unique.values() if not plan.fits))


def _cost(plan: Plan) -> float:
    """Returns the seconds of a step. For a layout that does not fit, the seconds are multiplied by the square
    of (needed memory / device memory), because a variation that fits takes longer."""
    assert plan.device_bytes is not None
    return plan.prediction.total * max(1.0, (plan.peak_bytes + plan.reserve_bytes) / plan.device_bytes) ** 2


def first_layouts(config: Config, node_size: int) -> Iterator[Change]:
    """Yields layouts with micro-batch 1 for each size of TP within a node, of CP (if the sequences are long
    enough) and of PP. With experts there is one without EP, and one with the largest EP within a node. Each
    layout is yielded with the partition method of the flags, and with the default method."""
    world, layers, experts = config.parallel.world_size, config.model.num_layers, config.model.num_experts
    own = config.parallel.partition_method
    for tp_size, cp_size, pp_size in product(_divisors(world), repeat=3):
        if (
            world % (tp_size * cp_size * pp_size)
            or node_size % tp_size
            or config.model.heads_problem(tp_size)
        ):
            continue
        if pp_size > layers or (cp_size > 1 and not config.is_long_enough_for(cp_size)):
            continue
        ranks = min(world // pp_size, node_size)
        ep_sizes = {1, max(n for n in _divisors(ranks) if (experts or 1) % n == 0)}
        methods = {own, PARTITION_METHODS[0]} if pp_size > 1 else {own}
        for ep_size, method in product(sorted(ep_sizes), sorted(methods)):
            layout = {
                "parallel.tensor_model_parallel_size": tp_size,
                "parallel.pipeline_model_parallel_size": pp_size,
                "parallel.context_parallel_size": cp_size,
                "parallel.expert_model_parallel_size": ep_size,
                "parallel.zero_stage": 1 if tp_size * pp_size < world else 0,
                "parallel.pipeline_schedule": "1f1b",
                "parallel.virtual_pipeline_stages": 1,
                "parallel.sequence_parallel": tp_size > 1,
                "parallel.tp_comm_overlap": tp_size > 1 and config.parallel.tp_comm_overlap,
                "batch.micro_batch_size": 1,
                **recomputation(),
                **({} if method == own else _partition(method)),
            }
            yield {
                n: value
                for n, value in layout.items()
                if n not in _NAMED_IF_CHANGED or config.value(n) != value
            }


def _partition(method: str) -> dict[str, Any]:
    return {"parallel.partition_method": method, "parallel.partition_profile": None}


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def tensor_parallel_change(config: Config, size: int) -> dict[str, Any]:
    """Returns the change to this tensor-parallel size. With experts it includes sequence parallelism."""
    change: dict[str, Any] = {"parallel.tensor_model_parallel_size": size}
    if size == 1:
        change |= {"parallel.sequence_parallel": False, "parallel.tp_comm_overlap": False}
    elif config.model.num_experts is not None:
        change["parallel.sequence_parallel"] = True
    return change


def variations(config: Config) -> Iterator[tuple[str, Change]]:
    """Yields (title, change) for changes of one setting of the layout: sizes doubled and halved, and other
    choices of settings. No change affects the losses. Some changes may be invalid."""
    parallel, model = config.parallel, config.model
    pp_size, cp_size = parallel.pipeline_model_parallel_size, parallel.context_parallel_size
    for size in _doubled_and_halved(parallel.tensor_model_parallel_size):
        yield f"tensor-parallel size {size}", tensor_parallel_change(config, size)
    for size in _doubled_and_halved(pp_size):
        yield f"pipeline-parallel size {size}", {"parallel.pipeline_model_parallel_size": size}
    for size in _doubled_and_halved(config.batch.micro_batch_size):
        yield f"micro-batch size {size}", {"batch.micro_batch_size": size}
    for size in _doubled_and_halved(cp_size):
        if size < cp_size or config.is_long_enough_for(size):
            yield f"context-parallel size {size}", {"parallel.context_parallel_size": size}
    for size in _doubled_and_halved(parallel.expert_model_parallel_size) if model.num_experts else ():
        yield f"expert-parallel size {size}", {"parallel.expert_model_parallel_size": size}
    for modules in dict.fromkeys(((), cheap_modules(config), ("core_attn",) * stores_scores(config))):
        title = " ".join(modules) or "none"
        if title != recomputation_of(config):
            yield f"recompute {title}", recomputation(modules)
    if not config.training.recomputes_layers:
        yield "recompute full", recomputation(layers=True)
    for stage in range(4) if parallel.dp_cp_size > 1 else ():
        if stage != parallel.zero_stage:
            yield f"ZeRO {stage}", {"parallel.zero_stage": stage}
    own = (parallel.pipeline_schedule, parallel.virtual_pipeline_stages)
    for schedule, virtual in schedules(pp_size, model.num_layers, config.micro_batches_per_step):
        if (schedule, virtual) != own:
            title = f"schedule {schedule}" + (f" x {virtual}" if virtual > 1 else "")
            change = {"parallel.pipeline_schedule": schedule, "parallel.virtual_pipeline_stages": virtual}
            if PIPELINE_SCHEDULES[schedule].splits_backward:
                change["parallel.tp_comm_overlap"] = False
            yield title, change
    for method in PARTITION_METHODS if pp_size > 1 else ():
        if method != parallel.partition_method:
            yield f"partition {method}", _partition(method)
    if parallel.tensor_model_parallel_size > 1 and model.num_experts is None:
        flag = not parallel.sequence_parallel
        change = {"parallel.sequence_parallel": flag, "parallel.tp_comm_overlap": False}
        yield f"sequence parallel {'on' if flag else 'off'}", change


def _doubled_and_halved(size: int) -> list[int]:
    return [2 * size, *([size // 2] if size % 2 == 0 else [])]


def schedules(pp_size: int, layers: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """Yields (schedule, --virtual-pipeline-stages) for which a replica has enough layers and
    micro-batches."""
    yield "1f1b", 1
    for name, schedule in PIPELINE_SCHEDULES.items() if pp_size > 1 else ():
        if name == "1f1b" or micro_batches < schedule.micro_batches_per_rank * pp_size:
            continue
        if schedule.micro_batches_multiple_of_ranks and micro_batches % pp_size:
            continue
        for stages in (schedule.stages_per_rank,) if schedule.stages_per_rank else VIRTUAL_STAGES:
            if stages * pp_size <= layers:
                yield name, 1 if schedule.stages_per_rank else stages
